"""Estimates with 95% intervals: clustered shares and means, score intervals, the bootstrap. No torch."""
