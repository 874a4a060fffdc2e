"""Compares Heed with its peers on the same model, data, batch and precision: `python -m benchmarks.speed`."""
