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


def round_products(model: nn.Module) -> None:
    """Keep frozen weights in bf16 that autocast would round at every use, which gives the same bits."""
    for parameter in rounded_weights(model):
        parameter.data = parameter.data.bfloat16()


def rounded_weights(model: nn.Module) -> Iterator[nn.Parameter]:
    """Frozen weights that only products in bf16 use: no embedding's table that a head shares, no head in fp32."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        is_product = isinstance(module, nn.Linear) and not isinstance(module, Fp32Linear)
        if is_product and id(module.weight) not in tables:
            yield from (p for p in module.parameters(recurse=False) if not p.requires_grad)


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
