"""Evaluation suites: published benchmarks, one file each."""
