"""Triton kernels for the work between a transformer's matrix products: norms of the residual stream, SwiGLU, heads.

Like `lm.native.gpu`, importing this module needs Triton. All numbers are computed in fp32 and rounded once.

Shape letters: R rows, D width, M MLP width, P programs; B batch, T tokens, N heads, G key-value heads, H head dim,
E = (N + 2G) H, C columns of the cache.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from lm.attention import Attention
from lm.cache import PassCache, TokenWriter
from lm.layers import RMSNorm, compute_dtype
from lm.positions import Rotary, turns_whole_heads

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 16384  # most numbers of a row that one program can hold
NORM_PROGRAMS = 512  # programs of a norm's backward pass; constant, so that sums have the same bits on every GPU
SUM_ROWS, SUM_COLUMNS = 64, 32  # block of the programs' sums that is added up at a time
MLP_BLOCK = 1024
HEADS_BLOCK = 16


def takes(*tensors: Tensor) -> bool:
    """Returns whether the kernels run on these: contiguous floats on a GPU. Compiled graphs fuse without them."""
    return all(x.is_cuda and x.dtype in DTYPES and x.is_contiguous() for x in tensors) and (
        not torch.compiler.is_compiling()
    )


# --- norms -----------------------------------------------------------------------------------------------------------


@triton.jit
def _norm_kernel(
    x, branch, weight, bias, total, normed, means, inverses, width, eps,
    ADDS: tl.constexpr, CENTERS: tl.constexpr, SHIFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one row of x + branch, rounded to the stream's dtype, and its RMSNorm, or its LayerNorm if CENTERS."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    place = row * width + columns
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(branch + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + place, values.to(total.dtype.element_ty), mask=inside)
        values = values.to(total.dtype.element_ty).to(tl.float32)
    if CENTERS:
        mean = tl.sum(values, axis=0) / width
        tl.store(means + row, mean)
        values = tl.where(inside, values - mean, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / width + eps)
    tl.store(inverses + row, inverse)
    result = values * inverse * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if SHIFTS:
        result += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + place, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward_kernel(
    gradient, carried, total, weight, means, inverses, x_gradient, branch_gradient, parts, num_rows, width,
    CARRIES: tl.constexpr, CENTERS: tl.constexpr, NARROWS: tl.constexpr, SHIFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute every P-th row of dx = (g·w - n · mean(g·w·n)) / rms(x) + the stream's gradient.

    If CENTERS, the numerator is also reduced by mean(g·w). `parts` gets this program's sums: [P, 2, D] of g·n and g
    if SHIFTS, otherwise [P, 1, D] of g·n.
    """
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    of_weight = tl.zeros([BLOCK], dtype=tl.float32)
    of_bias = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(program, num_rows, tl.num_programs(0)):
        place = row * width + columns
        values = tl.load(total + place, mask=inside, other=0.0).to(tl.float32)
        own = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + row)
        if CENTERS:
            values = tl.where(inside, values - tl.load(means + row), 0.0)
        normed = values * inverse
        of_weight += own * normed
        of_bias += own
        scaled = own * scale
        result = scaled - normed * (tl.sum(scaled * normed, axis=0) / width)
        if CENTERS:
            result -= tl.sum(scaled, axis=0) / width
        result *= inverse
        if CARRIES:
            result += tl.load(carried + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(x_gradient + place, result.to(x_gradient.dtype.element_ty), mask=inside)
        if NARROWS:
            tl.store(branch_gradient + place, result.to(branch_gradient.dtype.element_ty), mask=inside)
    sums = parts + program * (2 if SHIFTS else 1) * width + columns
    tl.store(sums, of_weight, mask=inside)
    if SHIFTS:
        tl.store(sums + width, of_bias, mask=inside)


@triton.jit
def _sum_kernel(parts, result, num_parts, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute one block of columns of Σ parts."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, num_parts, ROWS):
        rows = first + tl.arange(0, ROWS)
        mask = (rows < num_parts)[:, None] & inside[None, :]
        total += tl.sum(tl.load(parts + rows[:, None] * width + columns[None, :], mask=mask, other=0.0), axis=0)
    tl.store(result + columns, total.to(result.dtype.element_ty), mask=inside)


def _block(width: int) -> dict[str, int]:
    """Returns the launch options for rows of this width, each held by one program."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 256))}


def _norm(
    x: Tensor, branch: Tensor | None, weight_D: Tensor, bias_D: Tensor | None, eps: float, dtype: torch.dtype,
    centers: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns x + branch (x itself without a branch), its norm as `dtype`, and means and inverse roots [R]."""
    D = x.shape[-1]
    R = x.numel() // D
    total = x if branch is None else torch.empty_like(x)
    normed = torch.empty_like(x, dtype=dtype)
    means_R, inverses_R = x.new_empty(2, R, dtype=torch.float32).unbind()
    if R:
        _norm_kernel[(R,)](
            x, x if branch is None else branch, weight_D, weight_D if bias_D is None else bias_D, total, normed,
            means_R, inverses_R, D, eps, ADDS=branch is not None, CENTERS=centers, SHIFTS=bias_D is not None,
            **_block(D),
        )  # fmt: skip
    return total, normed, means_R, inverses_R


def _norm_gradients(
    ctx: Any, gradient: Tensor, carried: Tensor | None, branch_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the gradients of x, branch, weight and bias; the first two are one tensor if their dtypes are equal."""
    total, weight_D, means_R, inverses_R = ctx.saved_tensors
    D = total.shape[-1]
    R = total.numel() // D
    P = min(R, NORM_PROGRAMS)
    of_x = torch.empty_like(total)
    of_branch = of_x if branch_dtype in (None, total.dtype) else torch.empty_like(total, dtype=branch_dtype)
    sums = 2 if ctx.shifts else 1
    parts = torch.empty(P, sums, D, device=total.device)
    if R:
        _norm_backward_kernel[(P,)](
            gradient.contiguous(), of_x if carried is None else carried.contiguous(), total, weight_D, means_R,
            inverses_R, of_x, of_branch, parts, R, D, CARRIES=carried is not None, CENTERS=ctx.centers,
            NARROWS=of_branch is not of_x, SHIFTS=ctx.shifts, **_block(D),
        )  # fmt: skip
    of_weights = torch.empty(sums, D, dtype=weight_D.dtype, device=total.device)
    _sum_kernel[(triton.cdiv(sums * D, SUM_COLUMNS),)](parts, of_weights, P, sums * D, ROWS=SUM_ROWS, BLOCK=SUM_COLUMNS)
    return of_x, of_branch, of_weights[0], of_weights[1] if ctx.shifts else None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        _, normed, *sums = _norm(x, None, weight_D, None, eps, dtype, centers=False)
        ctx.save_for_backward(x, weight_D, *sums)
        ctx.centers = ctx.shifts = False
        return normed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_x, _, of_weight_D, _ = _norm_gradients(ctx, gradient, None, None)
        return of_x, of_weight_D, None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float, dtype: torch.dtype,
        centers: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        total, normed, *sums = _norm(x, branch, weight_D, bias_D, eps, dtype, centers)
        ctx.save_for_backward(total, weight_D, *sums)
        ctx.centers, ctx.shifts, ctx.branch_dtype = centers, bias_D is not None, branch.dtype
        ctx.set_materialize_grads(False)  # the last sum is used only through its norm
        return total, normed

    @staticmethod
    def backward(ctx: Any, carried: Tensor | None, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        assert gradient is not None, "the norm of a sum is always used"
        return *_norm_gradients(ctx, gradient, carried, ctx.branch_dtype), None, None, None


def takes_rms_norm(x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> bool:
    return takes(weight_D) and x.is_cuda and {x.dtype, dtype} <= set(DTYPES) and x.shape[-1] <= WIDEST


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Compute `lm.layers.rms_norm` in one kernel, and its gradients in two."""
    return _Norm.apply(x.contiguous(), weight_D, eps, dtype)  # type: ignore[no-untyped-call]


def takes_add_norm(x: Tensor, branch: Tensor, norm: nn.Module) -> bool:
    """Returns whether the kernels run on this sum and norm: RMSNorm, or LayerNorm scaled over the last dimension."""
    if isinstance(norm, nn.LayerNorm):
        is_norm = norm.elementwise_affine and len(norm.normalized_shape) == 1
    else:
        is_norm = isinstance(norm, RMSNorm)
    keeps_dtype = torch.promote_types(x.dtype, branch.dtype) == x.dtype
    return is_norm and keeps_dtype and takes(x, branch, *norm.parameters(recurse=False)) and x.shape[-1] <= WIDEST


def add_norm(x: Tensor, branch: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Compute `lm.layers.add_norm` in one kernel, and its gradients in two. The norm has the next product's dtype."""
    centers = isinstance(norm, nn.LayerNorm)
    assert isinstance(norm, nn.LayerNorm | RMSNorm)
    bias_D = norm.bias if isinstance(norm, nn.LayerNorm) else None
    found: tuple[Tensor, Tensor] = _AddNorm.apply(  # type: ignore[no-untyped-call]
        x, branch, norm.weight, bias_D, norm.eps, compute_dtype(x), centers
    )
    return found


# --- SwiGLU ----------------------------------------------------------------------------------------------------------


@triton.jit
def _swiglu_kernel(gate_and_up, result, width, BLOCK: tl.constexpr):
    """Compute one block of a row of silu(gate) · up."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    place = gate_and_up + row * 2 * width + columns
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + width, mask=inside, other=0.0).to(tl.float32)
    silu = gate / (1.0 + tl.exp(-gate))
    tl.store(result + row * width + columns, (silu * up).to(result.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward_kernel(gradient, gate_and_up, result, width, BLOCK: tl.constexpr):
    """Compute a row's block of d gate = g · up · s · (1 + gate · (1 - s)) and d up = g · gate · s; s = σ(gate)."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    place = row * 2 * width + columns
    gate = tl.load(gate_and_up + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_and_up + place + width, mask=inside, other=0.0).to(tl.float32)
    own = tl.load(gradient + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    of_gate = own * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(result + place, of_gate.to(result.dtype.element_ty), mask=inside)
    tl.store(result + place + width, (own * gate * sigmoid).to(result.dtype.element_ty), mask=inside)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        M = gate_and_up.shape[-1] // 2
        result = gate_and_up.new_empty(*gate_and_up.shape[:-1], M)
        if result.numel():
            grid = (result.numel() // M, triton.cdiv(M, MLP_BLOCK))
            _swiglu_kernel[grid](gate_and_up, result, M, BLOCK=MLP_BLOCK)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (gate_and_up,) = ctx.saved_tensors
        M, result = gradient.shape[-1], torch.empty_like(gate_and_up)
        if gradient.numel():
            grid = (gradient.numel() // M, triton.cdiv(M, MLP_BLOCK))
            _swiglu_backward_kernel[grid](gradient.contiguous(), gate_and_up, result, M, BLOCK=MLP_BLOCK)
        return result


def takes_swiglu(gate_and_up: Tensor) -> bool:
    return takes(gate_and_up)


def swiglu(gate_and_up: Tensor) -> Tensor:
    """Compute `lm.layers.swiglu` in one kernel, and its gradient in one."""
    return _SwiGLU.apply(gate_and_up)  # type: ignore[no-untyped-call]


# --- heads -----------------------------------------------------------------------------------------------------------


@triton.jit
def _normed(lower, upper, weight, columns, inside, head_dim, eps, dtype: tl.constexpr):
    """Returns both halves of each head's RMSNorm, rounded to `dtype`."""
    half = head_dim // 2
    squares = tl.sum(lower * lower, axis=1) + tl.sum(upper * upper, axis=1)
    inverse = (1.0 / tl.sqrt(squares / head_dim + eps))[:, None]
    first = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    second = tl.load(weight + half + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    return (lower * inverse * first).to(dtype).to(tl.float32), (upper * inverse * second).to(dtype).to(tl.float32)


@triton.jit
def _turned(lower, upper, cos, sin, angle, half, inside, TRANSPOSES: tl.constexpr):
    """Returns x · cos + roll(x) · sin, half by half; its transpose rolls the sines with x."""
    first_cos = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    second_cos = tl.load(cos + angle + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    first_sin = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    second_sin = tl.load(sin + angle + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    if TRANSPOSES:
        first_sin, second_sin = second_sin, first_sin
    return lower * first_cos + upper * first_sin, upper * second_cos + lower * second_sin


@triton.jit
def _heads_kernel(
    qkv, q, k, v, cos, sin, query_weight, key_weight, columns, num_tokens, num_heads, num_kv_heads, head_dim, eps,
    q_batch, q_token, q_head, kv_batch, kv_token, kv_head,
    JOINS: tl.constexpr, ROTATES: tl.constexpr, NORMS: tl.constexpr, CACHES: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute, for some heads of one token, normed and rotated q, k and v from qkv; if JOINS, d qkv from theirs.

    The pairs (x_i, x_{i+H/2}) are rotated, by the transposed rotation if JOINS. If CACHES, row b's keys and values go
    to `columns[b]` instead of to the token's place.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    half = head_dim // 2
    numbers = tl.arange(0, BLOCK)
    inside = numbers < half
    batch, at = token // num_tokens, token % num_tokens
    kv_at = tl.load(columns + batch) if CACHES else at
    is_q, is_k = heads < num_heads, (heads >= num_heads) & (heads < num_heads + num_kv_heads)
    is_v = (heads >= num_heads + num_kv_heads) & (heads < num_heads + 2 * num_kv_heads)
    whole = qkv + (token * (num_heads + 2 * num_kv_heads) + heads) * head_dim + numbers[None, :]
    of_q = q + batch * q_batch + at * q_token + heads * q_head + numbers[None, :]
    of_k = k + batch * kv_batch + kv_at * kv_token + (heads - num_heads) * kv_head + numbers[None, :]
    of_v = v + batch * kv_batch + kv_at * kv_token + (heads - num_heads - num_kv_heads) * kv_head + numbers[None, :]
    in_q, in_k, in_v = is_q & inside[None, :], is_k & inside[None, :], is_v & inside[None, :]
    if JOINS:
        lower = tl.load(of_q, mask=in_q, other=0.0).to(tl.float32) + tl.load(of_k, mask=in_k, other=0.0).to(tl.float32)
        upper = tl.load(of_q + half, mask=in_q, other=0.0).to(tl.float32) + (
            tl.load(of_k + half, mask=in_k, other=0.0).to(tl.float32)
        )
        lower += tl.load(of_v, mask=in_v, other=0.0).to(tl.float32)
        upper += tl.load(of_v + half, mask=in_v, other=0.0).to(tl.float32)
    else:
        lower = tl.load(whole, mask=in_q | in_k | in_v, other=0.0).to(tl.float32)
        upper = tl.load(whole + half, mask=in_q | in_k | in_v, other=0.0).to(tl.float32)
    if NORMS:
        q_lower, q_upper = _normed(
            lower, upper, query_weight, numbers, inside, head_dim, eps, dtype=qkv.dtype.element_ty
        )
        k_lower, k_upper = _normed(lower, upper, key_weight, numbers, inside, head_dim, eps, dtype=qkv.dtype.element_ty)
        lower = tl.where(is_q, q_lower, tl.where(is_k, k_lower, lower))
        upper = tl.where(is_q, q_upper, tl.where(is_k, k_upper, upper))
    if ROTATES:
        turned_lower, turned_upper = _turned(lower, upper, cos, sin, token * head_dim + numbers, half, inside, JOINS)
        lower, upper = tl.where(is_v, lower, turned_lower), tl.where(is_v, upper, turned_upper)
    if JOINS:
        tl.store(whole, lower.to(qkv.dtype.element_ty), mask=in_q | in_k | in_v)
        tl.store(whole + half, upper.to(qkv.dtype.element_ty), mask=in_q | in_k | in_v)
    else:
        tl.store(of_q, lower.to(q.dtype.element_ty), mask=in_q)
        tl.store(of_q + half, upper.to(q.dtype.element_ty), mask=in_q)
        tl.store(of_k, lower.to(k.dtype.element_ty), mask=in_k)
        tl.store(of_k + half, upper.to(k.dtype.element_ty), mask=in_k)
        tl.store(of_v, lower.to(v.dtype.element_ty), mask=in_v)
        tl.store(of_v + half, upper.to(v.dtype.element_ty), mask=in_v)


def _launch_heads(
    qkv_BTE: Tensor, q_BNTH: Tensor, k_BGTH: Tensor, v_BGTH: Tensor, rotary: Rotary | None, *, joins: bool = False,
    columns_B: Tensor | None = None, norms: tuple[RMSNorm, RMSNorm] | None = None,
) -> None:  # fmt: skip
    (B, N, T, H), G = q_BNTH.shape, k_BGTH.shape[1]
    assert k_BGTH.stride() == v_BGTH.stride(), (k_BGTH.stride(), v_BGTH.stride())
    if not qkv_BTE.numel():
        return
    cos, sin = rotary or (qkv_BTE, qkv_BTE)
    query_weight, key_weight = (norm.weight for norm in norms) if norms else (qkv_BTE, qkv_BTE)
    q_strides, kv_strides = ([x.stride(dim) for dim in (0, 2, 1)] for x in (q_BNTH, k_BGTH))
    _heads_kernel[(B * T, triton.cdiv(N + 2 * G, HEADS_BLOCK))](
        qkv_BTE, q_BNTH, k_BGTH, v_BGTH, cos, sin, query_weight, key_weight,
        qkv_BTE if columns_B is None else columns_B, T, N, G, H, norms[0].eps if norms else 0.0,
        *q_strides, *kv_strides, JOINS=joins, ROTATES=rotary is not None, NORMS=norms is not None,
        CACHES=columns_B is not None, HEADS=HEADS_BLOCK, BLOCK=triton.next_power_of_2(max(1, H // 2)),
    )  # fmt: skip


class _SplitHeads(torch.autograd.Function):
    """Values are copied like queries and keys: as views, they would keep the whole product for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, qkv_BTE: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        B, T, E = qkv_BTE.shape
        H = E // (num_heads + 2 * num_kv_heads)
        q, k, v = (qkv_BTE.new_empty(B, T, n, H).transpose(1, 2) for n in (num_heads, num_kv_heads, num_kv_heads))
        _launch_heads(qkv_BTE, q, k, v, (cos, sin))
        return q, k, v

    @staticmethod
    def backward(ctx: Any, of_q: Tensor, of_k: Tensor, of_v: Tensor) -> tuple[Tensor | None, ...]:
        (B, N, T, H), G = of_q.shape, of_k.shape[1]
        of_q, of_k, of_v = (part if part.stride(-1) == 1 else part.contiguous() for part in (of_q, of_k, of_v))
        if of_k.stride() != of_v.stride():
            of_k, of_v = of_k.contiguous(), of_v.contiguous()
        result = of_q.new_empty(B, T, (N + 2 * G) * H)
        _launch_heads(result, of_q, of_k, of_v, ctx.saved_tensors, joins=True)
        return result, None, None, None, None


def takes_heads(qkv_BTE: Tensor, rotary: Rotary | None, num_heads: int, num_kv_heads: int) -> bool:
    """Returns whether the kernels split these heads. Without rotary positions, splitting only makes views."""
    is_whole = rotary is not None and turns_whole_heads(qkv_BTE, rotary, num_heads, num_kv_heads)
    return rotary is not None and is_whole and takes(qkv_BTE, *rotary) and rotary[0].shape[:2] == qkv_BTE.shape[:2]


def split_heads(
    qkv_BTE: Tensor, rotary: Rotary | None, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `lm.attention.split_heads` in one kernel, and its gradient in one."""
    assert rotary is not None
    found: tuple[Tensor, Tensor, Tensor] = _SplitHeads.apply(  # type: ignore[no-untyped-call]
        qkv_BTE, *rotary, num_heads, num_kv_heads
    )
    return found


def takes_stored_heads(
    attention: Attention, qkv_BTE: Tensor, rotary: Rotary | None, cache: PassCache, layer: int
) -> bool:
    """Returns whether the kernel stores these heads: one token per row, in the cache's dtype, without gradients."""
    return (
        isinstance(cache, TokenWriter)
        and takes(qkv_BTE, *(rotary or ()))
        and cache.cache.keys.dtype == qkv_BTE.dtype
        and attention.head_dim % 2 == 0
        and not attention.norms_projection
        and attention.query_factor == 1
        and (rotary is None or turns_whole_heads(qkv_BTE, rotary, attention.num_heads, attention.num_kv_heads))
        and not (torch.is_grad_enabled() and qkv_BTE.requires_grad)
    )


def store_heads(
    attention: Attention, qkv_BTE: Tensor, rotary: Rotary | None, cache: PassCache, layer: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `lm.attention.store_heads` in one kernel."""
    assert isinstance(cache, TokenWriter)
    (B, T, _), N, H = qkv_BTE.shape, attention.num_heads, attention.head_dim
    q_BNTH = qkv_BTE.new_empty(B, N, T, H)
    keys, values = cache.kept(layer)
    query_norm, key_norm = attention.query_norm, attention.key_norm
    norms = None if query_norm is None or key_norm is None else (query_norm, key_norm)
    _launch_heads(qkv_BTE, q_BNTH, keys, values, rotary, columns_B=cache.columns_B, norms=norms)
    return q_BNTH, keys, values
