"""Stage 6: samples policies and compares them, with honest confidence intervals."""
