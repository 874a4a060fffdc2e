"""Positions: rotary, with context extension, and sinusoidal.

Shape letters: B batch, T tokens, N heads, H head dim, h = H/2 frequencies, D model width.
"""

import math

import torch
from torch import Tensor

from lm.config import RopeScaling

Rotary = tuple[Tensor, Tensor]  # cos and signed sin, [B, T, 1, H]


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Radians per token for each pair of dimensions, [h]: θ^(-2i/H), stretched as `scaling` says."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequencies_h = theta**-exponents
    if scaling is None:
        return frequencies_h
    if scaling.rope_type == "linear":
        return frequencies_h / scaling.factor
    assert scaling.original_max_position_embeddings is not None  # the config's own check
    turns_h = scaling.original_max_position_embeddings * frequencies_h / (2 * math.pi)  # in the original context
    if scaling.rope_type == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept_h = ((turns_h - low) / (high - low)).clamp(0, 1)
    else:
        kept_h = 1 - _yarn_ramp(head_dim, theta, scaling, device)
    return frequencies_h * (kept_h + (1 - kept_h) / scaling.factor)


def _yarn_ramp(head_dim: int, theta: float, scaling: RopeScaling, device: torch.device) -> Tensor:
    """0 where a pair turns `beta_fast` times in the original context, 1 at `beta_slow`, linear in its index."""

    def index_of(turns: float) -> float:
        assert scaling.original_max_position_embeddings is not None
        return (
            head_dim
            * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(theta))
        )

    first = max(math.floor(index_of(scaling.beta_fast)), 0)
    last = min(math.ceil(index_of(scaling.beta_slow)), head_dim - 1)
    index_h = torch.arange(head_dim // 2, device=device, dtype=torch.float32)
    return ((index_h - first) / max(last - first, 0.001)).clamp(0, 1)


def attention_sharpening(scaling: RopeScaling | None) -> float:
    """The factor on queries and keys: YaRN's 0.1 ln(factor) + 1 (arXiv 2309.00071, eq. 22), else 1."""
    return 0.1 * math.log(scaling.factor) + 1 if scaling is not None and scaling.rope_type == "yarn" else 1.0


def rotary_tables(
    positions_BT: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and signed sin [B, T, 1, H] of position · frequency, each frequency twice (arXiv 2104.09864, eq. 34).

    The sine's first half is negative: with it a rotation is two products and a roll.
    """
    frequencies_h = rotary_frequencies(head_dim, theta, scaling, positions_BT.device)
    angles_BTh = positions_BT[..., None].float() * frequencies_h
    sharpening = attention_sharpening(scaling)
    cos, sin = angles_BTh.cos() * sharpening, angles_BTh.sin() * sharpening
    tables = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    return tables[0].to(dtype)[:, :, None], tables[1].to(dtype)[:, :, None]


def rotate(x_BTNH: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (x_i, x_{i+H/2}), the layout of the Hugging Face checkpoints."""
    cos, sin = rotary
    return torch.addcmul(x_BTNH * cos, x_BTNH.roll(x_BTNH.shape[-1] // 2, dims=-1), sin)


def sinusoids(positions_BT: Tensor, width: int) -> Tensor:
    """e(t) [B, T, D]: sin and cos of t · 10000^(-2i/D) at dimensions 2i and 2i+1 (arXiv 1706.03762, section 3.5)."""
    exponents = torch.arange(0, width, 2, device=positions_BT.device, dtype=torch.float32) / width
    angles_BTi = positions_BT[..., None].float() * 10_000.0**-exponents
    return torch.stack([angles_BTi.sin(), angles_BTi.cos()], dim=-1).flatten(-2)


def shift_matrix(num_tokens: int, width: int) -> Tensor:
    """The linear map [D, D] with `sinusoids(t + num_tokens) = shift_matrix(num_tokens) @ sinusoids(t)` for every t.

    Each pair (sin, cos) is turned by its own angle, num_tokens · 10000^(-2i/D): relative positions are linear.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    angles_i = num_tokens * 10_000.0**-exponents
    turns = [torch.tensor([[math.cos(a), math.sin(a)], [-math.sin(a), math.cos(a)]]) for a in angles_i.tolist()]
    return torch.block_diag(*turns)
