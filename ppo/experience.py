"""A scored rollout, and what is logged about it.

Shape letters: B responses, M teachers, O objectives, R response tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo.config import PPOConfig
from ppo.groups import StepRewards
from ppo.roles import ModelOutputs
from ppo.rollout import FAILURES, Rollout


@dataclass(frozen=True)
class Experience:
    """A scored rollout: everything that rewards and advantages are computed from."""

    rollout: Rollout
    scores_BO: Tensor  # score per objective, higher is better; NaN where scoring failed (steps: see `Scorers`)
    scores_B: Tensor  # weighted sum over the objectives
    scored_B: Tensor  # True = has a score
    scaled_scores_B: Tensor  # scores in the rewards' unit, minus the penalty for a missing EOS; 0 where scoring failed
    outputs: ModelOutputs  # log-probs under policy, reference and teachers, and values
    staleness: int  # iterations between the weights that sampled the rollout and those that learn from it
    sampler_difference: float  # mean |difference| between the sampler's and the learner's log-probs, nats per token
    oversampling: Mapping[str, float]  # metrics of the choice among the sampled groups; empty without oversampling
    failures: Mapping[str, int]  # responses without a score by kind of failure, where the reward has kinds
    steps: StepRewards | None = None  # with `reward.steps`: scaled, with the penalty for a missing EOS

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
            **self._step_metrics(),
            "staleness": float(self.staleness),
            "sampler_difference": self.sampler_difference,
            **self._teacher_kls(config.teacher_names),
        }

    def _scores_by_objective(self, config: PPOConfig) -> dict[str, float]:
        """Returns the mean of the scores that each objective gave, and the share that it failed to give, if there are
        several; and the number of failures of each kind.
        """
        weights, scores_BO = config.reward.objective_weights, self.scores_BO
        reward = config.external_reward
        may_be_left_out = reward is not None and reward.leaves_parts_out
        means_O, failed_O = scores_BO.nanmean(dim=0), scores_BO.isnan().float().mean(dim=0)
        found = {f"failures/{kind}": float(number) for kind, number in self.failures.items()}
        for (name, weight), mean, failed in zip(weights.items(), means_O.tolist(), failed_O.tolist(), strict=False):
            if math.isfinite(mean):  # a mean of no scores is not
                found[f"score/{name}"] = mean
            if weight or not may_be_left_out:
                found[f"failed/{name}"] = failed
        return found

    def _step_metrics(self) -> dict[str, float]:
        """Returns the mean number of steps of a scored response, and the mean that one is paid, before scaling."""
        if self.steps is None:
            return {}
        ends_BR = self.steps.ends_BR
        num_steps_B = ends_BR.sum(dim=1)[self.scored_B]
        return {
            "steps": float(num_steps_B.float().mean()),
            "paid_per_step": float(self.scores_BO[ends_BR].mean()),
        }

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
