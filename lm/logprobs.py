"""Log-probabilities of given tokens. Shape letters: C positions, V vocabulary, P padded vocabulary."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lm.layers import Replaceable, padded_rows

# fp32 numbers in memory at once: on a CPU as many as fit a core's cache, on a GPU enough to make launches negligible.
PART_NUMBERS = {"cpu": 2**18, "cuda": 2**26}
# Logits in memory at once when responses are scored without gradients: a quarter of a GB in fp32 on a GPU.
LOGITS_AT_ONCE = {"cpu": 2**24, "cuda": 2**26}


def token_logprobs(logits_CV: Tensor, tokens_C: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at `tokens`, [C] nats, in fp32; any leading dimensions work.

    Use the sampling temperature: another temperature is another policy.
    """
    V = logits_CV.shape[-1]
    return logprobs_of_rows(logits_CV.reshape(-1, V), tokens_C.reshape(-1), temperature).view(tokens_C.shape)


@Replaceable
def logprobs_of_rows(logits_CV: Tensor, tokens_C: Tensor, temperature: float) -> Tensor:
    """Computes `token_logprobs` of [C, V] and [C]."""
    logits_CP = padded_rows(logits_CV)
    return _TokenLogprobs.apply(logits_CP, logits_CV.shape[1], tokens_C, temperature)  # type: ignore[no-untyped-call]


class _TokenLogprobs(torch.autograd.Function):
    """l_t - ln Σ_v exp(l_v), l = logits / temperature, whose gradient is (1[v = t] - softmax(l)_v) / temperature.

    It is written out so that only some positions at a time have fp32 numbers over the vocabulary. For all positions
    these would be the largest tensors of a small model's step, and each pass over them would go through main memory.
    Columns from `num_tokens` on are a head's padding (`lm.layers.Head`), with a gradient of 0.
    """

    @staticmethod
    def forward(ctx: Any, logits_CP: Tensor, num_tokens: int, tokens_C: Tensor, temperature: float) -> Tensor:
        ctx.temperature, ctx.num_tokens = temperature, num_tokens
        logits_CV = logits_CP[:, :num_tokens]
        totals_C = torch.empty(len(tokens_C), device=logits_CV.device)
        for part in _parts(logits_CV):
            totals_C[part] = _scaled(logits_CV[part], temperature).logsumexp(dim=-1)
        chosen_C = _scaled(logits_CV.gather(-1, tokens_C[:, None])[:, 0], temperature)
        ctx.save_for_backward(logits_CP, tokens_C, totals_C)
        return chosen_C - totals_C

    @staticmethod
    def backward(ctx: Any, gradient_C: Tensor) -> tuple[Tensor, None, None, None]:
        logits_CP, tokens_C, totals_C = ctx.saved_tensors
        scale_C1 = gradient_C[:, None] / ctx.temperature
        result_CP = torch.empty_like(logits_CP)
        if result_CP.shape[1] > ctx.num_tokens:
            result_CP[:, ctx.num_tokens :] = 0
        logits_CV, result_CV = logits_CP[:, : ctx.num_tokens], result_CP[:, : ctx.num_tokens]
        for part in _parts(logits_CV):
            softmax = (_scaled(logits_CV[part], ctx.temperature) - totals_C[part, None]).exp_()
            result_CV[part] = softmax.mul_(-scale_C1[part]).scatter_add_(-1, tokens_C[part, None], scale_C1[part])
        return result_CP, None, None, None


def _parts(logits_CV: Tensor) -> Iterator[slice]:
    """Returns slices of positions with at most `PART_NUMBERS` logits each."""
    size = max(1, PART_NUMBERS[logits_CV.device.type] // logits_CV.shape[-1])
    return (slice(start, start + size) for start in range(0, len(logits_CV), size))


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits.float() if temperature == 1.0 else logits.float() / temperature


def entropy(logits_CV: Tensor, temperature: float = 1.0) -> Tensor:
    """-Σ p log p of softmax(logits / temperature), [C] nats."""
    logprobs_CV = torch.log_softmax(logits_CV.float() / temperature, dim=-1)
    return -(logprobs_CV.exp() * logprobs_CV).sum(dim=-1)
