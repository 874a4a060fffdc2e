"""Proof that the sampler holds the policy that learns: its log-probs of the tokens it sampled against the learner's.

Digests prove that weights arrived. This proves what an engine computes from them, whatever it is: layers in the wrong
place, an output head that was kept, weights or a cache that are one update old, another temperature or tokenizer all
move these numbers far beyond rounding.
"""

import math

import torch
from torch import Tensor

from lm.samplers.engine import Agreement
from ppo.rollout import Rollout
from training.notices import RunError

NUM_WORST = 3


def sampler_agreement(logprobs_BR: Tensor, rollout: Rollout) -> Agreement:
    """How far the learner's log-probs are from those that the sampler reported."""
    difference_C = (logprobs_BR - rollout.behaviour_logprobs_BR)[rollout.response_mask_BR]
    return Agreement.of(difference_C, rollout.response_tokens_B.tolist())


def require_one_policy(logprobs_BR: Tensor, rollout: Rollout, iteration: int, max_difference: float) -> Agreement:
    """Returns how sampler and learner agree.

    Raises: RunError, which names the worst tokens, if they are further apart than a rounding of `max_difference` nats
    per token explains.
    """
    found = sampler_agreement(logprobs_BR, rollout)
    if found.holds(max_difference):
        return found
    mask_BR, sampler_BR = rollout.response_mask_BR, rollout.behaviour_logprobs_BR
    difference_BR = torch.where(mask_BR, logprobs_BR - sampler_BR, 0.0)
    worst = difference_BR.abs().nan_to_num(math.inf).view(-1).topk(min(NUM_WORST, difference_BR.numel())).indices
    named = "; ".join(
        _token(rollout, row, place, sampler_BR, logprobs_BR)
        for row, place in (divmod(flat, mask_BR.shape[1]) for flat in worst.tolist())
    )
    raise RunError(
        f"ppo: iteration {iteration + 1}: the sampler is another policy than the one that learns: their log-probs of"
        f" {int(mask_BR.sum()):,} sampled tokens differ by {found.difference:.4f} nats on average (at most"
        f" {max_difference:.4f} is rounding) and by {found.worst_response:.4f} in the worst response; the mean ratio is"
        f" {found.ratio:.4f}. Its weights, cache, temperature or tokenizer are not the"
        f" learner's. The worst: {named}"
    )


def _token(rollout: Rollout, row: int, place: int, sampler_BR: Tensor, logprobs_BR: Tensor) -> str:
    return (
        f"prompt {int(rollout.prompt_rows_B[row])}, token {place + 1} (id {int(rollout.response_BR[row, place])}):"
        f" sampler {float(sampler_BR[row, place]):.3f}, learner {float(logprobs_BR[row, place]):.3f}"
    )
