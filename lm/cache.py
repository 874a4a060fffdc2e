"""Keys and values that a decoder keeps of the tokens it has read, and a mixture's routes.

Shape letters: B rows, T tokens of a pass, S key tokens, N tokens of a pass that are stored, G key-value heads, H head
dim, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.config import ModelConfig
from lm.experts import no_routes


class PassCache(Protocol):
    """How one pass of a decoder stores and reads keys and values."""

    def append(self, layer: int, k_BGTH: Tensor, v_BGTH: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens of one layer; return the keys and values that they attend to, [B, G, S, H] each."""

    def choose(self, layer: int, experts_NK: Tensor) -> Tensor:
        """Store the experts of one layer's tokens, in a mixture; return them (`lm.experts.PassRoutes`)."""


class KVCache:
    """Keys and values of all layers, [L, B, G, C, H] each: token t of the sequence in slot b is in column t. That of a
    mixture also has the tokens' experts, [L, B, C, K].

    It is allocated once. Sequences are written, moved and overwritten in place, and each needs one column per token.
    """

    def __init__(self, keys: Tensor, values: Tensor, routes: Tensor | None = None) -> None:
        self.keys, self.values, self.routes = keys, values, routes

    @classmethod
    def empty(cls, config: ModelConfig, num_slots: int, num_columns: int, like: Tensor) -> Self:
        """Returns a cache for this shape of model, with the dtype and device of `like`."""
        shape = (config.num_hidden_layers, num_slots, config.num_key_value_heads, num_columns, config.head_dim)
        # Zeros, although unwritten columns are masked: 0 times uninitialised memory may be NaN.
        routes = no_routes(config, shape[0], num_slots, num_columns, like=like) if config.num_experts else None
        return cls(like.new_zeros(shape), like.new_zeros(shape), routes)

    @property
    def num_slots(self) -> int:
        return self.keys.shape[1]

    @property
    def num_columns(self) -> int:
        return self.keys.shape[3]

    def write(self, layer: int, k_NGH: Tensor, v_NGH: Tensor, slots_N: Tensor, columns_N: Tensor) -> None:
        """Store tokens of one layer, each at its slot and column."""
        self.keys[layer][slots_N, :, columns_N] = k_NGH.to(self.keys.dtype)
        self.values[layer][slots_N, :, columns_N] = v_NGH.to(self.values.dtype)

    def write_routes(self, layer: int, experts_NK: Tensor, slots_N: Tensor, columns_N: Tensor) -> None:
        """Store the experts of one layer's tokens, each at its slot and column."""
        assert self.routes is not None, "only the cache of a mixture has routes"
        self.routes[layer][slots_N, columns_N] = experts_NK.to(self.routes.dtype)

    def copy_slots(self, pairs: Sequence[tuple[int, int]], num_columns: int) -> None:
        """Copy the first columns of slots, given as (from, to), all at once: a target may be another copy's source.

        The copies take extra memory for one layer at a time.
        """
        source_B, target_B = torch.tensor(pairs, device=self.keys.device).unbind(dim=1)
        for part in (*self.keys, *self.values):
            part[target_B, :, :num_columns] = part[source_B, :, :num_columns]
        if self.routes is not None:
            self.routes[:, target_B, :num_columns] = self.routes[:, source_B, :num_columns]


class PromptWriter:
    """The cache of a pass over prompts: each prompt attends to itself, and everything but padding is stored.

    `places_N` are the tokens' places in the flattened [B, T].
    """

    def __init__(self, cache: KVCache, places_N: Tensor, slots_N: Tensor, columns_N: Tensor) -> None:
        self.cache, self.places_N, self.slots_N, self.columns_N = cache, places_N, slots_N, columns_N

    def append(self, layer: int, k_BGTH: Tensor, v_BGTH: Tensor) -> tuple[Tensor, Tensor]:
        k_NGH, v_NGH = (part.transpose(1, 2).flatten(0, 1)[self.places_N] for part in (k_BGTH, v_BGTH))
        self.cache.write(layer, k_NGH, v_NGH, self.slots_N, self.columns_N)
        return k_BGTH, v_BGTH

    def choose(self, layer: int, experts_NK: Tensor) -> Tensor:
        self.cache.write_routes(layer, experts_NK[self.places_N], self.slots_N, self.columns_N)
        return experts_NK


class TokenWriter:
    """The cache of a decoding step (T = 1): the sequences in the first slots write one column each, and read the first
    `num_columns`, written or not.
    """

    def __init__(self, cache: KVCache, columns_B: Tensor, num_columns: int) -> None:
        self.cache, self.columns_B, self.num_columns = cache, columns_B, num_columns
        self.slots_B = torch.arange(len(columns_B), device=columns_B.device)

    def append(self, layer: int, k_BGTH: Tensor, v_BGTH: Tensor) -> tuple[Tensor, Tensor]:
        self.cache.write(layer, k_BGTH[:, :, 0], v_BGTH[:, :, 0], self.slots_B, self.columns_B)
        return self.kept(layer)

    def choose(self, layer: int, experts_NK: Tensor) -> Tensor:
        self.cache.write_routes(layer, experts_NK, self.slots_B, self.columns_B)
        return experts_NK

    def kept(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of one layer, [B, G, S, H] each: views of the cache."""
        B, S = len(self.columns_B), self.num_columns
        return self.cache.keys[layer, :B, :, :S], self.cache.values[layer, :B, :, :S]


@dataclass(frozen=True)
class CrossAttentionCache:
    """An encoder's states as a decoder's blocks read them: keys and values per layer, [B, G, S, H], computed once."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    real_BS: Tensor  # False at padding

    def keep(self, rows: Sequence[int]) -> "CrossAttentionCache":
        """Returns these rows, in this order."""
        rows_B = torch.tensor(rows, device=self.real_BS.device)
        keys, values = (tuple(part[rows_B] for part in parts) for parts in (self.keys, self.values))
        return CrossAttentionCache(keys, values, self.real_BS[rows_B])

    def join(self, other: "CrossAttentionCache") -> "CrossAttentionCache":
        """Returns the rows of both caches; the shorter is padded on the right."""
        width = max(self.real_BS.shape[1], other.real_BS.shape[1])

        def padded(part: Tensor, dims_after: int) -> Tensor:
            missing = width - part.shape[-1 - dims_after]
            return F.pad(part, (0, 0) * dims_after + (0, missing))

        def joined(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(torch.cat([padded(a, 1), padded(b, 1)]) for a, b in zip(ours, theirs, strict=True))

        real_BS = torch.cat([padded(self.real_BS, 0), padded(other.real_BS, 0)])
        return CrossAttentionCache(joined(self.keys, other.keys), joined(self.values, other.values), real_BS)
