"""How tokens get their positions: rotary angles (arXiv 2104.09864), sinusoids, and T5's bias per relative distance.

Shape letters: B batch, T query tokens, S key tokens, D model width, N heads, G key-value heads, H head dim,
h = H/2 frequencies, E = (N + 2G) H.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lm.config import ModelConfig, RopeScaling, yarn_factor

Rotary = tuple[Tensor, Tensor]  # cos and signed sin, [B, T, 1, H]


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Returns radians per token for each pair of dimensions, [h]: θ^(-2i/H), stretched as `scaling` says."""
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
    """Returns 0 where a pair turns `beta_fast` times in the original context, 1 at `beta_slow`, linear in its index."""

    def index_of(turns: float) -> float:
        assert scaling.original_max_position_embeddings is not None
        return (
            head_dim
            * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(theta))
        )

    first, last = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    index_h = torch.arange(head_dim // 2, device=device, dtype=torch.float32)
    return ((index_h - first) / max(last - first, 0.001)).clamp(0, 1)


def rope_divisors(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Returns the numbers by which a scaling divides the rotary frequencies, [h]."""
    device = torch.device("cpu")
    return rotary_frequencies(head_dim, theta, None, device) / rotary_frequencies(head_dim, theta, scaling, device)


def llama3_scaling(theta: float, divisors_h: Tensor, name: str) -> dict[str, Any]:
    """Recovers the fields of Llama 3's scaling from the numbers that divide the frequencies.

    Between the two bounds, 1 / divisor is linear in the frequency, and this line gives the bounds. The third number,
    the original context, can be chosen freely, since only its ratios to the bounds count; published models have a low
    bound of 1.
    Raises: ValueError, naming the tensor, for divisors that follow another formula.
    """
    unlike = f"{name} scales the rotary frequencies by an unknown formula; Llama 3's was expected"
    factor = float(str(np.float32(divisors_h.max())))  # the shortest decimal
    between = (divisors_h > 1 + 1e-4) & (divisors_h < factor * (1 - 1e-4))
    if int(between.sum()) < 2:
        raise ValueError(unlike)
    frequencies_h = rotary_frequencies(2 * len(divisors_h), theta, None, divisors_h.device)
    turns = frequencies_h[between] / (2 * math.pi)
    kept = (1 / divisors_h[between] - 1 / factor) / (1 - 1 / factor)
    slope = float((kept[0] - kept[-1]) / (turns[0] - turns[-1]))
    low_over_span = float(turns[0]) * slope - float(kept[0])  # low / (high - low)
    if low_over_span <= 0 or slope <= 0:
        raise ValueError(unlike)
    fields = {
        "factor": factor,
        "original_max_position_embeddings": round(slope / low_over_span),
        "low_freq_factor": 1.0,
        "high_freq_factor": round(1 + 1 / low_over_span, 4),
    }
    scaling = RopeScaling.model_validate({"rope_type": "llama3", **fields})
    if not torch.allclose(rope_divisors(2 * len(divisors_h), theta, scaling), divisors_h, rtol=1e-3):
        raise ValueError(unlike)
    return fields


def attention_sharpening(scaling: RopeScaling | None) -> float:
    """Returns YaRN's factor on queries and keys, else 1."""
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    return scaling.attention_factor or yarn_factor(scaling.factor)


def query_scale(positions_BT: Tensor, scaling: RopeScaling | None, dtype: torch.dtype) -> Tensor | None:
    """Returns the factor on each token's queries [B, 1, T, 1] of `llama_4_scaling_beta`; None without it."""
    if scaling is None or not scaling.llama_4_scaling_beta:
        return None
    assert scaling.original_max_position_embeddings is not None  # the config's own check
    contexts_BT = (positions_BT / scaling.original_max_position_embeddings).floor()
    return (1 + scaling.llama_4_scaling_beta * contexts_BT.log1p()).to(dtype)[:, None, :, None]


def rotary_tables(
    positions_BT: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns cos and signed sin [B, T, 1, H] of position · frequency, each frequency twice (arXiv 2104.09864, eq. 34).

    The first half of the sines is negated, so that a rotation takes two products and a roll.
    """
    frequencies_h = rotary_frequencies(head_dim, theta, scaling, positions_BT.device)
    angles_BTh = positions_BT[..., None].float() * frequencies_h
    sharpening = attention_sharpening(scaling)
    cos, sin = angles_BTh.cos() * sharpening, angles_BTh.sin() * sharpening
    tables = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    return tables[0].to(dtype)[:, :, None], tables[1].to(dtype)[:, :, None]


def rotate(x_BTNH: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (x_i, x_{i+H/2}), the layout of the Hugging Face checkpoints.

    With tables of R < H columns, only the first R dimensions are rotated, as if the head had no others.
    """
    cos, sin = rotary
    if (R := cos.shape[-1]) < x_BTNH.shape[-1]:
        return torch.cat([rotate(x_BTNH[..., :R], rotary), x_BTNH[..., R:]], dim=-1)
    return torch.addcmul(x_BTNH * cos, x_BTNH.roll(x_BTNH.shape[-1] // 2, dims=-1), sin)


def neighbours_apart(x: Tensor) -> Tensor:
    """Reorder the last dimension, (0, 1, 2, ...) to (0, 2, ..., 1, 3, ...): what `rotate` then turns together are
    neighbours in the checkpoint (`rope_interleave`). Products of queries and keys stay the same.
    """
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def turns_whole_heads(qkv_BTE: Tensor, rotary: Rotary, num_heads: int, num_kv_heads: int) -> bool:
    """Whether rotary tables have a column per dimension of a head, which Heed's kernels need."""
    return rotary[0].shape[-1] * (num_heads + 2 * num_kv_heads) == qkv_BTE.shape[-1]


def sinusoids(positions_BT: Tensor, width: int) -> Tensor:
    """e(t) [B, T, D]: sin and cos of t · 10000^(-2i/D) at dimensions 2i and 2i+1 (arXiv 1706.03762, section 3.5)."""
    exponents = torch.arange(0, width, 2, device=positions_BT.device, dtype=torch.float32) / width
    angles_BTi = positions_BT[..., None].float() * 10_000.0**-exponents
    return torch.stack([angles_BTi.sin(), angles_BTi.cos()], dim=-1).flatten(-2)


def relative_buckets(ahead: Tensor, num_buckets: int, max_distance: int, *, causal: bool) -> Tensor:
    """Returns T5's bucket of each distance, in tokens from the query to the key, negative backwards (arXiv 1910.10683,
    section 2.1, and Mesh TensorFlow's `_relative_position_bucket`).

    The nearer half of the buckets have one distance each. The others grow with its logarithm, and the last one starts
    before `max_distance`. An encoder has half of the buckets for each direction; a decoder looks only backwards.
    """
    if causal:
        first, distance = torch.zeros_like(ahead), (-ahead).clamp(min=0)
    else:
        num_buckets //= 2
        first, distance = (ahead > 0) * num_buckets, ahead.abs()
    exact = num_buckets // 2
    growth = (distance.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    far = exact + (growth * (num_buckets - exact)).long()
    return first + torch.where(distance < exact, distance, far.clamp(max=num_buckets - 1))


class RelativeBias(nn.Embedding):
    """A number per head and bucket of distances, which is added to the scores of self-attention in every layer (T5)."""

    def __init__(self, config: ModelConfig, *, causal: bool) -> None:
        super().__init__(config.relative_attention_num_buckets, config.num_attention_heads)
        self.max_distance, self.causal = config.relative_attention_max_distance, causal

    def forward(self, ahead_BTS: Tensor, seen_BTS: Tensor) -> Tensor:  # type: ignore[override]
        """Returns the numbers [B, N, T, S] to add to scores, -∞ where `seen_BTS` is False; `ahead_BTS` counts tokens
        from the query to the key.
        """
        buckets_BTS = relative_buckets(ahead_BTS, self.num_embeddings, self.max_distance, causal=self.causal)
        return super().forward(buckets_BTS).movedim(-1, 1).masked_fill(~seen_BTS[:, None], -torch.inf)

    def of_rows(self, mask_BTT: Tensor | None, tokens_BT: Tensor) -> Tensor:
        """Returns the numbers for whole rows; the mask is as in `lm.attention`, None = causal.

        Distances between places are those between positions: sequences of a row are contiguous.
        """
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        ahead_1TT = (places_T - places_T[:, None])[None]
        return self(ahead_1TT, ahead_1TT <= 0 if mask_BTT is None else mask_BTT)

    def of_step(self, last_B: Tensor, num_columns: int) -> Tensor:
        """Returns the numbers [B, N, 1, S] for a decoding step, in which a row's query is in column `last_B`."""
        ahead_B1S = (torch.arange(num_columns, device=last_B.device) - last_B[:, None])[:, None]
        return self(ahead_B1S, ahead_B1S <= 0)
