"""Measures Heed on one GPU against the GPU's own limits: `python -m benchmarks.gpu`."""

from benchmarks.gpu import bare

bare.install()
