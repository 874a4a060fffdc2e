"""Norms. Shape letters: D model width."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from lm.config import ModelConfig
from lm.replaceable import Replaceable


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type of a matrix product with x: autocast's where it is enabled."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, computed in fp32 (arXiv 1910.07467, eq. 4)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # A matrix product follows, so under autocast the result may as well be rounded for it.
        return rms_norm(x, self.weight, self.eps, compute_dtype(x))


@Replaceable
def rms_norm(x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight as `dtype`, [..., D]."""
    return _RMSNorm.apply(x, weight_D, eps, dtype)  # type: ignore[no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    """Half the passes over memory that autograd's own formula would take.

    With n = x / rms(x):  dx = (g·w - n · mean(g·w·n)) / rms(x),  dw = Σ g·n.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = x.float()
        inverse_rms = (torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, inverse_rms, weight)
        return (wide * inverse_rms * weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, inverse_rms, weight = ctx.saved_tensors
        normed, wide = x.float() * inverse_rms, gradient.float()
        product = wide * normed
        weight_gradient = product.sum(dim=tuple(range(product.dim() - 1)))
        mean = (product @ weight.float()).unsqueeze(-1) / normed.shape[-1]
        x_gradient = torch.addcmul(wide * weight, normed, mean, value=-1).mul_(inverse_rms)
        return x_gradient.to(x.dtype), weight_gradient.to(weight.dtype), None, None


def make_norm(config: ModelConfig, width: int) -> nn.Module:
    """The config's kind of norm over `width` numbers."""
    return RMSNorm(width, config.norm_eps) if config.norm == "rms" else nn.LayerNorm(width, config.norm_eps)
