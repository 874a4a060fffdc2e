"""Estimates of memory and time from a model's shape: what `heed plan` counts."""
