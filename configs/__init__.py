"""Job files; values only."""
