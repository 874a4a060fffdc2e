"""The head over the vocabulary, whose products have aligned rows on GPUs.

cuBLAS reads and writes the matrices of bf16 products several numbers at a time, and only if their rows begin at
multiples of 16 bytes. Logits of 50,257 tokens have rows that do not, so all three products of the head would use slower
kernels. On GPUs the head multiplies by a copy of its weight with rows of 0 at the end, and the logits are a view that
ends with the vocabulary. So weights, checkpoints and files know nothing of it. Not yet measured on a GPU.

Shape letters: C positions, D model width, V vocabulary, P padded vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.linear import Linear
from lm.norms import compute_dtype

ALIGNED_ROWS = 64  # 128 bytes in bf16


class Head(Linear):
    """x Wᵀ + b, [..., V]. W has `row_multiple` as a divisor of its rows, or is padded in each pass."""

    row_multiple = 1

    def forward(self, x: Tensor) -> Tensor:
        V = len(self.weight)
        if V % self.row_multiple == 0:
            return super().forward(x)
        P, dtype = -(-V // self.row_multiple) * self.row_multiple, compute_dtype(x)
        weight_PD, bias_P = (part if part is None else pad_rows(part, P, dtype) for part in (self.weight, self.bias))
        assert weight_PD is not None
        return F.linear(x, weight_PD, bias_P)[..., :V]


def align_heads(model: nn.Module, device: torch.device, row_multiple: int = ALIGNED_ROWS) -> None:
    """Give the products of a model's head aligned rows where `device` is a GPU.

    Models that are compared bit by bit, such as a policy and its reference, need the same.
    """
    for module in model.modules():
        if isinstance(module, Head) and device.type == "cuda":
            module.row_multiple = row_multiple


def padded_rows(logits_CV: Tensor) -> Tensor:
    """The logits [C, P] whose first columns are a head's [C, V], or these themselves where none were added.

    A gradient for all of them goes to the head's product as it is; one for the view would be copied.
    """
    whole, (C, V), (P, step) = logits_CV._base, logits_CV.shape, logits_CV.stride()
    if whole is None or P <= V or step != 1 or logits_CV.storage_offset():
        return logits_CV
    is_padded = whole.is_contiguous() and whole.shape[-1] == P and whole.numel() == C * P
    return whole.view(C, P) if is_padded else logits_CV


def pad_rows(values: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    """The rows, and rows of 0, as `dtype`."""
    return _PadRows.apply(values, num_rows, dtype)  # type: ignore[no-untyped-call]


class _PadRows(torch.autograd.Function):
    """Rounds and pads in one pass; the gradient's rows are taken as they are."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
        ctx.like = (len(values), values.dtype)
        padded = values.new_empty(num_rows, *values.shape[1:], dtype=dtype)
        padded[: len(values)] = values
        padded[len(values) :] = 0
        return padded

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        num_rows, dtype = ctx.like
        return gradient[:num_rows].to(dtype), None, None
