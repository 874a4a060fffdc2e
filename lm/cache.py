"""What a decoder keeps of the tokens it has read: keys and values, the states of linear layers, a mixture's routes.

Shape letters: B rows, T tokens of a pass, S key tokens, N tokens of a pass that are stored, G key-value heads, H head
dim, K experts per token; L layers, of which A have attention.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.config import ModelConfig
from lm.experts import no_routes

State = tuple[Tensor, Tensor]  # of a linear layer (`lm.delta`): one of each head, and the convolution's inputs


class PassCache(Protocol):
    """How one pass of a decoder stores and reads keys and values, or states of linear layers."""

    def append(self, layer: int, k_BGTH: Tensor, v_BGTH: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens of one layer; return the keys and values that they attend to, [B, G, S, H] each."""

    def state(self, layer: int) -> State | None:
        """Returns a linear layer's state before a decoding step, which changes it in place; None = rows start here."""

    def keep_state(self, layer: int, state: State) -> None:
        """Store a linear layer's state after rows that start in this pass."""

    def choose(self, layer: int, experts_NK: Tensor) -> Tensor:
        """Store the experts of one layer's tokens, in a mixture; return them (`lm.experts.PassRoutes`)."""


class KVCache:
    """Keys and values of the layers with attention, [A, B, G, C, H] each: token t of the sequence in slot b is in
    column t. That of a mixture also has the tokens' experts, [L, B, C, K], and linear layers have a `State` each.

    It is allocated once. Sequences are written, moved and overwritten in place, and each needs one column per token.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, routes: Tensor | None = None, states: Mapping[int, State] | None = None
    ) -> None:
        self.keys, self.values, self.routes, self.states = keys, values, routes, states or {}
        layers = range(len(keys) + len(self.states))
        self._places = {n: place for place, n in enumerate(n for n in layers if n not in self.states)}

    @classmethod
    def empty(cls, config: ModelConfig, num_slots: int, num_columns: int, like: Tensor) -> Self:
        """Returns a cache for this shape of model, with the dtype and device of `like`."""
        L = config.num_hidden_layers
        shape = L - config.num_linear_layers, num_slots, config.num_key_value_heads, num_columns, config.head_dim
        # Zeros, although unwritten columns are masked: 0 times uninitialised memory may be NaN.
        routes = no_routes(config, L, num_slots, num_columns, like=like) if config.num_experts else None
        states = {layer: empty_state(config, num_slots, like) for layer in range(L) if config.is_linear(layer)}
        return cls(like.new_zeros(shape), like.new_zeros(shape), routes, states)

    @property
    def nbytes(self) -> int:
        """The bytes of keys, values and states."""
        return sum(
            part.nbytes for part in (self.keys, self.values, *(part for pair in self.states.values() for part in pair))
        )

    @property
    def num_slots(self) -> int:
        return self.keys.shape[1]

    @property
    def num_columns(self) -> int:
        return self.keys.shape[3]

    def write(self, layer: int, k_NGH: Tensor, v_NGH: Tensor, slots_N: Tensor, columns_N: Tensor) -> None:
        """Store tokens of one layer, each at its slot and column."""
        place = self._places[layer]
        self.keys[place][slots_N, :, columns_N] = k_NGH.to(self.keys.dtype)
        self.values[place][slots_N, :, columns_N] = v_NGH.to(self.values.dtype)

    def first(self, layer: int, num_slots: int, num_columns: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of one layer in the first slots and columns: views."""
        place = self._places[layer]
        return self.keys[place, :num_slots, :, :num_columns], self.values[place, :num_slots, :, :num_columns]

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
        for state in self.states.values():
            for part in state:
                part[target_B] = part[source_B]
        if self.routes is not None:
            self.routes[:, target_B, :num_columns] = self.routes[:, source_B, :num_columns]


def empty_state(config: ModelConfig, num_rows: int, like: Tensor) -> State:
    """Returns the state of a linear layer before any token: sums in fp32, inputs in the dtype of `like`."""
    P, N, K, V = (
        config.linear_conv_kernel_dim, config.linear_num_value_heads, config.linear_key_head_dim,
        config.linear_value_head_dim,
    )  # fmt: skip
    width = 2 * config.linear_num_key_heads * K + N * V
    return like.new_zeros(num_rows, N, K, V, dtype=torch.float32), like.new_zeros(num_rows, P - 1, width)


def state_bytes(config: ModelConfig, bytes_per_number: int = 2) -> int:
    """Returns the bytes of a sequence's states in all linear layers (`empty_state`), 0 if there are none."""
    if not config.num_linear_layers:
        return 0
    like = torch.empty(0, dtype={2: torch.bfloat16, 4: torch.float32}[bytes_per_number], device="meta")
    return config.num_linear_layers * sum(part.nbytes for part in empty_state(config, 1, like))


class PromptWriter:
    """The cache of a pass over prompts: each prompt attends to itself, and everything but padding is stored.

    `places_N` are the tokens' places in the flattened [B, T]. Linear layers need rows of one prompt each that end in
    the last column, and `slots_B`, the slot of each row.
    """

    def __init__(
        self, cache: KVCache, places_N: Tensor, slots_N: Tensor, columns_N: Tensor, slots_B: Tensor | None = None
    ) -> None:
        self.cache, self.places_N, self.slots_N, self.columns_N = cache, places_N, slots_N, columns_N
        self.slots_B = slots_B

    def state(self, layer: int) -> State | None:  # noqa: ARG002
        return None

    def keep_state(self, layer: int, state: State) -> None:
        assert self.slots_B is not None, "prompts of a model with linear layers are packed"
        for kept, part in zip(self.cache.states[layer], state, strict=True):
            kept[self.slots_B] = part.to(kept.dtype)

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
        return self.cache.first(layer, len(self.columns_B), self.num_columns)

    def state(self, layer: int) -> State | None:
        S, recent = self.cache.states[layer]
        return S[: len(self.columns_B)], recent[: len(self.columns_B)]

    def keep_state(self, layer: int, state: State) -> None:  # noqa: ARG002
        raise AssertionError("a decoding step changes states in place")


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
