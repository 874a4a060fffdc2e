"""The device's limits: rates of bf16 matrix products at the models' own shapes, and of a memory copy.

Shape letters: M rows of the product (tokens), N columns out, K columns in.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.gpu.device import now
from benchmarks.gpu.rows import Pretraining, Row
from lm.config import ModelConfig
from lm.model import LanguageModel
from lm.source import on_meta

Product = tuple[str, int, int, int]  # "forward", "input" or "weight" (its two gradients), M, N, K
SHORTEST_SECONDS = 0.1  # per measurement
NUM_MEASUREMENTS = 3  # the median counts


def training_products(model: ModelConfig, num_tokens: int) -> Counter[Product]:
    """Returns the weight products of one micro-batch with this many tokens, forward and backward."""
    modules = on_meta(lambda: LanguageModel(model)).modules()
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    return Counter(
        (way, num_tokens, linear.out_features, linear.in_features)
        for linear in linears
        for way in ("forward", "input", "weight")
    )


def matrix_rate(products: Counter[Product], device: torch.device) -> float:
    """Returns the FLOP/s of all these products in bf16, each measured separately, on random numbers."""
    seconds = sum(number * _product_seconds(product, device) for product, number in products.items())
    return sum(2.0 * number * M * N * K for (_, M, N, K), number in products.items()) / seconds


def copy_rate(num_bytes: int, device: torch.device) -> float:
    """Returns the bytes per second of a copy, read and written."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source), device)


def rates(rows: Sequence[Row], device: torch.device, copied_bytes: int) -> dict[str, float]:
    """Returns the copy's rate as "bytes", and by name the product rate of each row that pretrains."""
    found = {"bytes": copy_rate(copied_bytes, device)}
    for row in rows:
        if isinstance(row.sizes, Pretraining):
            tokens = row.sizes.micro_batch * row.sizes.seq_len
            found[row.name] = matrix_rate(training_products(row.sizes.model, tokens), device)
    return found


def _product_seconds(product: Product, device: torch.device) -> float:
    way, M, N, K = product
    draw = partial(torch.randn, dtype=torch.bfloat16, device=device)
    if way == "input":
        gradient_MN, weight_NK = draw(M, N), draw(N, K)
        return seconds_of(lambda: gradient_MN @ weight_NK, device)
    if way == "weight":
        gradient_MN, x_MK = draw(M, N), draw(M, K)
        return seconds_of(lambda: gradient_MN.T @ x_MK, device)
    x_MK, weight_NK = draw(M, K), draw(N, K)
    return seconds_of(lambda: F.linear(x_MK, weight_NK), device)


@torch.inference_mode()
def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of one run: the median of several measurements, each of enough runs to last long enough."""
    work()
    started = now(device)
    work()
    repeats = max(1, math.ceil(SHORTEST_SECONDS / max(now(device) - started, 1e-6)))
    measure = by_events if device.type == "cuda" else _by_clock
    return median(measure(work, repeats) for _ in range(NUM_MEASUREMENTS))


def by_events(work: Callable[[], object], repeats: int) -> float:
    """Returns seconds per run between two events in the device's queue, so only the first run waits for the CPU."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    for _ in range(repeats):
        work()
    ended.record()
    ended.synchronize()
    return begun.elapsed_time(ended) / 1000 / repeats


def _by_clock(work: Callable[[], object], repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - started) / repeats
