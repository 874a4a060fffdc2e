"""Measures of one or several policies, and of a reward model. docs/measures.md explains each."""
