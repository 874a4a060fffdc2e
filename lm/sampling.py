"""The next token: the log-probability of a given one, and how one is drawn.

Shape letters: B batch, V vocabulary, P padded vocabulary, C positions, S strides of J tokens, N places.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
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


STRIDE = 64  # tokens whose probabilities are summed before the search; kernels.cpp has the same number


@dataclass(frozen=True)
class Choice:
    """Sampling settings.

    `temperature` 0 is greedy. `top_k` keeps the k likeliest tokens of softmax(logits / temperature); 0 = all. Of those,
    `top_p` keeps the fewest whose probabilities sum to it (arXiv 1904.09751).

    Raises: ValueError for values outside their range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}; 0 (greedy) or more was expected")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; a number of tokens was expected, 0 for all")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; more than 0 and at most 1 was expected")

    def draw(self, logits_BV: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the next token [B], by inverting the cumulative distribution at a uniform draw, and its
        log-probability [B], nats in fp32, at the temperature (greedy: 1), before top_k and top_p.
        """
        if self.temperature == 0:
            tokens_B = logits_BV.argmax(dim=-1)
            return tokens_B, token_logprobs(logits_BV, tokens_B)
        if not self.top_k and self.top_p == 1:
            return sample(logits_BV, uniforms_B, self.temperature)
        probabilities_BV = _softmax(logits_BV, self.temperature)
        return _invert(self._left(probabilities_BV), probabilities_BV, uniforms_B)

    def _left(self, probabilities_BV: Tensor) -> Tensor:
        """Returns the probabilities that top_k and top_p keep; 0 elsewhere."""
        if self.top_k and self.top_k < probabilities_BV.shape[-1]:
            probabilities_BV = _only(probabilities_BV, probabilities_BV.topk(self.top_k, dim=-1).indices)
        if self.top_p < 1:
            ranked_BV, order_BV = probabilities_BV.sort(dim=-1, descending=True, stable=True)
            before_BV = ranked_BV.cumsum(dim=-1) - ranked_BV
            # A token is kept if those before it sum to less than top_p of what top_k kept.
            kept_BV = before_BV < self.top_p * ranked_BV.sum(dim=-1, keepdim=True)
            probabilities_BV = probabilities_BV.new_zeros(probabilities_BV.shape).scatter(
                -1, order_BV, ranked_BV * kept_BV
            )
        return probabilities_BV


@Replaceable
def sample(logits_BV: Tensor, uniforms_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw a token of softmax(logits / temperature) per uniform number, and return its log-probability: [B] each."""
    probabilities_BV = _softmax(logits_BV, temperature)
    return _invert(probabilities_BV, probabilities_BV, uniforms_B)


def _softmax(logits_BV: Tensor, temperature: float) -> Tensor:
    """Softmax in fp32; the temperature must be above 0."""
    logits_BV = logits_BV.float()
    return torch.softmax(logits_BV if temperature == 1 else logits_BV / temperature, dim=-1)


def _invert(weights_BV: Tensor, probabilities_BV: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the tokens at which the running sum of the weights passes the uniform share of their total, and their
    log-probabilities.

    Weights are summed as integers, in units of 2^-40. Whatever the order in which a GPU's scan adds them, the sum rises
    only at tokens with at least one unit, so no other token is drawn. A scan in fp32 rounds so much that its result may
    even fall.
    """
    units_BV = (weights_BV * 2.0**40).long()
    padded_BV = F.pad(units_BV, (0, -units_BV.shape[1] % STRIDE))
    strides_BSJ = padded_BV.unflatten(-1, (-1, STRIDE))
    sums_BS = strides_BSJ.sum(dim=-1)
    running_BS = sums_BS.cumsum(dim=-1)
    threshold_B1 = (uniforms_B[:, None].double() * running_BS[:, -1:]).long()
    stride_B1 = _first_above(running_BS, threshold_B1)
    before_B1 = running_BS.gather(-1, stride_B1) - sums_BS.gather(-1, stride_B1)
    within_BJ = strides_BSJ.gather(1, stride_B1[:, :, None].expand(-1, -1, STRIDE))[:, 0]
    place_B1 = _first_above(within_BJ.cumsum(dim=-1), threshold_B1 - before_B1)
    tokens_B1 = (STRIDE * stride_B1 + place_B1).clamp(max=weights_BV.shape[1] - 1)
    # Taking the log of the softmax at one token saves a second pass over the vocabulary.
    return tokens_B1[:, 0], probabilities_BV.gather(-1, tokens_B1)[:, 0].log()


def _first_above(running_BN: Tensor, threshold_B1: Tensor) -> Tensor:
    """Returns the first place where the running sum exceeds the threshold; the last place if none does, as with NaN."""
    return torch.searchsorted(running_BN, threshold_B1, right=True).clamp(max=running_BN.shape[1] - 1)


def _only(values_BV: Tensor, kept_BK: Tensor) -> Tensor:
    """Returns the values at the kept places; 0 elsewhere."""
    return torch.zeros_like(values_BV).scatter(-1, kept_BK, values_BV.gather(-1, kept_BK))


def draw_uniforms(seeds: Sequence[int], num_steps: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Draw one uniform number per sequence and step, [B, R]; each row has its own counter-based generator."""
    draws = np.empty((len(seeds), num_steps), dtype=np.float32)
    for row, seed in enumerate(seeds):
        draws[row] = np.random.Generator(np.random.Philox(key=seed)).random(num_steps, dtype=np.float32)
    return draws
