"""The hardware that `heed plan` knows: memory, peak rates, a price."""

import os
import time
from dataclasses import dataclass

import torch

import lm.native.install  # noqa: F401  # products as a model's layers compute them
from lm.layers import linear

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """What one rank runs on. `flops` is the dense bf16 peak per second; on a CPU it is a measured rate.

    `dollars_per_hour` is a round figure of what clouds charge for one, not a quote; `--price` replaces it.
    """

    name: str
    memory_bytes: int
    flops: float
    bytes_per_second: float
    dollars_per_hour: float
    is_gpu: bool = True


# Peaks and bandwidths are from NVIDIA's data sheets, without sparsity (H200, H100 and A100 80 GB as SXM modules, L40S;
# for the B200, an eighth of a DGX B200). Memory is about what CUDA makes available.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Hardware("b200", 178 * GIB, 2250e12, 8.0e12, 6.0),
        Hardware("h200", 139 * GIB, 989e12, 4.8e12, 4.0),
        Hardware("h100", 79 * GIB, 989e12, 3.35e12, 3.0),
        Hardware("a100", 79 * GIB, 312e12, 2.039e12, 2.0),
        Hardware("l40s", 44 * GIB, 362e12, 0.864e12, 1.2),
    )
}


def hardware(name: str, ranks: int, precision: str) -> Hardware:
    """Returns a GPU by its name; for "cpu", a rank's share of this machine, whose rates are measured in about a second.

    Raises: ValueError for a name that is not known.
    """
    if name == "cpu":
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        at_once = min(ranks, os.cpu_count() or 1)
        rate, bandwidth = _product_rate(dtype), _copy_rate()
        return Hardware("cpu", memory // at_once, rate / at_once, bandwidth / at_once, 0.0, is_gpu=False)
    if name not in GPUS:
        raise ValueError(f"--gpu {name!r}: one of cpu, {', '.join(GPUS)} was expected")
    return GPUS[name]


def _product_rate(dtype: torch.dtype, size: int = 1024) -> float:
    """Measures floating-point operations per second of a square linear map on all cores: the best of a few."""
    x, weight = torch.randn(2, size, size).to(dtype)
    return 2 * size**3 / min(_seconds(lambda: linear(x, weight, None)) for _ in range(8))


def _copy_rate(numbers: int = 16_000_000) -> float:
    """Measures how many bytes per second this machine reads."""
    source = torch.zeros(numbers)
    return 4 * numbers / min(_seconds(source.sum) for _ in range(5))


def _seconds(work: object) -> float:
    assert callable(work)
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
