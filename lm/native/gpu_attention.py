"""A Triton kernel for a decoding step's attention: one query per row, over the row's own keys.

Like `lm.native.gpu`, importing this module needs Triton.

Shape letters: B rows, N heads, G key-value heads, R = N/G queries per key-value head, S columns, H head dim, P splits.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lm.attention import OwnKeys
from lm.native.gpu_layers import DTYPES

# Keys that one program reads. It is a constant, so that the bits of a row's result depend only on the row.
SPLIT = 256
FEWEST_QUERIES = 16  # rows of the smallest matrix product on a GPU's tensor cores


@triton.jit
def _attend_kernel(
    q, keys, values, last_columns, out, parts, totals, num_kv_heads, num_queries, head_dim, scale, window,
    kv_batch, kv_head, kv_column, num_splits,
    SPLITS: tl.constexpr, SPLIT: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Attend from the queries of one key-value head of one row to one split of the row's keys.

    Writes softmax(q Kᵀ · scale) V of the split (arXiv 2205.14135) to `out` if there is only one split. Otherwise
    writes it to `parts` in fp32, and ln Σ exp of the split's scores to `totals`.
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
    parts, totals, last_columns, out, num_kv_heads, num_queries, head_dim, window, num_splits,
    SPLIT: tl.constexpr, HEAD: tl.constexpr,
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
    result = tl.zeros([HEAD], dtype=tl.float32)
    for split in range(first // SPLIT, last // SPLIT + 1):
        at = (pair.to(tl.int64) * num_splits + split) * num_queries + own
        weight = tl.exp(tl.load(totals + at) - largest)
        total += weight
        result += weight * tl.load(parts + at * head_dim + numbers, mask=inside, other=0.0)
    place = query.to(tl.int64) * head_dim + numbers
    tl.store(out + place, (result / total).to(out.dtype.element_ty), mask=inside)


def takes_own_keys(q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, mask: OwnKeys) -> bool:
    """Returns whether the kernel runs: one query per row, no gradients, keys and values of one dtype and layout."""
    is_one_type = q_BNTH.dtype == k_BGSH.dtype == v_BGSH.dtype and q_BNTH.dtype in DTYPES
    fits = k_BGSH.shape == v_BGSH.shape and k_BGSH.stride() == v_BGSH.stride() and k_BGSH.stride(-1) == 1
    return q_BNTH.is_cuda and is_one_type and fits and q_BNTH.shape[2] == 1 and not q_BNTH.requires_grad


def attend_own_keys(q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, mask: OwnKeys) -> Tensor:
    """Compute `lm.attention.attend_own_keys` in one kernel, or in two if a row may have more than `SPLIT` keys.

    A row's result has the same bits whatever S and the other rows are.
    """
    (B, N, _, H), (G, S) = q_BNTH.shape, k_BGSH.shape[1:3]
    R, P = N // G, triton.cdiv(S, SPLIT)
    q_BNTH = q_BNTH.contiguous()
    y_BNTH = torch.empty_like(q_BNTH)
    parts = totals = y_BNTH
    if P > 1:
        parts = torch.empty(B * G * P * R * H, dtype=torch.float32, device=q_BNTH.device)
        totals = torch.empty(B * G * P * R, dtype=torch.float32, device=q_BNTH.device)
    head = max(16, triton.next_power_of_2(H))
    # Keys and values of two blocks fit together in an A100's 160 KB.
    block = min(64, max(16, 32768 // (head * k_BGSH.element_size())))
    _attend_kernel[(B * G, P)](
        q_BNTH, k_BGSH, v_BGSH, mask.last_B, y_BNTH, parts, totals, G, R, H, 1 / math.sqrt(H), mask.window,
        k_BGSH.stride(0), k_BGSH.stride(1), k_BGSH.stride(2), P,
        SPLITS=P > 1, SPLIT=SPLIT, QUERIES=max(FEWEST_QUERIES, triton.next_power_of_2(R)), BLOCK=block, HEAD=head,
        num_stages=2,
    )  # fmt: skip
    if P > 1:
        _merge_kernel[(B * N,)](
            parts, totals, mask.last_B, y_BNTH, G, R, H, mask.window, P, SPLIT=SPLIT, HEAD=head, num_warps=1
        )
    return y_BNTH
