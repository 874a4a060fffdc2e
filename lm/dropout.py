"""Dropout whose masks depend on the data alone, and the keys that they are drawn from.

Shape letters: B batch, T tokens, D columns, G groups of four columns.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lm.layers import Replaceable, as_dtype
from lm.transfer import upload

LEVELS = 1 << 16  # a column is dropped if its 16 bits are below rate · LEVELS
GROUP = 4  # columns that share 64 bits


class Dropout(nn.Module):
    """x / (1 - rate) where kept, else 0; x itself outside training. The rate is rounded to a multiple of 1 / 65,536.

    Masks depend on the data, never on how a batch is split: a mask is a function of (seed of the step, sequence,
    position, site in the model, column). Nothing is drawn in order, so micro-batches, ranks, padding, packing and
    recomputation all drop the same numbers, on CPUs and GPUs alike. It is a counter-based generator as in Salmon et al.
    (Random123, 2011): the finaliser of SplitMix64 (Steele et al. 2014) over a counter; 64 bits decide about four
    columns.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.threshold = min(round(rate * LEVELS), LEVELS - 1)

    @property
    def is_active(self) -> bool:
        """Whether it currently drops anything."""
        return self.training and self.threshold > 0

    def forward(self, x: Tensor, keys: Tensor | None, site: int) -> Tensor:
        """`keys` has x's dimensions without the last; `site` numbers the dropouts that apply to the same token."""
        if not self.is_active:
            return x
        assert keys is not None, "dropout draws its masks from the sequences' keys, and none were given"
        site_keys = mix(keys + site_offset(site)).expand(x.shape[:-1]).contiguous()
        return drop(x, site_keys, self.threshold)

    def extra_repr(self) -> str:
        return f"rate={self.threshold / LEVELS:g}"


@Replaceable
def drop(x: Tensor, keys: Tensor, threshold: int) -> Tensor:
    """Set some columns of x to 0 and scale the others to keep the expectation; `keys` is [...], x [..., D]."""
    return _Dropout.apply(x, keys, threshold)  # type: ignore[no-untyped-call]


class _Dropout(torch.autograd.Function):
    """Saves only the keys for the backward pass, which draws the mask again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, threshold: int) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.threshold = threshold
        return _masked(x, keys, threshold)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (keys,) = ctx.saved_tensors
        return _masked(gradient, keys, ctx.threshold), None, None


def _masked(x: Tensor, keys: Tensor, threshold: int) -> Tensor:
    kept = torch.where(kept_columns(keys, x.shape[-1], threshold), x * dropout_scale(threshold), 0.0)
    return as_dtype(kept, x.dtype)


def dropout_scale(threshold: int) -> float:
    """1 / (share of columns kept)."""
    return LEVELS / (LEVELS - threshold)


def kept_columns(keys: Tensor, width: int, threshold: int) -> Tensor:
    """Returns the dropout mask [..., D]; True = kept."""
    counter_G = (torch.arange(-(-width // GROUP), device=keys.device) + 1) * GOLDEN
    bits = mix(keys[..., None] + counter_G).view(torch.int16)[..., :width]
    return bits >= threshold - LEVELS // 2  # 16 bits as a signed number: uniform from -32,768 on


def _signed(number: int) -> int:
    """Returns the lowest 64 bits as a signed integer, as PyTorch stores them."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


GOLDEN = _signed(0x9E3779B97F4A7C15)  # the counter's step, 2⁶⁴ / φ
FIRST_FACTOR, SECOND_FACTOR = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def sequence_keys(seed: int, numbers: NDArray[np.int64], device: torch.device) -> Tensor:
    """Returns the dropout keys of sequences from their numbers in the data set, in the same shape.

    A model takes them as [B, 1], one sequence per row, or as [B, T], one per token, for packed rows.
    """
    return keys_on_device(seed, upload(torch.from_numpy(np.asarray(numbers, dtype=np.int64)), device))


def keys_on_device(seed: int | Tensor, numbers: Tensor) -> Tensor:
    """Computes `sequence_keys` of numbers that are on the device; so may the seed be."""
    return mix(seed + (numbers + 1) * GOLDEN)


def token_keys(keys_BT: Tensor, positions_BT: Tensor, part: int) -> Tensor:
    """Returns the dropout keys of tokens [B, T] from their sequences' keys and their positions.

    `part` distinguishes the parts of a model that see the same positions.
    """
    return mix(mix(keys_BT + _signed(part * GOLDEN)) + (positions_BT + 1) * GOLDEN)


def site_offset(site: int) -> int:
    """Returns what a dropout site adds to a token's key. Offsets add up: site 2 plus site 3 is site 5."""
    return _signed(site * GOLDEN)


def mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser, a bijection of 64 bits; PyTorch's `>>` extends the sign, which the masks remove."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * FIRST_FACTOR
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * SECOND_FACTOR
    return z ^ ((z >> 31) & ((1 << 33) - 1))
