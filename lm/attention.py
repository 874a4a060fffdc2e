"""Attention: masks, the equation and its kernels, and the modules around it.

A row may hold several sequences. On a CPU, sequences of similar length are batched in groups, so that no score between
two sequences is computed. On a GPU, these kernels are used:

| rows                                               | kernel                                                |
|----------------------------------------------------|-------------------------------------------------------|
| packed, padded (encoder), or with a sliding window | variable-length flash attention                       |
| one sequence each, padding on the right at most    | flash attention, causal                               |
| one query each, over a cache                       | Heed's (`lm.native.gpu`); without Triton              |
|                                                    | memory-efficient; heads that share keys are its rows  |
| any other, and all in fp32                         | memory-efficient with a mask, keys and values repeated |

Memory-efficient attention does not support grouped heads. With a mask and grouped heads, PyTorch would fall back to the
equation written out, which repeats keys and values in fp32, or to cuDNN, which plans a kernel for every new shape,
while lengths change all the time.

Shape letters: B batch, T query tokens, S key tokens, D model width, N heads, G key-value heads, H head dim,
E = (N + 2G) H, n sequences, L tokens of a group's longest sequence, M places in all groups; of latent attention P
dimensions of a head without positions and R with them, V of its values, C width of the latent vector.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.cache import CrossAttentionCache, PassCache
from lm.config import ModelConfig
from lm.layers import Linear, Replaceable, RMSNorm, compute_dtype
from lm.positions import Rotary, neighbours_apart, rotate
from lm.sequence_parallel import SplitRows
from lm.sinks import FlashKernel, WithSinks, attend_with_a_key_more, sink_scores
from lm.transfer import upload

torch.backends.cuda.enable_cudnn_sdp(False)

MOST_PADDING = 1.5  # at most, longest over shortest sequence of a group; more = fewer groups but more padding


@dataclass(frozen=True)
class Group:
    """Sequences of similar length: `num_sequences` of at most `longest` tokens, padded on the right.

    The mask [n or 1, L, L] is True where a query may attend, None = causal.
    """

    num_sequences: int
    longest: int
    mask: Tensor | None


@dataclass(frozen=True)
class GroupedMask:
    """A mask that lets tokens attend within their sequence. Groups are stored one after another, in M places.

    `places_M` has the index of the token [B * T] at each place, and any index at padding, where `is_padding_M` is True.
    `back` [B * T] has the place of each token, and any place at the rows' padding, where `is_padding` is True.
    """

    groups: tuple[Group, ...]
    places_M: Tensor
    is_padding_M: Tensor
    back: Tensor
    is_padding: Tensor

    def with_masks(self, change: Callable[[Tensor | None, int], Tensor | None]) -> "GroupedMask":
        """Apply `change` to each group's mask and longest length, in tokens."""
        return replace(self, groups=tuple(replace(g, mask=change(g.mask, g.longest)) for g in self.groups))


@dataclass(frozen=True)
class PackedMask:
    """A mask over flattened rows that lets tokens attend within their sequence.

    `starts` [n + 1] int32 has the index in [B * T] of each sequence's first token, and the number of tokens at the end.
    No sequence is longer than `longest`. A query attends to the last `window` keys up to itself (0 = all), or to its
    whole sequence if not `causal`.
    """

    starts: Tensor
    longest: int
    causal: bool = True
    window: int = 0


class OwnKeys:
    """The mask of a decoding step: a row's query attends to columns 0 to `last_B` of its row, [B], or to the last
    `window` of them (0 = all), out of `num_columns`. `like` has the dtype of the products' inputs.
    """

    def __init__(self, last_B: Tensor, num_columns: int, window: int, like: Tensor) -> None:
        self.last_B, self.num_columns, self.window, self.like = last_B, num_columns, window, like

    @functools.cached_property
    def seen(self) -> Tensor:
        """The mask [B, 1, S], made once for all layers; True = may attend."""
        distance_BS = self.last_B[:, None] - torch.arange(self.num_columns, device=self.last_B.device)
        seen_BS = distance_BS >= 0
        return (seen_BS & (distance_BS < self.window) if self.window else seen_BS)[:, None]

    @functools.cached_property
    def written_out(self) -> Tensor:
        """The mask, made once for all layers: on a GPU as numbers to add to the scores."""
        return scores_bias(self.seen, self.like) if is_on_gpu(self.like) else self.seen


# What each query attends to: [B, T, S], True = may attend, or numbers that are added to the scores, which may differ
# between heads, [B, N, T, S]; None = causal.
Mask = Tensor | PackedMask | GroupedMask | OwnKeys | None


def attention_mask(segments_BT: Tensor, *, causal: bool = True) -> Tensor:
    """Returns a mask [B, T, S], True = may attend: within one segment, and only backwards if causal.

    Padding (segment 0) attends to padding, so that no row of the softmax is empty.
    """
    same_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
    return same_BTS.tril() if causal else same_BTS


def sliding_window_mask(mask_BTT: Tensor | None, window: int, num_tokens: int, device: torch.device) -> Tensor | None:
    """Limit a mask to the last `window` keys, the query's own included; 0 = no limit.

    None stays None (causal) if the window excludes nothing.
    """
    if not 0 < window < num_tokens:
        return mask_BTT
    places_T = torch.arange(num_tokens, device=device)
    distance_TT = places_T[:, None] - places_T
    near_TT = distance_TT < window
    return (near_TT & (distance_TT >= 0))[None] if mask_BTT is None else mask_BTT & near_TT


def with_window(mask: Mask, window: int, tokens_BT: Tensor, *, packs: bool) -> Mask:
    """Apply `sliding_window_mask` to any kind of mask; `packs` = these rows use variable-length attention."""
    assert not isinstance(mask, OwnKeys), "the mask of a decoding step has its window"
    T = tokens_BT.shape[1]
    if isinstance(mask, PackedMask):
        return replace(mask, window=window)
    if isinstance(mask, GroupedMask):
        return mask.with_masks(lambda own, L: sliding_window_mask(own, window, L, tokens_BT.device))
    if mask is None and packs and 0 < window < T:
        return whole_rows(tokens_BT, causal=True, window=window)
    return sliding_window_mask(mask, window, T, tokens_BT.device)


def grouped_mask(segments_BT: Tensor, *, causal: bool) -> GroupedMask:
    """Returns the mask of rows in which runs of equal numbers are sequences; 0 = padding."""
    flat = segments_BT.flatten()
    begins_BT = torch.ones_like(segments_BT, dtype=torch.bool)
    begins_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    starts = begins_BT.flatten().nonzero()[:, 0]
    lengths = torch.diff(starts, append=torch.tensor([len(flat)]))
    is_real = flat[starts] > 0
    starts, lengths = starts[is_real], lengths[is_real]
    lengths, order = lengths.sort(descending=True, stable=True)
    starts = starts[order]
    groups, places, paddings, first = [], [], [], 0
    while first < len(lengths):
        L = int(lengths[first])
        n = int((lengths[first:] * MOST_PADDING >= L).sum())
        lengths_n1, offsets_L = lengths[first : first + n, None], torch.arange(L)
        is_padding_nL = offsets_L >= lengths_n1
        places.append((starts[first : first + n, None] + offsets_L.clamp(max=lengths_n1 - 1)).flatten())
        paddings.append(is_padding_nL.flatten())
        # Padding attends to padding, so that no row of the softmax is empty.
        same_nLL = is_padding_nL[:, :, None] == is_padding_nL[:, None, :]
        groups.append(Group(n, L, None if causal else same_nLL))
        first += n
    places_M, is_padding_M = torch.cat(places), torch.cat(paddings)
    back = torch.zeros_like(flat, dtype=torch.int64)
    back[places_M[~is_padding_M]] = (~is_padding_M).nonzero()[:, 0]
    return GroupedMask(tuple(groups), places_M, is_padding_M, back, flat == 0)


def packed_mask(segments_BT: Tensor, device: torch.device, *, causal: bool) -> PackedMask:
    """Returns the mask of rows in which runs of equal numbers, padding included, are sequences.

    Pass segments in CPU memory: this function needs the number of sequences, and would wait for a GPU to count them.
    """
    return PackedMask(upload(segment_starts(segments_BT), device), segments_BT.shape[1], causal)


def segment_starts(segments_BT: Tensor) -> Tensor:
    """Returns the `starts` of a `PackedMask`, in CPU memory as the segments are."""
    begins_BT = torch.ones_like(segments_BT, dtype=torch.bool)
    begins_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    return F.pad(begins_BT.flatten().nonzero()[:, 0], (0, 1), value=segments_BT.numel()).to(torch.int32)


@dataclass(frozen=True)
class FixedSegments:
    """The sequences of packed rows, on the device, for passes of a fixed shape: no shape depends on how many there are.

    `segments_BT` numbers them from 1 in each row; 0 = padding. `starts` [n + 1] is that of `PackedMask`; any number of
    empty sequences may follow the last one.
    """

    segments_BT: Tensor
    starts: Tensor


def whole_rows(tokens_BT: Tensor, *, causal: bool, window: int = 0) -> PackedMask:
    """Returns the mask of rows with one sequence each."""
    B, T = tokens_BT.shape
    starts = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=tokens_BT.device)
    return PackedMask(starts, T, causal, window)


def attend(
    q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, mask: Mask, sinks_N: Tensor | None = None, cap: float = 0.0
) -> Tensor:
    """softmax(Q Kᵀ / √H) V, [B, N, T, H]; a mask [B, T, S] is True where a query may attend, None = causal (T = S).
    With sinks, the sum of the softmax has one more term, exp(sink) of the head (gpt-oss, arXiv 2508.10925).

    A `cap` c makes scores s into c tanh(s / c) (Gemma 2), 0 = s. No kernel does that: the equation is written out.
    GPUs use PyTorch's fused kernels; so do single queries without gradients on a CPU. All other passes on a CPU use the
    same code with and without gradients, so that both round alike: PPO divides the probabilities of one by those of the
    other.
    """
    if isinstance(mask, OwnKeys):
        if not cap:
            return attend_own_keys(q_BNTH, k_BGSH, v_BGSH, mask, sinks_N)
        mask = mask.seen
    if isinstance(mask, GroupedMask):
        return _attend_in_groups(q_BNTH, k_BGSH, v_BGSH, mask, sinks_N, cap)
    if cap:
        assert not isinstance(mask, PackedMask), "rows of capped scores are not packed on a GPU"
        return attend_written_out(q_BNTH, k_BGSH, v_BGSH, mask, sinks_N, cap)
    if isinstance(mask, Tensor) and mask.dim() == 4:
        assert sinks_N is None, "relative positions have no sinks"
        return F.scaled_dot_product_attention(q_BNTH, k_BGSH, v_BGSH, mask, enable_gqa=True)
    if is_on_gpu(q_BNTH):
        return _attend_on_gpu(q_BNTH, k_BGSH, v_BGSH, mask, sinks_N)
    assert not isinstance(mask, PackedMask), "only a GPU takes packed rows without a mask"
    if q_BNTH.shape[2] == 1 and not q_BNTH.requires_grad and sinks_N is None:
        mask_B1TS = None if mask is None else mask[:, None]
        return F.scaled_dot_product_attention(
            q_BNTH, k_BGSH, v_BGSH, mask_B1TS, is_causal=mask is None, enable_gqa=True
        )
    return attend_written_out(q_BNTH, k_BGSH, v_BGSH, mask, sinks_N)


@Replaceable
def attend_own_keys(
    q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, mask: OwnKeys, sinks_N: Tensor | None = None
) -> Tensor:
    """Compute `attend` of a decoding step, one query per row."""
    return attend(q_BNTH, k_BGSH, v_BGSH, mask.written_out, sinks_N)


@Replaceable
def attend_written_out(
    q_BNTH: Tensor,
    k_BGSH: Tensor,
    v_BGSH: Tensor,
    mask_BTS: Tensor | None,
    sinks_N: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Compute the equation of `attend` step by step.

    On a CPU the backward pass of PyTorch's kernel takes up to four times as long at small models' sequence lengths.
    """
    B, N, T, H = q_BNTH.shape
    G, S = k_BGSH.shape[1:3]
    if mask_BTS is None:
        mask_BTS = torch.ones(1, T, S, dtype=torch.bool, device=q_BNTH.device).tril()
    bias_BTS = q_BNTH.new_zeros(mask_BTS.shape).masked_fill_(~mask_BTS, float("-inf"))
    # Query heads that share a key-value head are adjacent, so grouping them is a reshape, not a copy of K and V.
    rows, batch = N // G * T, len(bias_BTS)
    bias = bias_BTS[:, None, None].expand(batch, G if batch > 1 else 1, N // G, T, S).reshape(-1, rows, S)
    q, k, v = q_BNTH.reshape(B * G, rows, H), k_BGSH.reshape(B * G, S, H), v_BGSH.reshape(B * G, S, -1)
    if cap:
        scores = bias + cap * (torch.bmm(q, k.transpose(1, 2)) / (math.sqrt(H) * cap)).tanh()
    else:
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=1 / math.sqrt(H))
    if sinks_N is not None:
        scores = torch.cat([scores, sink_scores(sinks_N, B, T, scores.dtype).reshape(B * G, rows, 1)], dim=-1)
    return torch.bmm(scores.softmax(dim=-1)[..., :S], v).view(B, N, T, -1)


def _attend_in_groups(
    q_BNTH: Tensor, k_BGTH: Tensor, v_BGTH: Tensor, mask: GroupedMask, sinks_N: Tensor | None, cap: float
) -> Tensor:
    """Computes `attend` [B, N, T, H] group by group; 0 at the rows' padding."""
    B, _, T, _ = q_BNTH.shape
    sizes = [group.num_sequences * group.longest for group in mask.groups]
    parts = [
        _Rearranged.apply(x.transpose(1, 2).flatten(0, 1), mask.places_M, mask.back, mask.is_padding).split(sizes)  # type: ignore[no-untyped-call]
        for x in (q_BNTH, k_BGTH, v_BGTH)
    ]
    found = []
    for group, *qkv in zip(mask.groups, *parts, strict=True):
        q, k, v = (x.unflatten(0, (group.num_sequences, group.longest)).transpose(1, 2) for x in qkv)
        found.append(attend_written_out(q, k, v, group.mask, sinks_N, cap).transpose(1, 2).flatten(0, 1))
    y = _Rearranged.apply(torch.cat(found), mask.back, mask.places_M, mask.is_padding_M)  # type: ignore[no-untyped-call]
    return y.unflatten(0, (B, T)).transpose(1, 2)


class _Rearranged(torch.autograd.Function):
    """x[places]. `back` has the one place of each row of x that is not padding, so the backward pass is also a gather
    and sums nothing. Padding gets no gradient: no token that counts attends to it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, back: Tensor, is_padding: Tensor) -> Tensor:
        ctx.save_for_backward(back, is_padding)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        back, is_padding = ctx.saved_tensors
        moved = gradient.index_select(0, back)
        moved[is_padding] = 0
        return moved, None, None, None


def _attend_on_gpu(
    q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, mask: Tensor | PackedMask | None, sinks_N: Tensor | None
) -> Tensor:
    """Computes `attend` with the kernels in the table at the top of this file."""
    B, N, T, H = q_BNTH.shape
    G = k_BGSH.shape[1]
    if sinks_N is not None and mask is None and takes_packed_rows(q_BNTH, H):
        mask = whole_rows(q_BNTH[:, 0, :, 0], causal=True)
    if isinstance(mask, PackedMask):
        return _attend_packed(q_BNTH, k_BGSH, v_BGSH, mask, sinks_N)
    if sinks_N is not None:
        return attend_with_a_key_more(q_BNTH, k_BGSH, v_BGSH, mask, sinks_N)
    mask_B1TS = None if mask is None else mask[:, None]
    if T == 1:
        # The query heads of a key-value head are adjacent, and all see the same keys, so they become its queries.
        rows = q_BNTH.reshape(B, G, N // G, H)
        return F.scaled_dot_product_attention(rows, k_BGSH, v_BGSH, mask_B1TS).reshape(B, N, T, -1)
    if mask is None and flash_takes(q_BNTH.dtype, H):
        return F.scaled_dot_product_attention(q_BNTH, k_BGSH, v_BGSH, is_causal=True, enable_gqa=True)
    k_BNSH, v_BNSH = (part.repeat_interleave(N // G, dim=1) if G != N else part for part in (k_BGSH, v_BGSH))
    return F.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH, mask_B1TS, is_causal=mask is None)


def _attend_packed(q_BNTH: Tensor, k_BGTH: Tensor, v_BGTH: Tensor, mask: PackedMask, sinks_N: Tensor | None) -> Tensor:
    B, _, T, _ = q_BNTH.shape
    q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (q_BNTH, k_BGTH, v_BGTH))
    # (left, right): how many tokens before and after its own a query sees; -1 = all.
    window = (mask.window - 1 if mask.window else -1, 0 if mask.causal else -1)
    if sinks_N is None:
        y = flash_varlen(q, k, v, mask.starts, mask.longest, window)
    else:
        y = WithSinks.apply(q, k, v, sinks_N, FlashKernel(mask.starts, mask.longest, window))  # type: ignore[no-untyped-call]
    return y.unflatten(0, (B, T)).transpose(1, 2)


def flash_varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: tuple[int, int]) -> Tensor:
    """Returns flash attention [tokens, N, H] of sequences one after another; `k` and `v` [tokens, G, H] may be grouped.

    PyTorch's `varlen_attn` calls the same kernel from an operator in Python, which takes the CPU 0.55 ms per call.
    """
    return FlashKernel(starts, longest, window).forward(q, k, v)[0]


def scores_bias(mask_BTS: Tensor, like: Tensor) -> Tensor:
    """Returns the mask as numbers to add to the scores. PyTorch would make them in every layer."""
    return torch.zeros(mask_BTS.shape, dtype=compute_dtype(like), device=like.device).masked_fill_(
        ~mask_BTS, -torch.inf
    )


def is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def takes_packed_rows(x: Tensor, head_dim: int) -> bool:
    """Whether variable-length attention takes products with `x`: bf16 or fp16 on a GPU."""
    return is_on_gpu(x) and flash_takes(compute_dtype(x), head_dim)


def flash_takes(dtype: torch.dtype, head_dim: int) -> bool:
    return dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256


@Replaceable
def split_heads(
    qkv_BTE: Tensor, rotary: Rotary | None, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split one product's output into q [B, N, T, H], k and v [B, G, T, H]; rotate q and k if `rotary` is given."""
    N, G = num_heads, num_kv_heads
    qk, v = qkv_BTE.unflatten(-1, (N + 2 * G, -1)).split([N + G, G], dim=2)
    if rotary is not None:
        qk = rotate(qk, rotary)
    q, k = qk.split([N, G], dim=2)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


LATENT_EPS = 1e-6  # in the latents' norms, whatever `norm_eps` is: the published code fixes it


class LatentHeads(nn.Module):
    """Multi-head latent attention's product for Q, K and V (DeepSeek-V2, arXiv 2405.04434, section 2.1): each head's
    keys and values from one latent vector c per token, and the keys' part r with positions, which all heads share;
    queries from a vector u:

        c, r = W x                  u = norm(A x), or x without `q_lora_rank`
        q_n = [Rot_n u, Q_n u]      k_n = [r, K_n norm(c)]      v_n = [V_n norm(c), 0]

    `Attention` then rotates the first R dimensions of q and k. Values are padded with zeros to the keys' size, so
    that one cache, and every kernel, mask and exchange between ranks takes them like those of other models. (With c and
    r in the cache instead, a decoding step would multiply K_n and V_n in another order than a learner does.)
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        N, D, C, has_bias = config.num_attention_heads, config.hidden_size, config.kv_lora_rank, config.attention_bias
        self.num_heads, self.interleaves = N, config.rope_interleave
        self.sizes = P, R, V = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        width, bias = config.q_lora_rank, has_bias != "none"
        self.query_latent = Linear(D, width, bias=bias) if width else None
        self.query_norm = RMSNorm(width, LATENT_EPS) if width else nn.Identity()
        self.query = Linear(width or D, N * (P + R), bias=False)
        self.latent = Linear(D, C + R, bias=bias)
        self.latent_norm = RMSNorm(C, LATENT_EPS)
        self.key_value = Linear(C, N * (P + V), bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Returns q, k and v [B, T, E], with what is turned together half of R apart."""
        P, R, V = self.sizes
        u = x_BTD if self.query_latent is None else self.query_norm(self.query_latent(x_BTD))
        q_BTNP, q_BTNR = self.query(u).unflatten(-1, (self.num_heads, -1)).split([P, R], dim=-1)
        latent_BTC, k_BTR = self.latent(x_BTD).split([self.key_value.in_features, R], dim=-1)
        kv_BTNs = self.key_value(self.latent_norm(latent_BTC)).unflatten(-1, (self.num_heads, -1))
        k_BTNP, v_BTNV = kv_BTNs.split([P, V], dim=-1)
        if self.interleaves:
            q_BTNR, k_BTR = neighbours_apart(q_BTNR), neighbours_apart(k_BTR)
        q_BTNH = torch.cat([q_BTNR, q_BTNP], dim=-1)
        k_BTNH = torch.cat([k_BTR.unsqueeze(-2).expand_as(q_BTNR), k_BTNP], dim=-1)
        return torch.cat([q_BTNH, k_BTNH, F.pad(v_BTNV, (0, P + R - V))], dim=-2).flatten(-2)


class Attention(nn.Module):
    """Self-attention with grouped key-value heads, and one product for Q, K and V, or `LatentHeads`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        N, G, H, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.hidden_size
        self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim = N, G, H, config.value_dim
        self.query_factor, self.cap = config.query_factor, config.attn_logit_softcapping
        is_latent, has_bias = config.kv_lora_rank > 0, config.attention_bias != "none"
        self.interleaved_dim = config.rotary_dim if config.rope_interleave and not is_latent else 0
        # With an output gate, each head's rows of Q are followed by its gate's, as checkpoints have them.
        self.has_gate = config.attn_output_gate
        rows = (N + 2 * G + N * self.has_gate) * H
        self.qkv = LatentHeads(config) if is_latent else Linear(D, rows, bias=has_bias)
        self.out = Linear(N * self.value_dim, D, bias=config.attention_bias == "all")
        self.norms_projection = config.qk_norm_over == "projection"
        normed = (N * H, G * H) if self.norms_projection else (H, H)
        self.sinks = nn.Parameter(torch.zeros(N)) if config.attention_sinks else None
        self.query_norm, self.key_norm = (
            RMSNorm(width, config.norm_eps) if config.qk_norm else None for width in normed
        )

    def forward(
        self,
        x_BTD: Tensor,
        rotary: Rotary | None,
        mask: Mask,
        cache: PassCache | None,
        layer: int,
        split: SplitRows | None = None,
        query_scale: Tensor | None = None,
    ) -> Tensor:
        qkv_BTE, gate_BTE = self._heads(x_BTD)
        if cache is None:
            q_BNTH, k_BGTH, v_BGTH = self.split(qkv_BTE, rotary)
        else:
            q_BNTH, k_BGTH, v_BGTH = store_heads(self, qkv_BTE, rotary, cache, layer)
        q_BNTH = q_BNTH if query_scale is None else q_BNTH * query_scale
        if split is not None:  # x is this rank's slice of the rows, and the mask is of all their tokens
            sinks_E = None if self.sinks is None else split.own_heads(self.sinks)
            y_BETH = attend(*split.to_heads(q_BNTH, k_BGTH, v_BGTH), mask, sinks_E, self.cap)
            return self.join(split.to_tokens(y_BETH), gate_BTE)
        return self.join(attend(q_BNTH, k_BGTH, v_BGTH, mask, self.sinks, self.cap), gate_BTE)

    def join(self, y_BNTH: Tensor, gate_BTE: Tensor | None = None) -> Tensor:
        """Returns the output [B, T, D], given that of all heads; zeros beyond `value_dim` are left out."""
        y_BNTV = y_BNTH if self.value_dim == self.head_dim else y_BNTH[..., : self.value_dim]
        y_BTE = y_BNTV.transpose(1, 2).flatten(2)
        return self.out(y_BTE if gate_BTE is None else y_BTE * gate_BTE.sigmoid())

    def project(self, x_BTD: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries [B, N, T, H], keys and values [B, G, T, H]; queries and keys are rotated by position."""
        return self.split(self._heads(x_BTD)[0], rotary)

    def _heads(self, x_BTD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the product for Q, K and V, with what is turned together half a head apart, and the output's gate."""
        qkv_BTE, gate_BTE = self.qkv(x_BTD), None
        if self.has_gate:
            rows = 2 * self.num_heads * self.head_dim
            q, gate = qkv_BTE[..., :rows].unflatten(-1, (self.num_heads, 2, -1)).unbind(dim=-2)
            qkv_BTE, gate_BTE = torch.cat([q.flatten(2), qkv_BTE[..., rows:]], dim=-1), gate.flatten(2)
        return self._apart(qkv_BTE), gate_BTE

    def _apart(self, qkv_BTE: Tensor) -> Tensor:
        if not self.interleaved_dim:
            return qkv_BTE
        heads, N = qkv_BTE.unflatten(-1, (-1, self.head_dim)), self.num_heads + self.num_kv_heads
        turned, kept = heads.split([self.interleaved_dim, self.head_dim - self.interleaved_dim], dim=-1)
        apart = torch.cat([neighbours_apart(turned), kept], dim=-1)
        return torch.cat([apart[..., :N, :], heads[..., N:, :]], dim=-2).flatten(-2)

    def split(self, qkv_BTE: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """Computes `project` from the product for Q, K and V."""
        N, G = self.num_heads, self.num_kv_heads
        if self.query_norm is None or self.key_norm is None:
            q, k, v = split_heads(qkv_BTE, rotary, N, G)
            return times(q, self.query_factor), k, v
        q, k, v = qkv_BTE.unflatten(-1, (N + 2 * G, -1)).split([N, G, G], dim=2)
        if self.norms_projection:
            q, k = self.query_norm(q.flatten(2)).view_as(q), self.key_norm(k.flatten(2)).view_as(k)
        else:
            q, k = self.query_norm(q), self.key_norm(k)
        qk = torch.cat([q, k], dim=2)
        if rotary is not None:
            qk = rotate(qk, rotary)
        q, k = qk.split([N, G], dim=2)
        return times(q.transpose(1, 2), self.query_factor), k.transpose(1, 2), v.transpose(1, 2)


def times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


@Replaceable
def store_heads(
    attention: Attention, qkv_BTE: Tensor, rotary: Rotary | None, cache: PassCache, layer: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split as `attention` does and store keys and values; return q [B, N, T, H] and the k and v that it attends to."""
    q_BNTH, k_BGTH, v_BGTH = attention.split(qkv_BTE, rotary)
    return q_BNTH, *cache.append(layer, k_BGTH, v_BGTH)


class CrossAttention(nn.Module):
    """Attention from a decoder's tokens to an encoder's: queries from the decoder, keys and values from the encoder."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        N, G, H, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.hidden_size
        self.num_heads, self.num_kv_heads, self.head_dim = N, G, H
        self.query_factor = config.query_factor
        self.query = Linear(D, N * H, bias=config.attention_bias != "none")
        self.key_value = Linear(D, 2 * G * H, bias=config.attention_bias != "none")
        self.out = Linear(N * H, D, bias=config.attention_bias == "all")

    def keys_and_values(self, states_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values [B, G, S, H] of the encoder's states, computed once for all decoder tokens."""
        B, S, _ = states_BSD.shape
        k, v = self.key_value(states_BSD).view(B, S, 2, self.num_kv_heads, self.head_dim).unbind(dim=2)
        return k.transpose(1, 2), v.transpose(1, 2)

    def queries(self, x_BTD: Tensor) -> Tensor:
        """Returns the queries [B, N, T, H] of the decoder's states."""
        B, T, _ = x_BTD.shape
        q_BNTH = self.query(x_BTD).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        return times(q_BNTH, self.query_factor)

    def forward(self, x_BTD: Tensor, cache: CrossAttentionCache, layer: int) -> Tensor:
        mask_BTS = cache.real_BS[:, None].expand(-1, x_BTD.shape[1], -1)
        y_BNTH = attend(self.queries(x_BTD), cache.keys[layer], cache.values[layer], mask_BTS)
        return self.out(y_BNTH.transpose(1, 2).flatten(2))
