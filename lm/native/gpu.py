"""Triton kernels for GPUs, with the same functions as the CPU kernels. Importing this module needs Triton.

With TRITON_INTERPRET=1 they run on a CPU, so their arithmetic is tested without a GPU.

Shape letters: V vocabulary, P padded vocabulary, C positions.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lm.layers import padded_rows

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
