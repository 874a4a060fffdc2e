"""Attention on a GPU: which of PyTorch's kernels serves which rows. None of this has run on a GPU yet.

| rows                                               | kernel                                                |
|----------------------------------------------------|-------------------------------------------------------|
| packed, padded (encoder), or with a sliding window | variable-length flash attention                       |
| one sequence each, padding on the right at most    | flash attention, causal                               |
| one query each, over a cache                       | memory-efficient; heads that share keys are its rows  |
| any other, and all in fp32                         | memory-efficient with a mask, keys and values repeated |

Memory-efficient attention takes no grouped heads. With a mask and grouped heads PyTorch is left with the equation
written out, which repeats keys and values in fp32, or with cuDNN, which plans a kernel for every new shape, and lengths
are new all the time.

Shape letters: B batch, T query tokens, S key tokens, N heads, G key-value heads, H head dim, n sequences.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.norms import compute_dtype
from lm.upload import upload

torch.backends.cuda.enable_cudnn_sdp(False)


@dataclass(frozen=True)
class VarlenAttention:
    """PyTorch's variable-length attention, and the names of its options."""

    attend: Callable[..., Any]
    options: frozenset[str]


@functools.cache
def varlen_attention() -> VarlenAttention | None:
    """None before torch 2.10, which has `is_causal` instead of `window_size`; `enable_gqa` came later.

    It is imported for the first rows on a GPU: it brings TorchDynamo, which takes a second or two of every process.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return VarlenAttention(varlen_attn, frozenset(inspect.signature(varlen_attn).parameters))


@dataclass(frozen=True)
class PackedMask:
    """Tokens attend within their sequence; rows are flattened.

    `starts` [n + 1] int32 has each sequence's first token in [B * T], and at the end their number; none is longer than
    `longest`. A query sees the last `window` keys up to itself (0 = all); if not `causal`, its whole sequence.
    """

    starts: Tensor
    longest: int
    causal: bool = True
    window: int = 0


def packed_mask(segments_BT: Tensor, device: torch.device, *, causal: bool) -> PackedMask:
    """For rows in which runs of equal numbers are sequences, those of padding too.

    Segments in the CPU's memory spare it waiting for the GPU, as it has to know how many sequences there are.
    """
    T = segments_BT.shape[1]
    begins_BT = torch.ones_like(segments_BT, dtype=torch.bool)
    begins_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    starts = F.pad(begins_BT.flatten().nonzero()[:, 0], (0, 1), value=segments_BT.numel())
    return PackedMask(upload(starts.to(torch.int32), device), T, causal)


def whole_rows(tokens_BT: Tensor, *, causal: bool, window: int = 0) -> PackedMask:
    """For rows of one sequence each."""
    B, T = tokens_BT.shape
    starts = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=tokens_BT.device)
    return PackedMask(starts, T, causal, window)


def takes_packed_rows(x: Tensor, head_dim: int) -> bool:
    """Whether variable-length attention serves products with `x`: bf16 or fp16 on a GPU, in this version of PyTorch."""
    if not (is_on_gpu(x) and flash_takes(compute_dtype(x), head_dim)):
        return False
    kernel = varlen_attention()
    return kernel is not None and "window_size" in kernel.options


def flash_takes(dtype: torch.dtype, head_dim: int) -> bool:
    return dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256


def is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def scores_bias(mask_BTS: Tensor, like: Tensor) -> Tensor:
    """What the kernels add to the scores: made once per step, as PyTorch makes it from a mask in every layer."""
    return torch.zeros(mask_BTS.shape, dtype=compute_dtype(like), device=like.device).masked_fill_(
        ~mask_BTS, -torch.inf
    )


def attend_on_gpu(q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, mask: Tensor | PackedMask | None) -> Tensor:
    """`lm.attention.attend` by the table above."""
    B, N, T, H = q_BNTH.shape
    G = k_BGSH.shape[1]
    if isinstance(mask, PackedMask):
        return _attend_packed(q_BNTH, k_BGSH, v_BGSH, mask)
    mask_B1TS = None if mask is None else mask[:, None]
    if T == 1:
        # The query heads of a key-value head are adjacent, and all see the same keys: they are that head's queries.
        rows = q_BNTH.reshape(B, G, N // G, H)
        return F.scaled_dot_product_attention(rows, k_BGSH, v_BGSH, mask_B1TS).reshape(B, N, T, -1)
    if mask is None and flash_takes(q_BNTH.dtype, H):
        return F.scaled_dot_product_attention(q_BNTH, k_BGSH, v_BGSH, is_causal=True, enable_gqa=True)
    k_BNSH, v_BNSH = (part.repeat_interleave(N // G, dim=1) if G != N else part for part in (k_BGSH, v_BGSH))
    return F.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH, mask_B1TS, is_causal=mask is None)


def _attend_packed(q_BNTH: Tensor, k_BGTH: Tensor, v_BGTH: Tensor, mask: PackedMask) -> Tensor:
    B, N, T, _ = q_BNTH.shape
    G = k_BGTH.shape[1]
    kernel = varlen_attention()
    assert kernel is not None, "takes_packed_rows said that there is one"
    shared: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in kernel.options else {}
    if G != N and not shared:
        k_BGTH, v_BGTH = (part.repeat_interleave(N // G, dim=1) for part in (k_BGTH, v_BGTH))
    q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (q_BNTH, k_BGTH, v_BGTH))
    # (left, right): how many tokens before and after its own a query sees; -1 = all.
    window = (mask.window - 1 if mask.window else -1, 0 if mask.causal else -1)
    longest = mask.longest
    y = kernel.attend(q, k, v, mask.starts, mask.starts, longest, longest, window_size=window, **shared)
    assert isinstance(y, Tensor)
    return y.unflatten(0, (B, T)).transpose(1, 2)
