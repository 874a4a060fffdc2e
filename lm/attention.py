"""Attention: masks, the product itself, and the key-value cache.

Shape letters: B batch, T query tokens, S key tokens, N heads, G key-value heads, H head dim.
"""

import math
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from lm.native import ops


def attention_mask(segments_BT: Tensor, *, causal: bool = True) -> Tensor:
    """Mask [B, T, S], True = may attend: inside one segment, and backwards only if causal. Padding (segment 0) sees
    padding, so that no row of the softmax is empty.
    """
    same_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
    return same_BTS.tril() if causal else same_BTS


def sliding_window_mask(
    mask_BTS: Tensor | None, window: int, num_queries: int, num_keys: int, device: torch.device
) -> Tensor | None:
    """The mask, and no key further back than `window` tokens, the query's own included; 0 = no limit.

    Queries are the last of the keys' tokens. None stays None (plainly causal) where the band cuts nothing off.
    """
    if not 0 < window < num_keys:
        return mask_BTS
    keys_S = torch.arange(num_keys, device=device)
    queries_T = keys_S[num_keys - num_queries :]
    distance_TS = queries_T[:, None] - keys_S
    near_TS = distance_TS < window
    return (near_TS & (distance_TS >= 0))[None] if mask_BTS is None else mask_BTS & near_TS


def attend(q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, mask_BTS: Tensor | None) -> Tensor:
    """softmax(Q Kᵀ / √H) V, [B, N, T, H]; `mask_BTS` True = may attend, None = plainly causal (T = S).

    On a GPU this is PyTorch's fused kernel, and on a CPU for a single query without gradients. Passes with and without
    gradients must otherwise round alike, for PPO divides the probabilities of one by those of the other: a CPU with a
    matrix unit has a kernel of ours in bf16, and elsewhere the equation is written out, since the backward of PyTorch's
    kernel takes up to four times as long at the lengths of small models.
    """
    if q_BNTH.is_cuda or (q_BNTH.shape[2] == 1 and not q_BNTH.requires_grad):
        mask_B1TS = None if mask_BTS is None else mask_BTS[:, None]
        return F.scaled_dot_product_attention(
            q_BNTH, k_BGSH, v_BGSH, mask_B1TS, is_causal=mask_BTS is None, enable_gqa=True
        )
    if ops.attends(q_BNTH, k_BGSH, v_BGSH):
        return _Attend.apply(q_BNTH, k_BGSH, v_BGSH, mask_BTS)  # type: ignore[no-untyped-call]
    return _written_out(q_BNTH, k_BGSH, v_BGSH, mask_BTS)


def _written_out(q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, mask_BTS: Tensor | None) -> Tensor:
    B, N, T, H = q_BNTH.shape
    G, S = k_BGSH.shape[1:3]
    if mask_BTS is None:
        mask_BTS = torch.ones(1, T, S, dtype=torch.bool, device=q_BNTH.device).tril()
    bias_BTS = q_BNTH.new_zeros(mask_BTS.shape).masked_fill_(~mask_BTS, float("-inf"))
    # Query heads that share a key-value head lie side by side, so grouping them is a reshape, not a copy of K and V.
    rows, batch = N // G * T, len(bias_BTS)
    bias = bias_BTS[:, None, None].expand(batch, G if batch > 1 else 1, N // G, T, S).reshape(-1, rows, S)
    q, k, v = q_BNTH.reshape(B * G, rows, H), k_BGSH.reshape(B * G, S, H), v_BGSH.reshape(B * G, S, -1)
    weights = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=1 / math.sqrt(H)).softmax(dim=-1)
    return torch.bmm(weights, v).view(B, N, T, -1)


class _Attend(torch.autograd.Function):
    """By the CPU's kernel, which keeps no table of weights: the gradient computes them again."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, mask_BTS: Tensor | None) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        mask_BTS = None if mask_BTS is None else mask_BTS.contiguous()
        y_BTNH, totals_BNT = ops.attend(q, k, v, mask_BTS)
        ctx.save_for_backward(q, k, v, y_BTNH, totals_BNT, mask_BTS)  # type: ignore[arg-type]
        return y_BTNH.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient_BNTH: Tensor) -> tuple[Tensor | None, ...]:
        return *ops.attend_backward(gradient_BNTH.transpose(1, 2).contiguous(), *ctx.saved_tensors), None


class KVCache:
    """Keys and values of all layers, filled from the left: `append` writes the next tokens, `advance` moves on.

    Rows end at the same column, so a row that is shorter than others has padding on its left. Errors of PyTorch where
    more is written than the capacity given at the start.
    """

    def __init__(self, keys: Tensor, values: Tensor, length: int) -> None:
        self.keys, self.values, self.length = keys, values, length

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int, int], like: Tensor) -> Self:
        """For (layers, rows, key-value heads, tokens, head dim), of the type and device of `like`."""
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
        """Keep only these batch rows, in this order: finished sequences leave, a beam that forks appears twice.

        Of the columns those from `first` on stay.
        """
        self.keys, self.values = (part[:, :, :, first:].index_select(1, rows) for part in (self.keys, self.values))
        self.length -= first

    def join(self, other: Self, capacity: int) -> Self:
        """The rows of both, ending at the same column: what is shorter moves to the right."""
        length = max(self.length, other.length)
        joined = []
        for ours, theirs in ((self.keys, other.keys), (self.values, other.values)):
            L, B, G, _, H = ours.shape
            # Padding is masked, but 0 times what empty memory holds may be NaN.
            whole = ours.new_zeros(L, B + theirs.shape[1], G, capacity, H)
            whole[:, :B, :, length - self.length : length] = ours[:, :, :, : self.length]
            whole[:, B:, :, length - other.length : length] = theirs[:, :, :, : other.length]
            joined.append(whole)
        return type(self)(joined[0], joined[1], length)


@dataclass(frozen=True)
class CrossAttentionCache:
    """What a decoder's blocks look at of an encoder's states: keys and values by layer, [B, G, S, H], computed once."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    real_BS: Tensor  # False at padding

    def keep(self, rows: Tensor) -> "CrossAttentionCache":
        """Only these rows, in this order."""
        keys, values = (tuple(part[rows] for part in parts) for parts in (self.keys, self.values))
        return CrossAttentionCache(keys, values, self.real_BS[rows])

    def join(self, other: "CrossAttentionCache") -> "CrossAttentionCache":
        """The rows of both, the shorter padded on the right."""
        width = max(self.real_BS.shape[1], other.real_BS.shape[1])

        def padded(part: Tensor, places_behind: int) -> Tensor:
            missing = width - part.shape[-1 - places_behind]
            return F.pad(part, (0, 0) * places_behind + (0, missing))

        def joined(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(torch.cat([padded(a, 1), padded(b, 1)]) for a, b in zip(ours, theirs, strict=True))

        real_BS = torch.cat([padded(self.real_BS, 0), padded(other.real_BS, 0)])
        return CrossAttentionCache(joined(self.keys, other.keys), joined(self.values, other.values), real_BS)
