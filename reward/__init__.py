"""Stage 4: a reward model from rankings."""
