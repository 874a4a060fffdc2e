"""Estimates of memory and time from a model's shape, for `heed plan`."""
