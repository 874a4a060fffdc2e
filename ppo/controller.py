"""Proximal policy optimisation of a language model: the whole algorithm.

Sample, score, penalise, estimate advantages, learn in epochs of minibatches, adjust the KL coefficient. Where the
models are and how many ranks share the work is up to the roles. With `max_staleness` the next rollouts are sampled
meanwhile, by weights that are a fixed number of iterations old, no matter which side is faster.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cluster.remote import Pending
from ppo.algorithm import KLController, generalised_advantages, importance_weights, token_rewards, whiten
from ppo.config import PPOConfig
from ppo.initial_models import ScoreScale
from ppo.roles import Roles
from ppo.rollout import PolicyBatch, Rollout, ValueBatch
from training.failures import RunError
from training.packing import Sampler
from training.seeds import derive_seed

# Covers the rounding of bf16 passes over batches of different shapes; a policy that really differs is far beyond it.
MAX_FIRST_RATIO_ERROR = 0.05


class PPOController:
    """Runs iterations; its whole state is the iteration number, the KL coefficient and the rollouts in flight."""

    def __init__(
        self,
        config: PPOConfig,
        roles: Roles,
        prompts: Sequence[Sequence[int]],
        scale: ScoreScale,
        *,
        num_pretraining_rows: int,
        seed: int,
    ) -> None:
        self.config, self.roles, self.prompts, self.scale, self.seed = config, roles, prompts, scale, seed
        self.weights_O = torch.tensor([*config.objective_weights.values()] or [1.0])
        self.kl = KLController(config, config.kl_coef)
        self.in_flight: dict[int, Pending[Rollout]] = {}  # by the iteration that will learn from it
        self.prompt_order = Sampler(len(prompts), config.rollout_batch_size, derive_seed(seed, "ppo", "prompts"))
        self.ptx_order = Sampler(max(1, num_pretraining_rows), config.ptx_rows, derive_seed(seed, "ppo", "ptx"))

    def step(self, iteration: int) -> dict[str, float]:
        """One iteration of the algorithm, 0 .. num_iterations - 1. Returns its metrics."""
        config, learners, scorers = self.config, self.roles.learners, self.roles.scorers
        self.start_sampling(iteration)
        rollout = self.in_flight.pop(iteration)()
        # Started together: on ranks of their own, scorers and learners work at the same time.
        scores, logprobs = scorers.start_scores(rollout), learners.start_policy_logprobs(rollout)
        ref_logprobs, values = scorers.start_reference_logprobs(rollout), learners.start_values(rollout)
        scores_BO, logprobs_BR, ref_logprobs_BR, values_BR = scores(), logprobs(), ref_logprobs(), values()

        scores_B = (scores_BO * self.weights_O).sum(dim=1)
        scored_B = self._require_scores(scores_B)
        mask_BR = rollout.response_mask_BR & scored_B[:, None]
        terminal_rewards_B = self.scale.apply(scores_B) - config.missing_eos_penalty * ~rollout.finished_B
        terminal_rewards_B = torch.where(scored_B, terminal_rewards_B, 0.0)
        rewards_BR, kl_B = token_rewards(terminal_rewards_B, logprobs_BR, ref_logprobs_BR, mask_BR, self.kl.coef)
        advantages_BR, returns_BR = generalised_advantages(
            rewards_BR, values_BR, mask_BR, config.gamma, config.gae_lambda
        )
        advantages_BR = whiten(advantages_BR, mask_BR)
        importance_BR, importance_metrics = importance_weights(
            logprobs_BR, rollout.behaviour_logprobs_BR, mask_BR, config.importance_cap
        )
        staleness = min(iteration, config.max_staleness)
        if staleness:  # otherwise both policies are the same and differ by rounding
            advantages_BR = importance_BR * advantages_BR

        metrics = self._learn(iteration, rollout, mask_BR, logprobs_BR, advantages_BR, values_BR, returns_BR)
        kl_nats = float(kl_B[scored_B].mean())
        means_O = scores_BO[scored_B].mean(dim=0).tolist()
        metrics |= {f"score/{name}": mean for name, mean in zip(config.objective_weights, means_O, strict=False)}
        metrics |= importance_metrics | {
            "staleness": float(staleness),
            "score": float(scores_B[scored_B].mean()),
            "scaled_score": float(self.scale.apply(scores_B)[scored_B].mean()),
            "kl_nats": kl_nats,
            "kl_coef": self.kl.coef,
            "eos_rate": float(rollout.finished_B.float().mean()),
            "response_tokens": float(rollout.response_tokens_B.float().mean()),
            "entropy_estimate": float(-logprobs_BR[mask_BR].mean()),
            "failed_scores": float((~scored_B).sum()),
            "value_explained": _explained(values_BR[mask_BR], returns_BR[mask_BR]),
        }
        self.kl.update(kl_nats, len(rollout))
        self.roles.sync_weights()
        return metrics

    def start_sampling(self, iteration: int) -> None:
        """Begin the rollouts sampled with the weights that an iteration starts with, unless they are under way.

        At first these are its own and `max_staleness` more, then the one that many iterations ahead.
        """
        for ahead in self._window(iteration, self.config.max_staleness + 1):
            if ahead not in self.in_flight:
                chosen = self.prompt_order.batch(ahead).tolist()
                seeds = [derive_seed(self.seed, "ppo", "sample", ahead, place) for place in range(len(chosen))]
                prompts = [self.prompts[row] for row in chosen]
                self.in_flight[ahead] = self.roles.start_sampling(chosen, prompts, seeds)

    def stale_rollouts(self, iteration: int) -> dict[int, Rollout]:
        """Wait for the rollouts, for this and later iterations, that are sampled with older weights than this one's.

        They belong in a checkpoint, whose weights can sample all the others but not these.
        """
        return {ahead: self.in_flight[ahead]() for ahead in self._window(iteration, self.config.max_staleness)}

    def _window(self, iteration: int, size: int) -> range:
        return range(iteration, min(iteration + size, self.config.num_iterations))

    def _require_scores(self, scores_B: Tensor) -> Tensor:
        """True = scored. Raises ValueError where too many scores failed."""
        scored_B = torch.isfinite(scores_B)
        failed = int((~scored_B).sum())
        if failed > self.config.max_failed_share * len(scores_B):
            raise ValueError(
                f"{failed} of {len(scores_B)} responses have no finite score;"
                f" ppo.max_failed_share allows {self.config.max_failed_share:.0%}."
                f" The first: {self.roles.scorers.first_failure() or 'it is infinite'}"
            )
        return scored_B

    def _learn(
        self,
        iteration: int,
        rollout: Rollout,
        mask_BR: Tensor,
        logprobs_BR: Tensor,
        advantages_BR: Tensor,
        values_BR: Tensor,
        returns_BR: Tensor,
    ) -> dict[str, float]:
        """Update policy and value function on epochs of minibatches. Returns the means of the updates' metrics."""
        config, learners = self.config, self.roles.learners
        num_updates = config.num_iterations * config.updates_per_iteration
        collected: list[Mapping[str, float]] = []
        for number, rows in enumerate(self._minibatches(iteration, len(rollout))):
            update = iteration * config.updates_per_iteration + number
            part, part_mask_BR = rollout.rows(rows), mask_BR[rows]
            num_tokens = max(1, int(part_mask_BR.sum()))  # 0 where every score of the minibatch failed
            ptx_rows = torch.from_numpy(self.ptx_order.batch(update)) if config.ptx_rows else torch.arange(0)
            policy = learners.update_policy(
                PolicyBatch(
                    part, logprobs_BR[rows], advantages_BR[rows], part_mask_BR, num_tokens, ptx_rows, len(ptx_rows)
                ),
                config.policy_optimizer.rate(update, num_updates),
                update,
            )
            value = learners.update_value(
                ValueBatch(part, values_BR[rows], returns_BR[rows], part_mask_BR, num_tokens),
                config.value_optimizer.rate(update, num_updates),
                update,
            )
            if number == 0:
                _require_same_policy(policy["ratio_error"], iteration)
            collected.append({**policy, **value})
        return {name: float(np.mean([metrics[name] for metrics in collected])) for name in collected[0]}

    def _minibatches(self, iteration: int, num_responses: int) -> list[Tensor]:
        """Row numbers of every update of an iteration: each epoch shuffles again."""
        batches: list[Tensor] = []
        for epoch in range(self.config.num_epochs):
            seed = derive_seed(self.seed, "ppo", "shuffle", iteration, epoch)
            rows = torch.randperm(num_responses, generator=torch.Generator().manual_seed(seed))
            batches.extend(rows.split(self.config.minibatch.batch_size))
        return batches


def _require_same_policy(ratio_error: float, iteration: int) -> None:
    """Raises RunError where the first update finds another policy than the one that gave the log-probabilities."""
    if not ratio_error < MAX_FIRST_RATIO_ERROR:
        raise RunError(
            f"ppo: iteration {iteration + 1}: |ratio - 1| is {ratio_error:.4f} on the first minibatch, where the policy"
            f" has not moved; at most {MAX_FIRST_RATIO_ERROR} is rounding. The passes with and without gradients"
            ' disagree: try engine.precision = "fp32"; if that does not help, this is a defect of Heed'
        )


def _explained(values_C: Tensor, returns_C: Tensor) -> float:
    """Share of the returns' variance that the values explain; 1 is best, negative is worse than a constant."""
    variance = returns_C.var(correction=0)
    return float(1 - (returns_C - values_C).var(correction=0) / variance) if variance > 0 else float("nan")
