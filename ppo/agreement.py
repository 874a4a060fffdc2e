"""Checks that the policy that samples, the one that computes log-probs and the one that is updated are the same.

Shape letters: B responses, C counted tokens, R response tokens.
"""

import math

import torch
from torch import Tensor

from lm.samplers.engine import Agreement
from ppo.rollout import Rollout
from training.notices import RunError

# |ratio - 1| on the first minibatch, where the policy has not moved. On CPUs it is 0, since both passes read the same
# rows. GPU kernels may round differently when gradients are needed; a policy that really differs exceeds this by far.
MAX_FIRST_RATIO_ERROR = 0.05
NUM_WORST = 3  # tokens that the error names if sampler and learner disagree


def require_same_policy(ratio_error: float, iteration: int, max_difference: float) -> None:
    """Raises RunError if the first update's policy differs from the one that computed the log-probs."""
    most = max(MAX_FIRST_RATIO_ERROR, max_difference)
    if not ratio_error < most:
        raise RunError(
            f"ppo: iteration {iteration + 1}: |ratio - 1| is {ratio_error:.4f} on the first minibatch, before the"
            f" policy has changed; rounding explains at most {most:.2f}. The passes with and without gradients"
            ' disagree: try engine.precision = "fp32"; if that does not help, this is a defect of Heed'
        )


def sampler_agreement(logprobs_BR: Tensor, rollout: Rollout) -> Agreement:
    """Measure how far the learner's log-probs are from those that the sampler reported."""
    difference_C = (logprobs_BR - rollout.behaviour_logprobs_BR)[rollout.response_mask_BR]
    return Agreement.of(difference_C, rollout.num_written_B.tolist())


def require_one_policy(logprobs_BR: Tensor, rollout: Rollout, iteration: int, max_difference: float) -> Agreement:
    """Check that sampler and learner are the same policy, by their log-probs of the sampled tokens. Returns how far
    they agree.

    Digests prove that the weights arrived. This check covers what an engine computes from them, whichever engine it is:
    layers in the wrong place, an old output head, weights or a cache that are one update old, another temperature or
    tokenizer all move the log-probs far beyond rounding.

    Raises:
        RunError: they differ by more than rounding of `max_difference` nats per token; names the worst tokens.
    """
    agreement = sampler_agreement(logprobs_BR, rollout)
    if agreement.holds(max_difference):
        return agreement
    mask_BR, sampler_BR = rollout.response_mask_BR, rollout.behaviour_logprobs_BR
    difference_BR = torch.where(mask_BR, logprobs_BR - sampler_BR, 0.0)
    worst = difference_BR.abs().nan_to_num(math.inf).view(-1).topk(min(NUM_WORST, difference_BR.numel())).indices
    tokens = [divmod(flat, mask_BR.shape[1]) for flat in worst.tolist()]
    named = "; ".join(
        f"prompt {int(rollout.prompt_rows_B[row])}, token {place + 1} (id {int(rollout.response_BR[row, place])}):"
        f" sampler {float(sampler_BR[row, place]):.3f}, learner {float(logprobs_BR[row, place]):.3f}"
        for row, place in tokens
    )
    raise RunError(
        f"ppo: iteration {iteration + 1}: the sampler and the learner disagree: their log-probs of"
        f" {int(mask_BR.sum()):,} sampled tokens differ by {agreement.difference:.4f} nats on average (rounding"
        f" explains at most {max_difference:.4f}) and by {agreement.worst_response:.4f} in the worst response; the"
        f" mean ratio is {agreement.ratio:.4f}. The sampler's weights, cache, temperature or tokenizer differ from the"
        f" learner's. The worst tokens: {named}"
    )
