"""What attention keeps of tokens already read: a decoder's keys and values, and an encoder's.

Shape letters: L layers, B batch, G key-value heads, S key tokens, T new tokens, H head dim.
"""

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor


class KVCache:
    """Keys and values of all layers, filled from the left: `append` writes the next tokens, `advance` counts them.

    All rows end at the same column, so shorter rows have padding on their left. Writing beyond the capacity raises
    PyTorch's error.
    """

    def __init__(self, keys: Tensor, values: Tensor, length: int) -> None:
        self.keys, self.values, self.length = keys, values, length

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int, int], like: Tensor) -> Self:
        """A cache of shape (layers, rows, key-value heads, tokens, head dim), with the type and device of `like`."""
        return cls(like.new_empty(shape), like.new_empty(shape), 0)

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    def append(self, layer: int, k_BGTH: Tensor, v_BGTH: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens of one layer; return that layer's keys and values so far, [B, G, S, H] each."""
        end = self.length + k_BGTH.shape[2]
        self.keys[layer, :, :, self.length : end] = k_BGTH
        self.values[layer, :, :, self.length : end] = v_BGTH
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def advance(self, num_tokens: int) -> None:
        self.length += num_tokens

    def keep(self, rows: Tensor, first: int = 0) -> None:
        """Keep only these batch rows, in this order (finished sequences leave, a forking beam appears twice), and only
        the columns from `first` on.
        """
        self.keys, self.values = (part[:, :, :, first:].index_select(1, rows) for part in (self.keys, self.values))
        self.length -= first

    def join(self, other: Self, capacity: int) -> Self:
        """The rows of both caches, aligned at their last column."""
        length = max(self.length, other.length)
        joined = []
        for ours, theirs in ((self.keys, other.keys), (self.values, other.values)):
            L, B, G, _, H = ours.shape
            # Padding is masked, but 0 times uninitialised memory may be NaN.
            whole = ours.new_zeros(L, B + theirs.shape[1], G, capacity, H)
            whole[:, :B, :, length - self.length : length] = ours[:, :, :, : self.length]
            whole[:, B:, :, length - other.length : length] = theirs[:, :, :, : other.length]
            joined.append(whole)
        return type(self)(joined[0], joined[1], length)


@dataclass(frozen=True)
class CrossAttentionCache:
    """An encoder's states as a decoder's blocks read them: keys and values per layer, [B, G, S, H], computed once."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    real_BS: Tensor  # False at padding

    def keep(self, rows: Tensor) -> "CrossAttentionCache":
        """These rows, in this order."""
        keys, values = (tuple(part[rows] for part in parts) for parts in (self.keys, self.values))
        return CrossAttentionCache(keys, values, self.real_BS[rows])

    def join(self, other: "CrossAttentionCache") -> "CrossAttentionCache":
        """The rows of both caches; the shorter is padded on the right."""
        width = max(self.real_BS.shape[1], other.real_BS.shape[1])

        def padded(part: Tensor, dims_after: int) -> Tensor:
            missing = width - part.shape[-1 - dims_after]
            return F.pad(part, (0, 0) * dims_after + (0, missing))

        def joined(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(torch.cat([padded(a, 1), padded(b, 1)]) for a, b in zip(ours, theirs, strict=True))

        real_BS = torch.cat([padded(self.real_BS, 0), padded(other.real_BS, 0)])
        return CrossAttentionCache(joined(self.keys, other.keys), joined(self.values, other.values), real_BS)
