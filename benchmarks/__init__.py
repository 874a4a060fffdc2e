"""Measurements of Heed: one module per question, each a command that prints or writes its table."""
