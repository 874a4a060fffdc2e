"""Linear maps whose weight's gradient a CPU with a matrix unit computes in fp32, as it is summed.

Shape letters: R tokens, D in, F out.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from lm.native import ops

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
    """x Wᵀ + b. Under bf16 autocast, a CPU's matrix unit sums the weight's gradient in fp32, and it stays so."""

    def forward(self, x: Tensor) -> Tensor:
        learns = torch.is_grad_enabled() and self.weight.requires_grad
        if learns and _is_autocast(x) and ops.sums_gradients(self.weight):
            return _Linear.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return super().forward(x)


def _is_autocast(x: Tensor) -> bool:
    return x.is_cpu and torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16


class _Linear(torch.autograd.Function):
    """dX = dY W, dW = dYᵀ X, db = Σ dY."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        narrow, narrow_weight = x.bfloat16(), _round(weight)
        ctx.save_for_backward(narrow, narrow_weight)
        ctx.x_dtype = x.dtype  # type: ignore[attr-defined]
        return F.linear(narrow, narrow_weight, None if bias is None else _round(bias))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias = ctx.needs_input_grad
        gradient_RF, x_RD = gradient.reshape(-1, gradient.shape[-1]).contiguous(), x.reshape(-1, x.shape[-1])
        x_gradient = (gradient @ weight).to(ctx.x_dtype) if needs_x else None
        bias_gradient = gradient_RF.sum(dim=0, dtype=torch.float32) if needs_bias else None
        return x_gradient, ops.weight_gradient(gradient_RF, x_RD.contiguous()), bias_gradient


def _round(weight: Tensor) -> Tensor:
    known = _rounded.get()
    if known is None:
        return weight.bfloat16()
    if weight not in known:
        known[weight] = weight.bfloat16()
    return known[weight]
