"""The hardware that `heed plan` knows (memory, peak rates, price), and how long work takes on it.

Times are floating-point operations at a fraction of the hardware's peak; for sampling, also the bytes of weights and
cache, which are read once per token.
"""

import math
import os
import time
from dataclasses import dataclass

import torch

import lm.native.install  # noqa: F401  # matrix products as a model's layers compute them
from lm.config import ModelConfig
from lm.inspection import cache_bytes_per_token, flops_per_source_token, flops_per_token
from lm.layers import linear
from stages.planning.memory import GENERATION_ROWS, Counts, Layout

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """The hardware of one rank. `flops` is the dense bf16 peak per second; on a CPU it is a measured rate.

    `dollars_per_hour` is roughly what clouds charge for one, not a quote; `--price` replaces it.
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


@dataclass(frozen=True)
class Times:
    """Times of one model on ranks that reach the fraction `share_of_peak` of this hardware's peak."""

    model: ModelConfig
    layout: Layout
    hardware: Hardware
    share_of_peak: float

    def forward_flops(self, seq_len: int, head_share: float) -> float:
        """Returns a forward pass's FLOPs per token; the head is computed for the fraction `head_share` of tokens."""
        # A causal token attends to half the row on average. On a CPU all pairs are computed, as for encoders.
        is_half = self.model.kind == "decoder" and self.layout.is_gpu
        context = (seq_len + 1) // 2 if is_half else seq_len
        flops = float(flops_per_token(self.model, context))
        if self.model.kind == "encoder-decoder":
            flops += flops_per_source_token(self.model, context)
        has_head = self.model.kind != "encoder"
        return flops - (1 - head_share) * has_head * 2 * self.model.vocab_size * self.model.hidden_size

    def passes(self, counts: Counts) -> float:
        """Returns a training step's cost in forward passes. A backward pass counts as two, leaving out frozen blocks.
        Through frozen maps with adapters it counts as one, since it computes no gradients of the maps' weights.
        """
        backward, num_layers = 1 if counts.ranks else 2, self.model.num_hidden_layers + self.model.num_encoder_layers
        return 1 + backward * counts.trained_layers / num_layers

    def compute_seconds(self, flops: float) -> float:
        """Returns the seconds that all ranks together need for `flops`."""
        return flops / (self.layout.ranks * self.hardware.flops * self.share_of_peak)

    def sampling_seconds(self, parameters: int, rows: int, seq_len: int, response_tokens: int) -> float:
        """Returns one rank's seconds. Each token of each batch of rows reads all weights and the cache."""
        hardware, c = self.hardware, self.layout.compute_bytes
        turns = math.ceil(rows / GENERATION_ROWS)
        cache = cache_bytes_per_token(self.model, c) * min(rows, GENERATION_ROWS) * seq_len
        read = turns * response_tokens * (c * parameters + cache) / hardware.bytes_per_second
        computed = rows * seq_len * self.forward_flops(seq_len, 1.0) / hardware.flops
        return (read + computed) / self.share_of_peak
