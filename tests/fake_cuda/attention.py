"""Attention of the fake device: PyTorch's choice of a kernel on an H100, with each kernel's limits and memory.

Fused kernels allocate their output and one number per query and head; `math` is PyTorch's own composition, with whole
tables of scores. The numbers are computed in fp32 on the CPU and rounded.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fake_cuda import kernels

HALF = (torch.float16, torch.bfloat16)
_math = F.scaled_dot_product_attention


def chosen_kernel(q: Tensor, k: Tensor, mask: Tensor | None) -> str:
    """By ATen's sdp_utils.cpp for sm_90: cuDNN first where it is enabled, then flash, memory-efficient, math.

    Flash takes no mask, the memory-efficient kernel no grouped keys; neither takes more than its types.
    """
    is_grouped = q.shape[1] != k.shape[1]
    is_half, fits = q.dtype in HALF, q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    if is_half and fits and torch.backends.cuda.cudnn_sdp_enabled() and q.shape[-1] <= 128:
        return "cudnn"
    if is_half and fits and mask is None and torch.backends.cuda.flash_sdp_enabled():
        return "flash"
    if not is_grouped and torch.backends.cuda.mem_efficient_sdp_enabled():
        return "efficient"
    return "math"


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if query.device.type != "cuda":
        return _math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if torch.is_autocast_enabled("cuda"):  # the operation is on autocast's list
        query, key, value = (part.to(torch.get_autocast_dtype("cuda")) for part in (query, key, value))
    kernel = chosen_kernel(query, key, attn_mask)
    kernels.note_attention(kernel)
    if kernel == "math":
        return _math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    result: Tensor = _Fused.apply(query, key, value, attn_mask, is_causal, scale)  # type: ignore[no-untyped-call]
    return result


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """Attention [..., N, T, H] and log-sums [..., N, T] in fp32, on the CPU. `mask` True = may attend."""
    groups = q.shape[-3] // k.shape[-3]
    k, v = (part.float().repeat_interleave(groups, dim=-3) for part in (k, v))
    scores = q.float() @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(dim=-1).nan_to_num(0.0) @ v, scores.logsumexp(dim=-1)


def gradients_of(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None,
    out: Tensor | None = None, sums: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k and v: with P the weights, dV = Pᵀ dO, dS = P (dO Vᵀ - Σ P dO Vᵀ), dQ = dS K, dK = dSᵀ Q.

    By hand, since no graph is recorded inside a kernel. Given a kernel's results, P = exp(S - sums), and the sum in dS
    is that of dO times `out`, as in FlashAttention (arXiv 2205.14135, algorithm 4).
    """
    groups, factor = q.shape[-3] // k.shape[-3], scale or 1 / math.sqrt(q.shape[-1])
    wide_k, wide_v = (part.float().repeat_interleave(groups, dim=-3) for part in (k, v))
    scores = q.float() @ wide_k.transpose(-1, -2) * factor
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(dim=-1).nan_to_num(0.0) if sums is None else (scores - sums[..., None]).exp()
    products = gradient.float() @ wide_v.transpose(-1, -2)
    of_rows = weights * products if out is None else gradient.float() * out.float()
    of_scores = weights * (products - of_rows.sum(dim=-1, keepdim=True)) * factor

    def of_group(wide: Tensor) -> Tensor:
        return wide.unflatten(-3, (-1, groups)).sum(dim=-3)

    of_k, of_v = of_scores.transpose(-1, -2) @ q.float(), weights.transpose(-1, -2) @ gradient.float()
    return (of_scores @ wide_k).to(q.dtype), of_group(of_k).to(q.dtype), of_group(of_v).to(q.dtype)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
    ) -> Tensor:
        host = [kernels.host_view(part) for part in (q, k, v)]
        allowed = _allowed(host[0], host[1], mask, is_causal)
        out, sums = plain(host[0], host[1], host[2], allowed, scale)
        # Heads last but one in memory, as these kernels write it.
        result = torch.empty(q.transpose(1, 2).shape, dtype=q.dtype, device=q.device).transpose(1, 2)
        target = kernels.host_view(result)
        target.copy_(out)
        kept = on_device(sums)
        kernels.note_kernel("attention", [q, k, v, result])
        kernels.record(lambda: target.copy_(plain(host[0], host[1], host[2], allowed, scale)[0]))
        ctx.save_for_backward(q, k, v, mask, result, kept)
        ctx.is_causal, ctx.scale = is_causal, scale
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        q, k, v, mask, _, _ = ctx.saved_tensors
        host = [kernels.host_view(part) for part in (q, k, v)]
        allowed = _allowed(host[0], host[1], mask, ctx.is_causal)
        given = kernels.host_view(gradient)
        results = [*map(on_device, gradients_of(given, host[0], host[1], host[2], allowed, ctx.scale))]
        targets = [*map(kernels.host_view, results)]
        kernels.note_kernel("attention backward", [gradient, q, k, v, q, k, v])

        def again() -> None:
            found = gradients_of(given, host[0], host[1], host[2], allowed, ctx.scale)
            for target, part in zip(targets, found, strict=True):
                target.copy_(part)

        kernels.record(again)
        return (*results, None, None, None)


def on_device(host: Tensor) -> Tensor:
    result = torch.empty(host.shape, dtype=host.dtype, device=kernels.CUDA)
    kernels.host_view(result).copy_(host)
    return result


def _allowed(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor | None:
    if mask is not None:
        return kernels.host_view(mask)
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril() if is_causal else None


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, _max_q: int, _max_k: int, _dropout: float,
    is_causal: bool, _debug: bool, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`aten::_flash_attention_forward` of sequences one after another, [tokens, heads, H], on the CPU's memory."""
    _require_flash(q, k, v, starts_q, starts_k)
    assert options.get("block_table") is None, "pages are not emulated"
    out, sums = torch.zeros_like(q), torch.zeros(q.shape[1], len(q))
    for own, keys, mask in _sequences(starts_q, starts_k, is_causal, options):
        part, lse = plain(
            q[own].transpose(0, 1), k[keys].transpose(0, 1), v[keys].transpose(0, 1), mask, options.get("scale")
        )
        out[own], sums[:, own] = part.transpose(0, 1).to(q.dtype), lse
    return out, sums, torch.zeros(2, dtype=torch.uint64), torch.zeros(0), torch.zeros(0)


def flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, starts_q: Tensor, starts_k: Tensor,
    _max_q: int, _max_k: int, _dropout: float, is_causal: bool, *_: Any, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`aten::_flash_attention_backward`, likewise."""
    found = [torch.zeros_like(part) for part in (q, k, v)]
    for own, keys, mask in _sequences(starts_q, starts_k, is_causal, options):
        parts = [part.transpose(0, 1) for part in (gradient[own], q[own], k[keys], v[keys], out[own])]
        dq, dk, dv = gradients_of(
            parts[0], parts[1], parts[2], parts[3], mask, options.get("scale"), parts[4], sums[:, own]
        )
        found[0][own] += dq.transpose(0, 1)
        found[1][keys] += dk.transpose(0, 1)
        found[2][keys] += dv.transpose(0, 1)
    return tuple(found)


def _require_flash(q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor) -> None:
    """Raises: RuntimeError for what the kernel does not take."""
    if any(part.dtype not in HALF for part in (q, k, v)):
        raise RuntimeError(f"FlashAttention only support fp16 and bf16 data type, not {q.dtype}")
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        raise RuntimeError(f"FlashAttention needs a head dimension that is a multiple of 8, at most 256: {q.shape[-1]}")
    if any(part.stride(-1) != 1 for part in (q, k, v)):
        raise RuntimeError("FlashAttention: Input tensor must have contiguous last dimension")
    if starts_q.dtype != torch.int32 or starts_k.dtype != torch.int32:
        raise RuntimeError("cu_seqlens must have dtype int32")


def _sequences(starts_q: Tensor, starts_k: Tensor, is_causal: bool, options: dict[str, Any]) -> Any:
    """Of each sequence: its queries, its keys, and which queries see which keys; both end at the same token."""
    left, right = (options.get(f"window_size_{side}") for side in ("left", "right"))
    left = -1 if left is None else left
    right = 0 if is_causal else -1 if right is None else right
    used = options.get("seqused_k")
    for number in range(len(starts_q) - 1):
        own = slice(int(starts_q[number]), int(starts_q[number + 1]))
        start, end = int(starts_k[number]), int(starts_k[number + 1])
        keys = slice(start, end if used is None else start + int(used[number]))
        num_q, num_k = own.stop - own.start, keys.stop - keys.start
        distance = torch.arange(num_k - num_q, num_k)[:, None] - torch.arange(num_k)
        mask = torch.ones(num_q, num_k, dtype=torch.bool)
        if right >= 0:
            mask &= distance >= -right
        if left >= 0:
            mask &= distance <= left
        yield own, keys, mask


def register() -> None:
    F.scaled_dot_product_attention = scaled_dot_product_attention
    kernels.OWN.update(_flash_attention_forward=flash_forward, _flash_attention_backward=flash_backward)
