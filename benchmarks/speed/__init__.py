"""Heed and its peers side by side on the same model, data, batch and precision: `python -m benchmarks.speed`."""
