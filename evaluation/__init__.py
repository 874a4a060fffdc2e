"""Stage 6: sampling policies and comparing them with honest intervals."""
