"""From one product for Q, K and V to heads that know their positions.

Shape letters: B batch, T tokens, N heads, G key-value heads, H head dim, E = (N + 2G) H.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from lm.native import ops
from lm.positions import rotate

Rotary = tuple[Tensor, Tensor]  # cos and signed sin, [B, T, 1, H]


def split_heads(
    qkv_BTE: Tensor, rotary: Rotary | None, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, N, T, H], k and v [B, G, T, H]; q and k are rotated where there are tables."""
    tables = rotary or ()
    if ops.runs(qkv_BTE, *tables) and all(table.dtype == qkv_BTE.dtype for table in tables):
        return _SplitHeads.apply(qkv_BTE, *(rotary or (None, None)), num_heads, num_kv_heads)  # type: ignore[no-untyped-call]
    N, G = num_heads, num_kv_heads
    turned, v = qkv_BTE.unflatten(-1, (N + 2 * G, -1)).split([N + G, G], dim=2)
    if rotary is not None:
        turned = rotate(turned, rotary)
    q, k = turned.split([N, G], dim=2)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class _SplitHeads(torch.autograd.Function):
    """The same in one pass, by the CPU's kernel; the gradient is turned back by the transposed rotation."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, qkv_BTE: Tensor, cos: Tensor | None, sin: Tensor | None, num_heads: int, num_kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)  # type: ignore[arg-type]
        return ops.split_heads(qkv_BTE, None if cos is None or sin is None else (cos, sin), num_heads, num_kv_heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = (gradient.contiguous() for gradient in gradients)
        cos, sin = ctx.saved_tensors
        return ops.join_heads(q, k, v, None if cos is None else (cos, sin)), None, None, None, None
