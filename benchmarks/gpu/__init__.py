"""Heed on one GPU beside what the GPU itself can do: `python -m benchmarks.gpu`."""
