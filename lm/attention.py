"""Attention: masks, the equation, and the modules around it.

Shape letters: B batch, T query tokens, S key tokens, D model width, N heads, G key-value heads, H head dim,
E = (N + 2G) H.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.cache import CrossAttentionCache, PassCache
from lm.config import ModelConfig
from lm.gpu_attention import PackedMask, attend_on_gpu, is_on_gpu, whole_rows
from lm.grouped_attention import GroupedMask, attend_in_groups
from lm.linear import Linear
from lm.norms import RMSNorm
from lm.positions import Rotary, rotate
from lm.replaceable import Replaceable

# Who attends to whom: [B, T, S], True = may, or what is added to the scores; None = causal.
Mask = Tensor | PackedMask | GroupedMask | None


def attention_mask(segments_BT: Tensor, *, causal: bool = True) -> Tensor:
    """Mask [B, T, S], True = may attend: within one segment, and only backwards if causal.

    Padding (segment 0) attends to padding, so that no row of the softmax is empty.
    """
    same_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
    return same_BTS.tril() if causal else same_BTS


def sliding_window_mask(mask_BTT: Tensor | None, window: int, num_tokens: int, device: torch.device) -> Tensor | None:
    """The mask without keys further back than `window` tokens, the query's own included; 0 = no limit.

    None stays None (causal) where the window excludes nothing.
    """
    if not 0 < window < num_tokens:
        return mask_BTT
    places_T = torch.arange(num_tokens, device=device)
    distance_TT = places_T[:, None] - places_T
    near_TT = distance_TT < window
    return (near_TT & (distance_TT >= 0))[None] if mask_BTT is None else mask_BTT & near_TT


def with_window(mask: Mask, window: int, tokens_BT: Tensor, *, packs: bool) -> Mask:
    """`sliding_window_mask`, for masks of any kind; `packs` = variable-length attention serves these rows."""
    T = tokens_BT.shape[1]
    if isinstance(mask, PackedMask):
        return replace(mask, window=window)
    if isinstance(mask, GroupedMask):
        return mask.with_masks(lambda own, L: sliding_window_mask(own, window, L, tokens_BT.device))
    if mask is None and packs and 0 < window < T:
        return whole_rows(tokens_BT, causal=True, window=window)
    return sliding_window_mask(mask, window, T, tokens_BT.device)


def attend(q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, mask: Mask) -> Tensor:
    """softmax(Q Kᵀ / √H) V, [B, N, T, H]; a mask [B, T, S] is True where a query may attend, None = causal (T = S).

    PyTorch's fused kernels serve GPUs, and single queries without gradients on a CPU. Elsewhere passes with and without
    gradients must round alike, since PPO divides the probabilities of one by those of the other.
    """
    if isinstance(mask, GroupedMask):
        return attend_in_groups(q_BNTH, k_BGSH, v_BGSH, mask, attend_written_out)
    if is_on_gpu(q_BNTH):
        return attend_on_gpu(q_BNTH, k_BGSH, v_BGSH, mask)
    assert not isinstance(mask, PackedMask), "only a GPU takes packed rows without a mask"
    if q_BNTH.shape[2] == 1 and not q_BNTH.requires_grad:
        mask_B1TS = None if mask is None else mask[:, None]
        return F.scaled_dot_product_attention(
            q_BNTH, k_BGSH, v_BGSH, mask_B1TS, is_causal=mask is None, enable_gqa=True
        )
    return attend_written_out(q_BNTH, k_BGSH, v_BGSH, mask)


@Replaceable
def attend_written_out(q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, mask_BTS: Tensor | None) -> Tensor:
    """The equation of `attend`: on CPUs the backward of PyTorch's kernel takes up to four times as long at the sequence
    lengths of small models.
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
    weights = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=1 / math.sqrt(H)).softmax(dim=-1)
    return torch.bmm(weights, v).view(B, N, T, -1)


@Replaceable
def split_heads(
    qkv_BTE: Tensor, rotary: Rotary | None, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, N, T, H], k and v [B, G, T, H] of one product's output; q and k are rotated if `rotary` is given."""
    N, G = num_heads, num_kv_heads
    qk, v = qkv_BTE.unflatten(-1, (N + 2 * G, -1)).split([N + G, G], dim=2)
    if rotary is not None:
        qk = rotate(qk, rotary)
    q, k = qk.split([N, G], dim=2)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class Attention(nn.Module):
    """Self-attention with grouped key-value heads, and one product for Q, K and V."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        N, G, H, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.hidden_size
        self.num_heads, self.num_kv_heads, self.head_dim = N, G, H
        self.qkv = Linear(D, (N + 2 * G) * H, bias=config.attention_bias != "none")
        self.out = Linear(N * H, D, bias=config.attention_bias == "all")
        self.query_norm = RMSNorm(H, config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(H, config.norm_eps) if config.qk_norm else None

    def forward(self, x_BTD: Tensor, rotary: Rotary | None, mask: Mask, cache: PassCache | None, layer: int) -> Tensor:
        q_BNTH, k_BGTH, v_BGTH = self.project(x_BTD, rotary)
        if cache is not None:
            k_BGTH, v_BGTH = cache.append(layer, k_BGTH, v_BGTH)
        y_BNTH = attend(q_BNTH, k_BGTH, v_BGTH, mask)
        return self.out(y_BNTH.transpose(1, 2).flatten(2))

    def project(self, x_BTD: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, N, T, H], keys and values [B, G, T, H]; queries and keys are rotated by their positions."""
        N, G = self.num_heads, self.num_kv_heads
        qkv_BTE = self.qkv(x_BTD)
        if self.query_norm is None or self.key_norm is None:
            return split_heads(qkv_BTE, rotary, N, G)
        q, k, v = qkv_BTE.unflatten(-1, (N + 2 * G, -1)).split([N, G, G], dim=2)
        qk = torch.cat([self.query_norm(q), self.key_norm(k)], dim=2)
        if rotary is not None:
            qk = rotate(qk, rotary)
        q, k = qk.split([N, G], dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class CrossAttention(nn.Module):
    """Attention from a decoder's tokens to an encoder's: queries from the decoder, keys and values from the encoder."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        N, G, H, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.hidden_size
        self.num_heads, self.num_kv_heads, self.head_dim = N, G, H
        self.query = Linear(D, N * H, bias=config.attention_bias != "none")
        self.key_value = Linear(D, 2 * G * H, bias=config.attention_bias != "none")
        self.out = Linear(N * H, D, bias=config.attention_bias == "all")

    def keys_and_values(self, states_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, S, H] of the encoder's states, computed once for all decoder tokens."""
        B, S, _ = states_BSD.shape
        k, v = self.key_value(states_BSD).view(B, S, 2, self.num_kv_heads, self.head_dim).unbind(dim=2)
        return k.transpose(1, 2), v.transpose(1, 2)

    def queries(self, x_BTD: Tensor) -> Tensor:
        """[B, N, T, H] of the decoder's states."""
        B, T, _ = x_BTD.shape
        return self.query(x_BTD).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, x_BTD: Tensor, cache: CrossAttentionCache, layer: int) -> Tensor:
        mask_BTS = cache.real_BS[:, None].expand(-1, x_BTD.shape[1], -1)
        y_BNTH = attend(self.queries(x_BTD), cache.keys[layer], cache.values[layer], mask_BTS)
        return self.out(y_BNTH.transpose(1, 2).flatten(2))
