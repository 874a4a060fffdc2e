"""Norms, and the residual stream on its way through them. Shape letters: B batch, T tokens, D model width."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from lm.config import ModelConfig
from lm.native import ops

Stream = tuple[Tensor, Tensor | None]  # the residual stream, and a branch that is yet to be added to it


def compute_dtype(x: Tensor) -> torch.dtype:
    """What a matrix product with x gives: autocast's type where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, computed in fp32 (arXiv 1910.07467, eq. 4)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    """PyTorch takes RMSNorm apart into eight passes over memory on a CPU; written out it needs half as many, and one in
    a kernel.

    With n = x / rms(x):  dx = (g·w - n · mean(g·w·n)) / rms(x),  dw = Σ g·n.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # What follows is a matrix product, so under autocast the result may as well come rounded for it.
        dtype = compute_dtype(x)
        if ops.runs(x, weight) and dtype in ops.TYPES:
            y, inverse_rms = ops.rms_norm(x, weight, eps, dtype)
        else:
            wide = x.float()
            inverse_rms = (torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.shape[-1] + eps).rsqrt()
            y = (wide * inverse_rms * weight).to(dtype)
        ctx.save_for_backward(x, inverse_rms, weight)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, inverse_rms, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        if ops.runs(gradient, x, weight):
            x_gradient, _, weight_gradient = ops.rms_norm_backward(gradient, x, weight, inverse_rms)
            return x_gradient, weight_gradient.to(weight.dtype), None
        normed, wide = x.float() * inverse_rms, gradient.float()
        product = wide * normed
        weight_gradient = product.sum(dim=tuple(range(product.dim() - 1)))
        mean = (product @ weight.float()).unsqueeze(-1) / normed.shape[-1]
        x_gradient = torch.addcmul(wide * weight, normed, mean, value=-1).mul_(inverse_rms)
        return x_gradient.to(x.dtype), weight_gradient.to(weight.dtype), None


class _AddRMSNorm(torch.autograd.Function):
    """x + branch and its norm, by the CPU's kernel: the stream passes through memory once, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, y, inverse_rms = ops.add_rms_norm(x, branch, weight, eps)
        ctx.save_for_backward(total, inverse_rms, weight)
        ctx.set_materialize_grads(False)  # nothing but the last norm may look at the stream
        return total, y

    @staticmethod
    def backward(ctx: Any, carried: Tensor | None, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        total, inverse_rms, weight = ctx.saved_tensors
        assert gradient is not None, "what is normed is used"
        x_gradient, branch_gradient, weight_gradient = ops.rms_norm_backward(
            gradient.contiguous(), total, weight, inverse_rms,
            carried=None if carried is None else carried.contiguous(), has_branch=True,
        )  # fmt: skip
        return x_gradient, branch_gradient, weight_gradient.to(weight.dtype), None


def make_norm(config: ModelConfig, width: int) -> nn.Module:
    """The config's kind of norm over `width` numbers."""
    return RMSNorm(width, config.norm_eps) if config.norm == "rms" else nn.LayerNorm(width, config.norm_eps)


def add_norm(x_BTD: Tensor, branch_BTD: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """The residual stream with the last branch added to it, if there is one yet, and its norm."""
    if branch_BTD is None:
        return x_BTD, norm(x_BTD)
    if isinstance(norm, RMSNorm) and ops.runs(x_BTD, branch_BTD, norm.weight):
        return _AddRMSNorm.apply(x_BTD, branch_BTD, norm.weight, norm.eps)  # type: ignore[no-untyped-call]
    x_BTD = x_BTD + branch_BTD
    return x_BTD, norm(x_BTD)
