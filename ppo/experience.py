"""A scored rollout, what is logged about it, and the check that the policy that samples is the one that learns.

Shape letters: B responses, C counted tokens, M teachers, O objectives, R response tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lm.samplers.engine import Agreement
from ppo.config import PPOConfig
from ppo.roles import ModelOutputs
from ppo.rollout import FAILURES, Rollout
from training.notices import RunError

# |ratio - 1| on the first minibatch, where the policy has not moved. On CPUs it is 0, since both passes read the same
# rows. GPU kernels may round differently when gradients are needed; a policy that really differs exceeds this by far.
MAX_FIRST_RATIO_ERROR = 0.05
NUM_WORST = 3  # tokens that the error names if sampler and learner disagree


@dataclass(frozen=True)
class Experience:
    """A scored rollout: everything that rewards and advantages are computed from."""

    rollout: Rollout
    scores_BO: Tensor  # score per objective, higher is better; NaN where scoring failed
    scored_by_BO: Tensor  # True = the objective scores this response; its prompt's row may choose (`scored_by`)
    scores_B: Tensor  # weighted sum over the objectives that score the response
    scored_B: Tensor  # True = has a score
    scaled_scores_B: Tensor  # scores in the rewards' unit, minus the penalty for a missing EOS; 0 where scoring failed
    outputs: ModelOutputs  # log-probs under policy, reference and teachers, and values
    staleness: int  # iterations between the weights that sampled the rollout and those that learn from it
    sampler_difference: float  # mean |difference| between the sampler's and the learner's log-probs, nats per token
    route_changes: Mapping[str, float]  # metrics of replayed routes (`ppo.routes`); empty without any
    oversampling: Mapping[str, float]  # metrics of the choice among the sampled groups; empty without oversampling
    failures: Mapping[str, int]  # responses by kind of failure, where the reward has kinds

    @property
    def scored_BR(self) -> Tensor:
        """True = a token that the policy wrote, of a response with a score."""
        return self.rollout.response_mask_BR & self.scored_B[:, None]

    def metrics(self, config: PPOConfig) -> dict[str, float]:
        """Returns the rollout's metrics. Scores and entropy are means over the responses that have a score."""
        rollout, scores_B, scored_B = self.rollout, self.scores_B, self.scored_B
        return {
            **self._scores_by_objective(config),
            **self.oversampling,
            **({"score": float(scores_B[scored_B].mean())} if config.has_score else {}),
            **({} if config.environment is None else self._environment_metrics()),
            "eos_rate": float(rollout.finished_B.float().mean()),
            "response_tokens": float(rollout.num_written_B.float().mean()),
            "entropy_estimate": float(-self.outputs.logprobs_BR[self.scored_BR].mean()),
            "failed_scores": float((~scored_B).sum()),
            "staleness": float(self.staleness),
            "sampler_difference": self.sampler_difference,
            **self.route_changes,
            **self._teacher_kls(config.teacher_names),
        }

    def _scores_by_objective(self, config: PPOConfig) -> dict[str, float]:
        """Returns the mean of the scores that each objective gave, and the share that it failed to give, if there are
        several; and the number of failures of each kind.
        """
        weights, scores_BO = config.reward.objective_weights, self.scores_BO
        reward = config.external_reward
        may_be_left_out = reward is not None and reward.leaves_parts_out
        num_asked_O = self.scored_by_BO.sum(dim=0)
        means_O = scores_BO.nanmean(dim=0)
        failed_O = (scores_BO.isnan() & self.scored_by_BO).sum(dim=0) / num_asked_O  # NaN if it scores no response
        found = {f"failures/{kind}": float(number) for kind, number in self.failures.items()}
        for (name, weight), mean, failed in zip(weights.items(), means_O.tolist(), failed_O.tolist(), strict=False):
            if math.isfinite(mean):  # a mean of no scores is not
                found[f"score/{name}"] = mean
            if math.isfinite(failed) and (weight or not may_be_left_out):
                found[f"failed/{name}"] = failed
        return found

    def _environment_metrics(self) -> dict[str, float]:
        """Returns metrics of conversations: means over all responses, and the share that each failure cost."""
        rollout = self.rollout
        replies_B = rollout.response_tokens_B - rollout.num_written_B
        shares = {reason: float((rollout.failure_B == place).float().mean()) for place, reason in enumerate(FAILURES)}
        return {
            "turns": float(rollout.num_turns_B.float().mean()),
            "environment_tokens": float(replies_B.float().mean()),
            "environment_seconds": float(rollout.environment_seconds_B.mean()),
            **{f"environment_failed/{reason}": share for reason, share in shares.items() if reason},
        }

    def _teacher_kls(self, names: Sequence[str]) -> dict[str, float]:
        """Returns the KL from each teacher: the mean over scored responses of Σ log π - log π_T, in nats."""
        outputs = self.outputs
        log_ratio_BMR = outputs.logprobs_BR[:, None] - outputs.teacher_logprobs_BMR
        kl_M = torch.where(self.scored_BR[:, None], log_ratio_BMR, 0.0).sum(dim=2)[self.scored_B].mean(dim=0)
        keys = ["teacher_kl_nats"] if len(names) == 1 else [f"teacher_kl_nats/{name}" for name in names]
        return dict(zip(keys, kl_M.tolist(), strict=True))


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
