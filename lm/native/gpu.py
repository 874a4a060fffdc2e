"""Triton kernels for GPUs: log-probs and draws, with the same functions as the CPU kernels, and a decoding step's
attention, with one query per row over the row's own keys. Importing this module needs Triton.

With TRITON_INTERPRET=1 they run on a CPU, so their arithmetic is tested without a GPU.

Shape letters of log-probs and draws: V vocabulary, P padded vocabulary, C positions. Of attention: B rows, N heads, G
key-value heads, R = N/G queries per key-value head, S columns, H head dim, P splits.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lm.attention import OwnKeys
from lm.layers import padded_rows
from lm.native.gpu_layers import DTYPES

BLOCK = 4096  # logits that a Triton program reads at a time


@triton.jit
def _scaled(base, first, num_tokens, temperature, BLOCK: tl.constexpr):
    """Returns logits / temperature of the row's block from column `first` on; -inf after its end."""
    columns = first + tl.arange(0, BLOCK)
    return tl.load(base + columns, mask=columns < num_tokens, other=float("-inf")).to(tl.float32) / temperature


@triton.jit
def _units(values, largest, total):
    """Returns probabilities in units of 2^-40, where 2^40 = 1099511627776."""
    return (tl.exp(values - largest) / total * 1099511627776.0).to(tl.int64)


@triton.jit
def _logprobs_kernel(logits, tokens, logprobs, totals, row_stride, num_tokens, temperature, BLOCK: tl.constexpr):
    """One row: l_t - ln Σ_v exp(l_v) in one pass, with a running maximum (arXiv 1805.02867)."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    largest = float("-inf")
    total = 0.0  # Σ exp(l - largest) so far; where `largest` is infinite, Σ exp(l)
    for first in range(0, num_tokens, BLOCK):
        values = _scaled(base, first, num_tokens, temperature, BLOCK)
        new = tl.maximum(largest, tl.max(values, axis=0))
        shift = tl.where(tl.abs(new) == float("inf"), 0.0, new)
        total = total * tl.where(largest == new, 1.0, tl.exp(largest - shift)) + tl.sum(tl.exp(values - shift), axis=0)
        largest = new
    total = tl.log(total) + tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
    token = tl.load(tokens + row)
    chosen = tl.load(base + token).to(tl.float32) / temperature
    tl.store(logprobs + row, chosen - total)
    tl.store(totals + row, total)


@triton.jit
def _gradient_kernel(
    logits, tokens, totals, gradients, row_stride, num_tokens, num_columns, temperature, BLOCK: tl.constexpr
):
    """One block of a row: overwrites the logits with (1[v = t] - softmax(l)_v) · gradient / temperature."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    place = logits + row * row_stride + columns
    scale = tl.load(gradients + row) / temperature
    values = tl.load(place, mask=columns < num_tokens, other=float("-inf")).to(tl.float32) / temperature
    softmax = tl.exp(values - tl.load(totals + row))
    is_token = columns == tl.load(tokens + row)
    result = tl.where(columns < num_tokens, (tl.where(is_token, 1.0, 0.0) - softmax) * scale, 0.0)
    tl.store(place, result.to(logits.dtype.element_ty), mask=columns < num_columns)


@triton.jit
def _sample_kernel(logits, uniforms, tokens, logprobs, row_stride, num_tokens, temperature, BLOCK: tl.constexpr):
    """One row: the token at which the running sum of probabilities passes the uniform number times their total.

    As in `lm.sampling._invert`, probabilities are summed as integers in units of 2^-40, so the sums do not depend on
    the order in which a GPU adds them.
    """
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    largest = float("-inf")
    total = 0.0
    for first in range(0, num_tokens, BLOCK):
        values = _scaled(base, first, num_tokens, temperature, BLOCK)
        new = tl.maximum(largest, tl.max(values, axis=0))
        shift = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(values - shift), axis=0)
        largest = new
    units = tl.zeros((), dtype=tl.int64)
    for first in range(0, num_tokens, BLOCK):
        values = _scaled(base, first, num_tokens, temperature, BLOCK)
        units += tl.sum(_units(values, largest, total), axis=0)
    threshold = (tl.load(uniforms + row).to(tl.float64) * units.to(tl.float64)).to(tl.int64)
    running = tl.zeros((), dtype=tl.int64)
    token = num_tokens - 1  # the result if NaN leaves no sum above the threshold
    found = False
    for first in range(0, num_tokens, BLOCK):
        values = _scaled(base, first, num_tokens, temperature, BLOCK)
        columns = first + tl.arange(0, BLOCK)
        own = _units(values, largest, total)
        is_above = (running + tl.cumsum(own, axis=0) > threshold) & (columns < num_tokens)
        at = tl.min(tl.where(is_above, columns, num_tokens), axis=0)
        token = tl.where((at < num_tokens) & (found == 0), at, token)
        found = found | (at < num_tokens)
        running += tl.sum(own, axis=0)
    chosen = tl.load(base + token).to(tl.float32) / temperature
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.log(tl.exp(chosen - largest) / total))


def supports(logits_CV: Tensor) -> bool:
    """Whether the kernels run on these logits."""
    return logits_CV.is_cuda and logits_CV.is_floating_point() and logits_CV.stride(-1) == 1


def takes_sampling(logits_BV: Tensor, uniforms_B: Tensor, temperature: float) -> bool:
    return supports(logits_BV)


def sample(logits_BV: Tensor, uniforms_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """`lm.sampling.sample` in one kernel."""
    B, V = logits_BV.shape
    tokens_B = torch.empty(B, dtype=torch.int64, device=logits_BV.device)
    logprobs_B = torch.empty(B, device=logits_BV.device)
    _sample_kernel[(B,)](
        logits_BV, uniforms_B, tokens_B, logprobs_B, logits_BV.stride(0), V, temperature, BLOCK=BLOCK, num_warps=8
    )
    return tokens_B, logprobs_B


def takes_logprobs(logits_CV: Tensor, tokens_C: Tensor, temperature: float) -> bool:
    return supports(logits_CV)


def token_logprobs(logits_CV: Tensor, tokens_C: Tensor, temperature: float) -> Tensor:
    """`lm.sampling.logprobs_of_rows` in one kernel, with a second one for its gradient."""
    found: Tensor = TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        padded_rows(logits_CV), logits_CV.shape[1], tokens_C.contiguous(), temperature
    )
    return found


class TokenLogprobs(torch.autograd.Function):
    """Like `lm.sampling._TokenLogprobs`, but the forward pass reads the logits once, and the backward pass reads and
    writes them once.

    The gradient overwrites the logits, which are the largest tensors of a step. This increases their version counter,
    so a backward pass that still needs the logits fails with PyTorch's own message instead of reading gradients.
    """

    @staticmethod
    def forward(ctx: Any, logits_CP: Tensor, num_tokens: int, tokens_C: Tensor, temperature: float) -> Tensor:
        ctx.temperature, ctx.num_tokens = temperature, num_tokens
        logprobs_C, totals_C = (torch.empty(len(tokens_C), device=logits_CP.device) for _ in range(2))
        if len(tokens_C):
            _logprobs_kernel[(len(tokens_C),)](
                logits_CP, tokens_C, logprobs_C, totals_C, logits_CP.stride(0), num_tokens, temperature, BLOCK=BLOCK
            )
        ctx.save_for_backward(logits_CP, tokens_C, totals_C)
        return logprobs_C

    @staticmethod
    def backward(ctx: Any, gradient_C: Tensor) -> tuple[Tensor, None, None, None]:
        logits_CP, tokens_C, totals_C = ctx.saved_tensors
        C, P = logits_CP.shape
        if C:
            _gradient_kernel[(C, triton.cdiv(P, BLOCK))](
                logits_CP, tokens_C, totals_C, gradient_C.contiguous(),
                logits_CP.stride(0), ctx.num_tokens, P, ctx.temperature, BLOCK=BLOCK,
            )  # fmt: skip
        torch.autograd.graph.increment_version(logits_CP)
        return logits_CP, None, None, None


# Keys that one program reads. It is a constant, so that the bits of a row's result depend only on the row.
SPLIT = 256
FEWEST_QUERIES = 16  # rows of the smallest matrix product on a GPU's tensor cores


@triton.jit
def _attend_kernel(
    q, keys, values, last_columns, out, parts, totals, num_kv_heads, num_queries, head_dim, scale, window,
    kv_batch, kv_head, kv_column, num_splits, sinks, SINKS: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Attend from the queries of one key-value head of one row to one split of the row's keys.

    Writes softmax(q Kᵀ · scale) V of the split (arXiv 2205.14135) to `out` if there is only one split. Otherwise
    writes it to `parts` in fp32, and ln Σ exp of the split's scores to `totals`. With `SINKS`, the sum over all splits
    has one more term per head.
    """
    pair, split = tl.program_id(0), tl.program_id(1)
    batch, head = (pair // num_kv_heads).to(tl.int64), pair % num_kv_heads
    last = tl.load(last_columns + batch).to(tl.int32)
    first = tl.where(window > 0, tl.maximum(last - window + 1, 0), 0)
    low, high = split * SPLIT, tl.minimum((split + 1) * SPLIT, last + 1)
    low = tl.maximum(low, first // BLOCK * BLOCK)
    if low < high:
        rows, numbers = tl.arange(0, QUERIES), tl.arange(0, HEAD)
        is_row, inside = rows < num_queries, numbers < head_dim
        place = (pair.to(tl.int64) * num_queries + rows[:, None]) * head_dim + numbers[None, :]
        query = tl.load(q + place, mask=is_row[:, None] & inside[None, :], other=0.0)
        row = batch * kv_batch + head * kv_head
        largest = tl.full([QUERIES], float("-inf"), dtype=tl.float32)
        total = tl.zeros([QUERIES], dtype=tl.float32)
        result = tl.zeros([QUERIES, HEAD], dtype=tl.float32)
        for start in range(low, high, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            is_written = columns < high
            at = row + columns.to(tl.int64)[:, None] * kv_column + numbers[None, :]
            key = tl.load(keys + at, mask=is_written[:, None] & inside[None, :], other=0.0)
            value = tl.load(values + at, mask=is_written[:, None] & inside[None, :], other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            scores = tl.where((is_written & (columns >= first))[None, :], scores, float("-inf"))
            new = tl.maximum(largest, tl.max(scores, axis=1))
            shift = tl.where(new == float("-inf"), 0.0, new)
            weights = tl.exp(scores - shift[:, None])
            kept = tl.exp(largest - shift)
            total = total * kept + tl.sum(weights, axis=1)
            result = result * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            largest = new
        if SINKS and not SPLITS:
            total += tl.exp(tl.load(sinks + head * num_queries + rows, mask=is_row, other=0.0).to(tl.float32) - largest)
        result = result / total[:, None]
        if SPLITS:
            at = pair.to(tl.int64) * num_splits + split
            place = (at * num_queries + rows[:, None]) * head_dim + numbers[None, :]
            tl.store(parts + place, result, mask=is_row[:, None] & inside[None, :])
            tl.store(totals + at * num_queries + rows, tl.log(total) + largest, mask=is_row)
        else:
            tl.store(out + place, result.to(out.dtype.element_ty), mask=is_row[:, None] & inside[None, :])


@triton.jit
def _merge_kernel(
    parts, totals, last_columns, out, num_kv_heads, num_queries, head_dim, window, num_splits, sinks,
    SINKS: tl.constexpr, SPLIT: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Merge one query's splits, one after another: Σ exp(total_p) · part_p / Σ exp(total_p)."""
    query = tl.program_id(0)
    pair, own = query // num_queries, query % num_queries
    last = tl.load(last_columns + pair // num_kv_heads).to(tl.int32)
    first = tl.where(window > 0, tl.maximum(last - window + 1, 0), 0)
    numbers = tl.arange(0, HEAD)
    inside = numbers < head_dim
    largest = float("-inf")
    for split in range(first // SPLIT, last // SPLIT + 1):
        at = (pair.to(tl.int64) * num_splits + split) * num_queries + own
        largest = tl.maximum(largest, tl.load(totals + at))
    total = 0.0
    if SINKS:
        total += tl.exp(tl.load(sinks + pair % num_kv_heads * num_queries + own).to(tl.float32) - largest)
    result = tl.zeros([HEAD], dtype=tl.float32)
    for split in range(first // SPLIT, last // SPLIT + 1):
        at = (pair.to(tl.int64) * num_splits + split) * num_queries + own
        weight = tl.exp(tl.load(totals + at) - largest)
        total += weight
        result += weight * tl.load(parts + at * head_dim + numbers, mask=inside, other=0.0)
    place = query.to(tl.int64) * head_dim + numbers
    tl.store(out + place, (result / total).to(out.dtype.element_ty), mask=inside)


def takes_own_keys(
    q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, mask: OwnKeys, sinks_N: Tensor | None = None
) -> bool:
    """Returns whether the kernel runs: one query per row, no gradients, keys and values of one dtype and layout."""
    is_one_type = q_BNTH.dtype == k_BGSH.dtype == v_BGSH.dtype and q_BNTH.dtype in DTYPES
    fits = k_BGSH.shape == v_BGSH.shape and k_BGSH.stride() == v_BGSH.stride() and k_BGSH.stride(-1) == 1
    return q_BNTH.is_cuda and is_one_type and fits and q_BNTH.shape[2] == 1 and not q_BNTH.requires_grad


def attend_own_keys(
    q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, mask: OwnKeys, sinks_N: Tensor | None = None
) -> Tensor:
    """Compute `lm.attention.attend_own_keys` in one kernel, or in two if a row may have more than `SPLIT` keys.

    A row's result has the same bits whatever S and the other rows are.
    """
    (B, N, _, H), (G, S) = q_BNTH.shape, k_BGSH.shape[1:3]
    R, P = N // G, triton.cdiv(S, SPLIT)
    q_BNTH = q_BNTH.contiguous()
    y_BNTH = torch.empty_like(q_BNTH)
    parts = totals = y_BNTH
    has_sinks, sinks = sinks_N is not None, y_BNTH if sinks_N is None else sinks_N
    if P > 1:
        parts = torch.empty(B * G * P * R * H, dtype=torch.float32, device=q_BNTH.device)
        totals = torch.empty(B * G * P * R, dtype=torch.float32, device=q_BNTH.device)
    head = max(16, triton.next_power_of_2(H))
    # Keys and values of two blocks fit together in an A100's 160 KB.
    block = min(64, max(16, 32768 // (head * k_BGSH.element_size())))
    _attend_kernel[(B * G, P)](
        q_BNTH, k_BGSH, v_BGSH, mask.last_B, y_BNTH, parts, totals, G, R, H, 1 / math.sqrt(H), mask.window,
        k_BGSH.stride(0), k_BGSH.stride(1), k_BGSH.stride(2), P, sinks, SINKS=has_sinks,
        SPLITS=P > 1, SPLIT=SPLIT, QUERIES=max(FEWEST_QUERIES, triton.next_power_of_2(R)), BLOCK=block, HEAD=head,
        num_stages=2,
    )  # fmt: skip
    if P > 1:
        _merge_kernel[(B * N,)](
            parts, totals, mask.last_B, y_BNTH, G, R, H, mask.window, P, sinks,
            SINKS=has_sinks, SPLIT=SPLIT, HEAD=head, num_warps=1,
        )  # fmt: skip
    return y_BNTH
