"""The hardware that `heed plan` knows: memory, peak rates, links and price."""

import os
import time
from dataclasses import dataclass

import torch

import lm.native.install  # noqa: F401  # matrix products as a model's layers compute them
from lm.layers import linear

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """The hardware of one rank. `flops` is the dense bf16 peak per second; on a CPU it is a measured rate.

    A GPU sends `link_bytes_per_second` to the GPUs of its node and, through its part of the node's network cards,
    `network_bytes_per_second` to other nodes; each is one direction. `dollars_per_hour` is roughly what clouds charge
    for one, not a quote; `--price` replaces it.
    """

    name: str
    memory_bytes: int
    flops: float
    bytes_per_second: float
    dollars_per_hour: float
    link_bytes_per_second: float = 0.0
    network_bytes_per_second: float = 0.0
    is_gpu: bool = True

    @property
    def usual_share(self) -> float:
        """The share of `flops` to expect, if the user gives none. On a GPU it is that of matrix products, most of the
        four fifths that the best ones reach (792 of an H100's 989 TFLOP/s: S. Bekman, Machine Learning Engineering). On
        a CPU it is that of whole steps, in the measured rate of a product.
        """
        return 0.65 if self.is_gpu else 0.4


# Peaks and bandwidths are from NVIDIA's data sheets, without sparsity (H200, H100 and A100 80 GB as SXM modules, L40S;
# for the B200, an eighth of a DGX B200). Memory is about what CUDA makes available. Links are NVLink's, half of the
# sheets' sum of both directions; an L40S has PCIe 4.0 x16. Networks are those of DGX systems, a card of 400 Gbit/s per
# GPU (A100: 200); for an L40S, half a card of 200 Gbit/s is assumed.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Hardware("b200", 178 * GIB, 2250e12, 8.0e12, 6.0, 900e9, 50e9),
        Hardware("h200", 139 * GIB, 989e12, 4.8e12, 4.0, 450e9, 50e9),
        Hardware("h100", 79 * GIB, 989e12, 3.35e12, 3.0, 450e9, 50e9),
        Hardware("a100", 79 * GIB, 312e12, 2.039e12, 2.0, 300e9, 25e9),
        Hardware("l40s", 44 * GIB, 362e12, 0.864e12, 1.2, 32e9, 12.5e9),
    )
}
# What CUDA's context, NCCL's buffers and cuBLAS's workspaces take of a GPU: 1.5 to 2.5 GiB.
RESERVED_BYTES = 5 * GIB // 2


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


def _product_rate(dtype: torch.dtype) -> float:
    """Measures floating-point operations per second of a square linear map on all cores: the best of a few."""
    size = 1024
    x, weight = torch.randn(2, size, size).to(dtype)
    return 2 * size**3 / min(_seconds(lambda: linear(x, weight, None)) for _ in range(8))


def _copy_rate() -> float:
    """Measures how many bytes per second this machine reads."""
    source = torch.zeros(16_000_000)
    return source.nbytes / min(_seconds(source.sum) for _ in range(5))


def _seconds(work: object) -> float:
    assert callable(work)
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
