"""Proof that the sampler holds the policy that learns: its log-probs of the tokens it sampled against the learner's.

Digests prove that weights arrived. This proves what an engine computes from them, whatever it is: layers in the wrong
place, an output head that was kept, weights or a cache that are one update old, another temperature or tokenizer all
move these numbers far beyond rounding.
"""

import math

import torch
from torch import Tensor

from ppo.rollout import Rollout
from training.failures import RunError

# Nats per token, mean of |difference|. The debug job's, with Heed's generator: 2e-7 in fp32 and .005 in bf16.
MAX_DIFFERENCE = {"fp32": 0.001, "bf16": 0.05}
MAX_RATIO_ERROR = 0.02  # of the mean ratio π_learner / π_sampler, which is 1 + rounding over tokens from π_sampler
MIN_TOKENS = 64  # fewer say nothing about the mean ratio, which then depends on a few unlikely tokens
NUM_WORST = 3


def sampler_metrics(logprobs_BR: Tensor, rollout: Rollout) -> dict[str, float]:
    """Mean |log π_learner - log π_sampler| per sampled token, in nats; 0 up to rounding where both are one policy."""
    difference_C = (logprobs_BR - rollout.behaviour_logprobs_BR)[rollout.response_mask_BR]
    return {"sampler_difference": float(difference_C.abs().mean())}


def require_one_policy(logprobs_BR: Tensor, rollout: Rollout, iteration: int, precision: str) -> None:
    """Raises: RunError, which names the worst tokens, where sampler and learner are different policies."""
    mask_BR, sampler_BR = rollout.response_mask_BR, rollout.behaviour_logprobs_BR
    difference_BR = torch.where(mask_BR, logprobs_BR - sampler_BR, 0.0)
    difference_C = difference_BR[mask_BR]
    mean, ratio = float(difference_C.abs().mean()), float(difference_C.exp().mean())
    most = MAX_DIFFERENCE[precision]
    # Not "beyond": a comparison with NaN is false.
    if mean <= most and (len(difference_C) < MIN_TOKENS or abs(ratio - 1) <= MAX_RATIO_ERROR):
        return
    worst = difference_BR.abs().nan_to_num(math.inf).view(-1).topk(min(NUM_WORST, difference_BR.numel())).indices
    named = "; ".join(
        _token(rollout, row, place, sampler_BR, logprobs_BR)
        for row, place in (divmod(flat, mask_BR.shape[1]) for flat in worst.tolist())
    )
    raise RunError(
        f"ppo: iteration {iteration + 1}: the sampler is another policy than the one that learns: their log-probs of"
        f" {len(difference_C):,} sampled tokens differ by {mean:.4f} nats on average (at most {most} is rounding in"
        f" {precision}), the mean ratio is {ratio:.4f}. Its weights, cache, temperature or tokenizer are not the"
        f" learner's. The worst: {named}"
    )


def _token(rollout: Rollout, row: int, place: int, sampler_BR: Tensor, logprobs_BR: Tensor) -> str:
    return (
        f"prompt {int(rollout.prompt_rows_B[row])}, token {place + 1} (id {int(rollout.response_BR[row, place])}):"
        f" sampler {float(sampler_BR[row, place]):.3f}, learner {float(logprobs_BR[row, place]):.3f}"
    )
