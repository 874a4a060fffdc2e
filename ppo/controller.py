"""Policy gradients of a language model, with or without a value function: the whole algorithm.

Sample, score, penalise, estimate advantages, learn in epochs of minibatches, adjust the KL coefficient. Where the
models are and how many ranks share the work is up to the roles. With `max_staleness` the next rollouts are sampled
meanwhile, by weights that are a fixed number of iterations old, no matter which side is faster.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cluster.remote import Pending
from lm.samplers.sent_weights import shown, whole_digest
from ppo.algorithm import (
    KLController,
    generalised_advantages,
    importance_weights,
    token_rewards,
    token_weights,
    whiten,
)
from ppo.config import PPOConfig
from ppo.groups import Advantages, informative_groups
from ppo.initial_models import ScoreScale
from ppo.phase_seconds import PhaseSeconds
from ppo.roles import Measured, Roles
from ppo.rollout import PolicyBatch, ResponseKL, Rollout, ValueBatch
from ppo.rollout_log import RolloutLog
from ppo.sampler_proof import require_one_policy, sampler_agreement
from ppo.samples import SampleLog, ScoredRollout
from training.notices import RunError
from training.packing import Sampler
from training.seeds import derive_seed

# On CPUs it is 0: both passes read the same rows. Kernels of a GPU may round otherwise where gradients are wanted; a
# policy that really differs is far beyond this.
MAX_FIRST_RATIO_ERROR = 0.05
# The first update takes passes that are kept from measuring. In one iteration of so many, the first one of a run among
# them, it computes them again: only so can the ratio show that passes with and without gradients disagree.
REPEATED_EVERY = 16


@dataclass(frozen=True)
class Lesson:
    """What an iteration's updates learn from. Shape letters: B responses, R response tokens."""

    rollout: Rollout
    scores_B: Tensor  # of the reward; NaN where it failed
    kl_B: Tensor  # nats from the reference
    rewards_BR: Tensor  # the scaled score at the last token, less the KL penalty at each
    scored_BR: Tensor  # True = a token of a response with a score
    counted_BR: Tensor  # True = counted in the policy loss
    logprobs_BR: Tensor
    ref_logprobs_BR: Tensor
    advantages_BR: Tensor
    values_BR: Tensor  # 0 where there is no value function
    returns_BR: Tensor  # likewise
    importance_BR: Tensor  # weight of a token for having been sampled by other weights; in the advantages already


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
        followed: Sequence[int] = (),
        max_difference: float = 0.05,
    ) -> None:
        """`followed` are rows of prompts whose responses are logged at intervals; no update learns from those.
        `max_difference` is how far rounding may take sampler and learner apart, in nats per token
        (`lm.samplers.engine`).
        """
        self.config, self.roles, self.prompts, self.scale, self.seed = config, roles, prompts, scale, seed
        self.weights_O = torch.tensor([*config.objective_weights.values()] or [1.0])
        self.kl = KLController(config, config.kl_coef)
        self.followed, self.phases, self.max_difference = followed, PhaseSeconds(), max_difference
        self.samples: SampleLog | None = None  # where responses are logged
        self.rollouts: RolloutLog | None = None  # where it is logged which weights sampled what
        self.lesson: Lesson | None = None  # of the last iteration
        self.sent_digests: Mapping[str, int] = {}  # of the weights that this iteration starts with
        self.started_with: dict[int, int] = {}  # digest of the weights that an iteration started with
        self.in_flight: dict[int, Pending[Rollout]] = {}  # by the iteration that will learn from it
        num_prompts = config.sampled_batch_size // config.samples_per_prompt
        self.prompt_order = Sampler(len(prompts), num_prompts, derive_seed(seed, "ppo", "prompts"))
        self.ptx_order = Sampler(max(1, num_pretraining_rows), config.ptx_rows, derive_seed(seed, "ppo", "ptx"))

    def step(self, iteration: int) -> dict[str, float]:
        """One iteration of the algorithm, 0 .. num_iterations - 1. Returns its metrics."""
        followed = self._start_followed(iteration)
        with self.phases.of("sampling"):
            rollout = self._sampled(iteration)
        minibatches = self.minibatches(iteration, self.config.rollout_batch_size)
        with self.phases.of("scoring"):
            measured = self._measured(iteration, rollout, minibatches[: self.config.num_minibatches])
        lesson, told = self._lesson(iteration, *measured)
        if self.samples is not None:
            self.samples.log_drawn(iteration, ScoredRollout(lesson.rollout, lesson.scores_B, lesson.kl_B))
        if self.samples is not None and followed is not None:
            self.samples.log_followed(iteration, self._scored(followed(), iteration))
        if self.rollouts is not None:
            self.rollouts.write(iteration, lesson.rollout, lesson.scores_B, self.sent_digests)
        self.lesson = lesson
        metrics = self._learn(iteration, minibatches, lesson) | told
        self.kl.update(metrics["kl_nats"], len(lesson.rollout))
        with self.phases.of("sync"):
            self.roles.sync_weights()
        return metrics

    def _measured(
        self, iteration: int, rollout: Rollout, first_epoch: Sequence[Tensor]
    ) -> tuple[Rollout, Tensor, Measured, dict[str, float]]:
        """The responses to learn from, their scores [B, O], what the models say of them, and metrics of the choice."""
        scores, oversampling = self.roles.scorers.start_scores(rollout), dict[str, float]()
        if self.config.oversample > 1:  # what is not kept needs no further passes
            rollout, scores, oversampling = self._keep_informative(rollout, scores())
        keeps = iteration % REPEATED_EVERY > 0
        measuring = self.roles.start_measuring(rollout, first_epoch, keeps=keeps)
        return rollout, scores(), measuring(), oversampling

    def _lesson(
        self, iteration: int, rollout: Rollout, scores_BO: Tensor, found: Measured, oversampling: dict[str, float]
    ) -> tuple[Lesson, dict[str, float]]:
        """What the updates learn from, and metrics."""
        config, staleness = self.config, min(iteration, self.config.max_staleness)
        if staleness:
            agreement = sampler_agreement(found.logprobs_BR, rollout)
        else:
            agreement = require_one_policy(found.logprobs_BR, rollout, iteration, self.max_difference)
        scores_B = self._weighted(scores_BO)
        # Oversampling has checked all that were sampled; the kept ones may be the ones that failed.
        scored_B = torch.isfinite(scores_B) if oversampling else self._require_scores(scores_B)
        mask_BR = rollout.response_mask_BR & scored_B[:, None]
        rewards_BR, kl_B = token_rewards(
            self._terminal_rewards(rollout, scores_B), found.logprobs_BR, found.ref_logprobs_BR, mask_BR,
            self.kl.coef if config.kl_in == "reward" else 0.0,
        )  # fmt: skip
        advantages, returns_BR = self._advantages(rewards_BR, found.values_BR, mask_BR)
        importance_BR, importance_metrics = importance_weights(
            found.logprobs_BR, rollout.behaviour_logprobs_BR, mask_BR, config.importance_cap, config.importance_floor,
            config.importance_beyond,
        )  # fmt: skip
        advantages_BR = advantages.advantages_BR
        if staleness or config.generator != "heed":  # otherwise both are one policy, and differ by rounding
            advantages_BR = importance_BR * advantages_BR
        lesson = Lesson(
            rollout, scores_B, kl_B, rewards_BR, mask_BR, advantages.counted_BR, found.logprobs_BR,
            found.ref_logprobs_BR, advantages_BR, found.values_BR, returns_BR, importance_BR,
        )  # fmt: skip
        means_O = scores_BO[scored_B].mean(dim=0).tolist()
        by_objective = {f"score/{name}": mean for name, mean in zip(config.objective_weights, means_O, strict=False)}
        own = self._metrics(lesson, scored_B) | {
            "staleness": float(staleness),
            "sampler_difference": agreement.difference,
        }
        return lesson, by_objective | importance_metrics | advantages.metrics | oversampling | own

    def _metrics(self, lesson: Lesson, scored_B: Tensor) -> dict[str, float]:
        """Metrics of the rollout. Scores, KL and entropy are means over the responses that have a score."""
        rollout, scores_B = lesson.rollout, lesson.scores_B
        return {
            "score": float(scores_B[scored_B].mean()),
            "scaled_score": float(self.scale.apply(scores_B)[scored_B].mean()),
            "kl_nats": float(lesson.kl_B[scored_B].mean()),
            "kl_coef": self.kl.coef,
            "eos_rate": float(rollout.finished_B.float().mean()),
            "response_tokens": float(rollout.response_tokens_B.float().mean()),
            "entropy_estimate": float(-lesson.logprobs_BR[lesson.scored_BR].mean()),
            "failed_scores": float((~scored_B).sum()),
        }

    def _keep_informative(
        self, rollout: Rollout, scores_BO: Tensor
    ) -> tuple[Rollout, Pending[Tensor], dict[str, float]]:
        """The groups that an iteration learns from, out of those sampled, with their scores, and a metric."""
        config, scores_B = self.config, self._weighted(scores_BO)
        scored_B = self._require_scores(scores_B)
        rows, informative_share = informative_groups(
            self._terminal_rewards(rollout, scores_B), scored_B, config.samples_per_prompt, config.num_prompts
        )
        return rollout.rows(rows), lambda: scores_BO[rows], {"sampled_informative_share": informative_share}

    def _weighted(self, scores_BO: Tensor) -> Tensor:
        """One score per response [B]: the objectives' scores by their weights."""
        return (scores_BO * self.weights_O).sum(dim=1)

    def _terminal_rewards(self, rollout: Rollout, scores_B: Tensor) -> Tensor:
        """What the last tokens get; 0 where scoring failed."""
        rewards_B = self.scale.apply(scores_B) - self.config.missing_eos_penalty * ~rollout.finished_B
        return torch.where(torch.isfinite(scores_B), rewards_B, 0.0)

    def _advantages(self, rewards_BR: Tensor, values_BR: Tensor, mask_BR: Tensor) -> tuple[Advantages, Tensor]:
        """Advantages, and what the value function learns [B, R]; 0 where there is none."""
        config = self.config
        if not config.has_value_function:
            return Advantages.of(rewards_BR, mask_BR, config), torch.zeros_like(rewards_BR)
        advantages_BR, returns_BR = generalised_advantages(
            rewards_BR, values_BR, mask_BR, config.gamma, config.gae_lambda
        )
        explained = _explained(values_BR[mask_BR], returns_BR[mask_BR])
        if config.advantage_scale == "batch":
            advantages_BR = whiten(advantages_BR, mask_BR)
        return Advantages(advantages_BR, mask_BR, {"value_explained": explained}), returns_BR

    def _sampled(self, iteration: int) -> Rollout:
        """The iteration's rollout, proved to be sampled by the weights that it should be."""
        self.start_sampling(iteration)
        rollout = self.in_flight.pop(iteration)()
        self.sent_digests = self.roles.learners.sent_digests()
        if self.sent_digests:  # until the first are sent, sampler and learner hold the model that both loaded
            self.started_with[iteration] = whole_digest(self.sent_digests)
        sampler = self.started_with.get(iteration - min(iteration, self.config.max_staleness))
        if sampler is not None and bool((rollout.sampled_by_B != sampler).any()):
            others = sorted({shown(digest) for digest in rollout.sampled_by_B.tolist()})
            raise RunError(
                f"ppo: iteration {iteration + 1}: its responses were sampled by the weights {', '.join(others)}, and"
                f" those sent for it are {shown(sampler)}; this is a defect of Heed"
            )
        return rollout

    def start_sampling(self, iteration: int) -> None:
        """Begin the rollouts sampled with the weights that an iteration starts with, unless they are under way.

        At first these are its own and `max_staleness` more, then the one that many iterations ahead.
        """
        for ahead in self._window(iteration, self.config.max_staleness + 1):
            if ahead not in self.in_flight:
                samples = self.config.samples_per_prompt  # neighbours, each from its own seed
                chosen = self.prompt_order.batch(ahead).repeat(samples).tolist()
                seeds = [derive_seed(self.seed, "ppo", "sample", ahead, place) for place in range(len(chosen))]
                prompts = [self.prompts[row] for row in chosen]
                self.in_flight[ahead] = self.roles.start_sampling(chosen, prompts, seeds)

    def _start_followed(self, iteration: int) -> Pending[Rollout] | None:
        """Begin responses to the followed prompts in the iterations that have them. They change no result: they have
        seeds of their own, and nothing reads them but the log.
        """
        every, last = self.config.follow_every_iterations, self.config.num_iterations - 1
        if self.samples is None or not self.followed or not (every and (iteration % every == 0 or iteration == last)):
            return None
        seeds = [derive_seed(self.seed, "ppo", "followed", iteration, place) for place in range(len(self.followed))]
        prompts = [self.prompts[row] for row in self.followed]
        return self.roles.start_sampling(self.followed, prompts, seeds, again=True)

    def _scored(self, rollout: Rollout, iteration: int) -> ScoredRollout:
        whole = [torch.arange(len(rollout))]
        scores_BO = self.roles.scorers.start_scores(rollout)()
        logprobs_BR = self.roles.learners.start_policy_logprobs(rollout, whole)()
        # The weights of this iteration sample these, however stale its own rollout is.
        require_one_policy(logprobs_BR, rollout, iteration, self.max_difference)
        ref_logprobs_BR = self.roles.scorers.start_reference_logprobs(rollout, whole)()
        return ScoredRollout(rollout, self._weighted(scores_BO), (logprobs_BR - ref_logprobs_BR).sum(dim=1))

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

    def _learn(self, iteration: int, minibatches: Sequence[Tensor], lesson: Lesson) -> dict[str, float]:
        """Update policy and value function on epochs of minibatches. Returns the means of the updates' metrics."""
        config, learners = self.config, self.roles.learners
        num_updates = config.num_iterations * config.updates_per_iteration
        collected: list[Mapping[str, float]] = []
        for number, rows in enumerate(minibatches):
            update = iteration * config.updates_per_iteration + number
            batch = self._policy_batch(lesson, rows, update)
            rate = config.policy_optimizer.rate(update, num_updates)
            with self.phases.of("policy_updates"):
                metrics = {**learners.update_policy(batch, rate, update), "learning_rate": rate}
            if config.value_optimizer is not None:
                value_rate = config.value_optimizer.rate(update, num_updates)
                scored_BR = lesson.scored_BR[rows]
                value_batch = ValueBatch(
                    batch.rollout, lesson.values_BR[rows], lesson.returns_BR[rows], scored_BR, _num_counted(scored_BR)
                )
                with self.phases.of("value_updates"):
                    value = learners.update_value(value_batch, value_rate, update)
                metrics |= {**value, "value_learning_rate": value_rate}
            if number == 0:
                _require_same_policy(metrics["ratio_error"], iteration, max(MAX_FIRST_RATIO_ERROR, self.max_difference))
            collected.append(metrics)
        return {name: float(np.mean([metrics[name] for metrics in collected])) for name in collected[0]}

    def _policy_batch(self, lesson: Lesson, rows: Tensor, update: int) -> PolicyBatch:
        """A minibatch, whose weights are those of all its tokens, whichever rank will read them."""
        config, ptx_rows, kl = self.config, torch.arange(0), None
        if config.ptx_rows:
            ptx_rows = torch.from_numpy(self.ptx_order.batch(update))
        weight_BR, num_tokens = token_weights(lesson.counted_BR[rows], config.token_weight, config.max_new_tokens)
        if config.kl_in == "loss":  # counts groups of equal scores too: their KL has a gradient
            kl_weight_BR, num_scored = token_weights(lesson.scored_BR[rows], config.token_weight, config.max_new_tokens)
            kl_weight_B = self.kl.coef * kl_weight_BR.amax(dim=1) / num_scored
            kl = ResponseKL(lesson.ref_logprobs_BR[rows].sum(dim=1), kl_weight_B)
        logprobs_BR, advantages_BR = lesson.logprobs_BR[rows], lesson.advantages_BR[rows]
        part = lesson.rollout.rows(rows)
        return PolicyBatch(part, logprobs_BR, advantages_BR, weight_BR, num_tokens, ptx_rows, len(ptx_rows), kl=kl)

    def minibatches(self, iteration: int, num_responses: int) -> list[Tensor]:
        """Row numbers of every update of an iteration: each epoch shuffles again."""
        batches: list[Tensor] = []
        for epoch in range(self.config.num_epochs):
            seed = derive_seed(self.seed, "ppo", "shuffle", iteration, epoch)
            rows = torch.randperm(num_responses, generator=torch.Generator().manual_seed(seed))
            batches.extend(rows.split(self.config.minibatch.batch_size))
        return batches


def _require_same_policy(ratio_error: float, iteration: int, most: float) -> None:
    """Raises RunError where the first update finds another policy than the one that gave the log-probabilities."""
    if not ratio_error < most:
        raise RunError(
            f"ppo: iteration {iteration + 1}: |ratio - 1| is {ratio_error:.4f} on the first minibatch, where the policy"
            f" has not moved; at most {most:.2f} is rounding. The passes with and without gradients"
            ' disagree: try engine.precision = "fp32"; if that does not help, this is a defect of Heed'
        )


def _num_counted(mask_BR: Tensor) -> int:
    return max(1, int(mask_BR.sum()))  # 0 where every score of the minibatch failed


def _explained(values_C: Tensor, returns_C: Tensor) -> float:
    """Share of the returns' variance that the values explain; 1 is best, negative is worse than a constant."""
    variance = returns_C.var(correction=0)
    return float(1 - (returns_C - values_C).var(correction=0) / variance) if variance > 0 else float("nan")
