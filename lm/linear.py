"""Linear maps, and bf16 copies of their weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.replaceable import Replaceable

# fp32 tensors by their bf16 copies, while `cache_weight_casts` is active.
_rounded: ContextVar[dict[Tensor, Tensor] | None] = ContextVar("rounded", default=None)


@contextmanager
def cache_weight_casts() -> Iterator[None]:
    """Caches each weight's bf16 cast across passes. Use it while weights are fixed."""
    if _rounded.get() is not None:
        yield
        return
    token = _rounded.set({})
    try:
        yield
    finally:
        _rounded.reset(token)


class Linear(nn.Linear):
    """x Wᵀ + b."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Fp32Linear(nn.Linear):
    """x Wᵀ + b in fp32, from operands of any type: a head whose few results would tie if bf16 rounded them.

    Scores of 4 to 8 are 1/32 apart in bf16.
    """

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())


@Replaceable
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b."""
    return F.linear(x, weight, bias)


def cast(weight: Tensor) -> Tensor:
    """The weight in bf16: the cached copy inside `cache_weight_casts`."""
    known = _rounded.get()
    if known is None:
        return weight.bfloat16()
    if weight not in known:
        known[weight] = weight.bfloat16()
    return known[weight]
