"""The whole algorithm: policy gradients for a language model, with or without a value function.

`PPOController.step` is one iteration: sample responses, score them, subtract penalties, estimate advantages, learn in
epochs of minibatches, adjust the KL coefficient, send the new weights to the sampler. `Roles` decides where the models
are and how many ranks share the work. With placement `asynchronous`, the next rollouts are sampled while the learner
trains, with weights that are a fixed number of iterations old, whichever side is faster.

Shape letters: B responses, O objectives, R response tokens, C counted tokens, M teachers.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cluster.remote import Pending
from files.hashes import derive_seed
from lm.samplers.draws import ALARM, FALSE_ALARM, NO_EVIDENCE
from lm.samplers.engine import max_difference, shown, whole_digest
from ppo.alarm import SpotChecks
from ppo.algorithm import (
    KLController,
    importance_weights,
    teacher_terms,
    token_rewards,
    token_weights,
)
from ppo.config import PPOConfig
from ppo.experience import Experience, require_one_policy, require_same_policy, sampler_agreement
from ppo.groups import informative_groups
from ppo.learner import Learner
from ppo.people import PeopleChecks
from ppo.prompts import Mixture, NamedSources, order_of
from ppo.rank import ScoreScale
from ppo.roles import Roles
from ppo.rollout import PolicyBatch, PPOBatch, ResponseKL, Rollout, ValueBatch, sample_seed
from ppo.rollout_log import RolloutLog, SampleLog, ScoredRollout
from ppo.rounds import Supply
from training.notices import RunError
from training.packing import Sampler

DEFAULT_MAX_DIFFERENCE = max_difference("bf16", 2)  # nats per token
# Iterations. The first update normally reuses the forward passes that computed the log-probs, so its ratio is 1. In
# iterations 0, 16, 32, ... it computes them again, which shows whether passes with and without gradients agree.
CHECK_RATIO_EVERY = 16
NAMED = 4  # digests that a message names
FOLLOW_EVERY_ITERATIONS = 10  # between samples for the same few prompts, which show how the policy changes
GoldScores = Callable[[Rollout], Tensor]  # a world's scores [B] of the responses; higher is better
ScoredBy = Callable[[Rollout], Tensor]  # which objectives score which responses [B, O]
PHASES = ("sampling", "scoring", "spot_checks", "policy_updates", "value_updates", "sync")


@dataclass(frozen=True)
class Observers:
    """What watches the iterations. No update depends on it, but spot checks may ring the alarm, which ends training."""

    samples: SampleLog | None = None  # logs responses to be read
    rollouts: RolloutLog | None = None  # logs which weights sampled each response
    spot_checks: SpotChecks | PeopleChecks | None = None
    enter: Callable[[str], None] = lambda _phase: None  # called with the name of each phase when it begins
    gold: GoldScores | None = None  # scores what a judge scores, to log how far the two are apart


UNOBSERVED = Observers()


class MissingScoresError(ValueError):
    """Too many responses of an iteration have no score. The message names the cause, such as a server's outage."""


class PPOController:
    """Runs iterations. Its state is the iteration number, the KL coefficient, the rollouts in flight, and the evidence
    that the test of draws has collected.
    """

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
        max_difference: float = DEFAULT_MAX_DIFFERENCE,
        sources: NamedSources | None = None,
        scored_by: ScoredBy | None = None,
        observers: Observers = UNOBSERVED,
    ) -> None:
        """`followed` are row numbers of prompts whose responses are logged at intervals; no update learns from those.

        `max_difference` is how far rounding may take the log-probs of sampler and learner apart, in nats per token
        (`lm.samplers.engine`). `sources` are the sources of prompts if there are several. `scored_by` says which
        objectives score a rollout's responses; None means all of them.
        """
        self.config, self.roles, self.prompts, self.scale, self.seed = config, roles, prompts, scale, seed
        self.followed, self.max_difference, self.observers = followed, max_difference, observers
        self.phases = PhaseSeconds(observers.enter)
        self.weights_O = torch.tensor([*config.reward.objective_weights.values()] or [1.0])
        self.kl = KLController(config.kl.target, config.kl.coef)
        self.batch: PPOBatch | None = None  # of the last iteration
        self.sent_digests: Mapping[str, int] = {}  # of the weights that this iteration starts with
        self.started_with: dict[int, int] = {}  # digest of the weights that an iteration started with
        self.evidence = NO_EVIDENCE  # that sampled tokens are not draws from the policy
        self.in_flight: dict[int, Pending[Rollout]] = {}  # by the iteration that will learn from it
        self.started_at: dict[int, int] = {}  # by the same, the iteration that started sampling it in this process
        self.sources, self.scored_by = sources, scored_by
        self.prompt_order = prompt_order(config, sources.sizes if sources else (len(prompts),), seed)
        if config.placement.samples_rounds:
            roles.generators.open_rounds(Supply(config, prompts, self.prompt_order, roles.generators.asked), seed)
        self.ptx_order = Sampler(max(1, num_pretraining_rows), config.ptx_rows, derive_seed(seed, "ppo", "ptx"))

    def step(self, iteration: int) -> dict[str, float]:
        """Run iteration number `iteration`, 0 .. num_iterations - 1. Returns its metrics.

        Raises:
            MissingScoresError: too many scores failed; all is as it was before the iteration.
        """
        followed_rollout = self._start_followed(iteration)  # for readers of samples.jsonl; no update learns from it
        checked_rollout = self._start_initial_checks(iteration)
        with self.phases.timed("sampling"):
            rollout = self._sample(iteration)
        # The passes that score are packed as the updates will be.
        minibatches = self.minibatches(iteration, self.config.rollout_batch_size)
        evidence = self.evidence
        try:
            with self.phases.timed("scoring"):
                experience = self._score(iteration, rollout, minibatches)
        except MissingScoresError:
            self.in_flight[iteration], self.evidence = lambda: rollout, evidence
            raise
        rewards_BR, kl_B = self._penalise(experience)
        batch, rollout_metrics = self._estimate_advantages(experience, rewards_BR, kl_B)
        rollout_metrics |= self._age_metrics(iteration, batch.rollout)
        self._log(iteration, batch, followed_rollout)
        rollout_metrics |= self._check_spots(iteration, batch, checked_rollout)
        update_metrics = self._learn(iteration, batch, minibatches)
        self.kl.update(rollout_metrics["kl_nats"], len(batch.rollout))
        with self.phases.timed("sync"):
            self.roles.sync_weights()
        self.batch = batch  # for `heed replay`
        return update_metrics | rollout_metrics

    # Sample.

    def _sample(self, iteration: int) -> Rollout:
        """Wait for the iteration's rollout, and check that the intended weights sampled it.

        Raises:
            RunError: other weights sampled it, according to their digest.
        """
        self.start_sampling(iteration)
        rollout = self.in_flight.pop(iteration)()
        self.sent_digests = self.roles.learners.sent_digests()
        if self.sent_digests:  # empty before weights are first sent: both sides still hold the model that they loaded
            self.started_with[iteration] = whole_digest(self.sent_digests)
        sampled_by = rollout.sampled_by_BR[rollout.written_BR]
        newest = self.started_at.get(iteration, iteration - self._staleness(iteration))
        if self.config.placement.samples_rounds:
            self.started_with.setdefault(0, int(sampled_by[0]))  # the model as loaded, whose digest nobody has sent
            expected = [digest for version, digest in self.started_with.items() if version <= newest]
        else:
            expected = [self.started_with[newest]] if newest in self.started_with else []
        others = [digest for digest in sampled_by.unique().tolist() if digest not in expected]
        if expected and others:
            raise RunError(
                f"ppo: iteration {iteration + 1}: its responses were sampled with the weights"
                f" {', '.join(map(shown, others))} instead of {', '.join(map(shown, expected[-NAMED:]))}; this is a"
                " defect of Heed"
            )
        return rollout

    def start_sampling(self, iteration: int) -> None:
        """Start every rollout that is to be sampled, or with placement `continuous` ends to be, with the current
        weights, unless it is already in flight.

        In the first iteration these are its own rollout and those of the next `max_staleness` iterations. Later it is
        one per iteration: the rollout that will be learned from `max_staleness` iterations later.
        """
        for ahead in self._window(iteration, self.config.placement.max_staleness + 1):
            if ahead in self.in_flight:
                continue
            self.started_at[ahead] = iteration  # later than by schedule if a checkpoint lacks it
            if self.config.placement.samples_rounds:
                self.in_flight[ahead] = self.roles.generators.start_batch(iteration)
                continue
            samples = self.config.advantage.samples_per_prompt  # in adjacent rows, each with its own seed
            chosen = self.prompt_order.batch(ahead).repeat(samples).tolist()
            seeds = [sample_seed(self.seed, ahead, place) for place in range(len(chosen))]
            self.in_flight[ahead] = self.roles.start_sampling(chosen, [self.prompts[row] for row in chosen], seeds)

    def stale_rollouts(self, iteration: int) -> dict[int, Rollout]:
        """Wait for the rollouts in flight that are sampled with weights older than this iteration's.

        A checkpoint must contain them: its weights can sample all other rollouts again, but not these. Those with too
        many failed conversations are left out, since a resumed run could not learn from them.
        """
        window = self._window(iteration, self.config.placement.max_staleness)
        rollouts, most = {ahead: self.in_flight[ahead]() for ahead in window}, self.config.max_failed_share
        return {ahead: one for ahead, one in rollouts.items() if (one.failure_B != 0).float().mean() <= most}

    def _window(self, iteration: int, size: int) -> range:
        return range(iteration, min(iteration + size, self.config.num_iterations))

    def _staleness(self, iteration: int) -> int:
        """Returns by how many iterations the weights that sample a rollout lag behind those that learn from it."""
        return min(iteration, self.config.placement.max_staleness)

    # Score.

    def _score(self, iteration: int, rollout: Rollout, minibatches: Sequence[Tensor]) -> Experience:
        """Compute scores, log-probs under policy, reference and teachers, and values.

        With `oversample`, all sampled groups are scored, and only the groups that are kept are returned.

        Raises:
            RunError: sampler and learner are not the same policy.
            MissingScoresError: too many scores failed.
        """
        scores, oversampling = self.roles.scorers.start_scores(rollout), dict[str, float]()
        if self.config.advantage.oversample > 1:  # groups that are not kept need no further passes
            rollout, scores, oversampling = self._keep_informative(iteration, rollout, scores())
        first_epoch = minibatches[: self.config.num_minibatches]
        keeps = iteration % CHECK_RATIO_EVERY > 0  # passes for the first update
        staleness = self._staleness(iteration)
        # Tokens of selected groups, of those that ended first, or of older weights are not draws from this policy.
        tests_draws = not staleness and not oversampling and not self.config.placement.samples_rounds
        forward_passes = self.roles.start_forward_passes(rollout, first_epoch, keeps=keeps, tests_draws=tests_draws)
        scores_BO, outputs = scores(), forward_passes()
        if staleness:
            agreement = sampler_agreement(outputs.logprobs_BR, rollout)
        else:
            agreement = require_one_policy(outputs.logprobs_BR, rollout, iteration, self.max_difference)
        route_changes = self.roles.learners.take_route_changes() if rollout.routes_BTLK.numel() else None
        if tests_draws:
            self._test_draws(iteration)
        failures = {} if self.config.external_reward is None else self.roles.scorers.failure_kinds()
        scored_by_BO = self._scored_by_BO(rollout)
        scores_B = self._scores_of(rollout, scores_BO, scored_by_BO)
        # With oversampling, `max_failed_share` was checked over all sampled responses; the kept ones may exceed it.
        scored_B = torch.isfinite(scores_B) if oversampling else self._require_scores(iteration, scores_B)
        return Experience(
            rollout=rollout,
            scores_BO=scores_BO,
            scored_by_BO=scored_by_BO,
            scores_B=scores_B,
            scored_B=scored_B,
            scaled_scores_B=self._scaled(rollout, scores_B),
            outputs=outputs,
            staleness=staleness,
            sampler_difference=agreement.difference,
            route_changes=route_changes.metrics if route_changes is not None else {},
            oversampling=oversampling,
            failures=failures,
        )

    def _test_draws(self, iteration: int) -> None:
        """Check, on all evidence of this run so far, that the sampled tokens are draws from the policy.

        Raises:
            RunError: they are not.
        """
        self.evidence += self.roles.learners.take_evidence()
        if self.evidence.is_alarm:
            raise RunError(
                f"ppo: iteration {iteration + 1}: the sampler's log-probs are the learner's, but its tokens are not"
                f" draws from that policy ({self.evidence.nats:.1f} nats of evidence; by chance one run of"
                f" {1 / FALSE_ALARM:,.0f} reaches {ALARM:.1f}). {self.evidence}"
            )

    def _keep_informative(
        self, iteration: int, rollout: Rollout, scores_BO: Tensor
    ) -> tuple[Rollout, Pending[Tensor], dict[str, float]]:
        """Choose the groups to learn from among those sampled. Returns them, their scores, and a metric."""
        config, scores_B = self.config, self._scores_of(rollout, scores_BO, self._scored_by_BO(rollout))
        scored_B = self._require_scores(iteration, scores_B)
        rows, informative_share = informative_groups(
            self._scaled(rollout, scores_B), scored_B, config.advantage.samples_per_prompt, config.num_prompts
        )
        return rollout.rows(rows), lambda: scores_BO[rows], {"sampled_informative_share": informative_share}

    def _scores_of(self, rollout: Rollout, scores_BO: Tensor, scored_by_BO: Tensor) -> Tensor:
        """Returns one score per response [B]: the weighted sum of the scores of the objectives that score it, plus what
        an environment gave for its turns; NaN where either failed. Objectives with weight 0 may have failed.
        """
        counted_BO = scored_by_BO & (self.weights_O != 0)
        weighted_B = torch.where(counted_BO, scores_BO * self.weights_O, 0.0).sum(dim=1)
        return torch.where(rollout.failure_B == 0, weighted_B + rollout.turn_rewards_BR.sum(dim=1), math.nan)

    def _scored_by_BO(self, rollout: Rollout) -> Tensor:
        """Returns which objectives score which responses."""
        if self.scored_by is None:
            return torch.ones(len(rollout), len(self.weights_O), dtype=torch.bool)
        return self.scored_by(rollout)

    def _require_scores(self, iteration: int, scores_B: Tensor) -> Tensor:
        """Returns a mask [B], True = scored. Raises MissingScoresError if too many scores failed."""
        scored_B = torch.isfinite(scores_B)
        failed = int((~scored_B).sum())
        if failed > self.config.max_failed_share * len(scores_B):
            raise MissingScoresError(
                f"{failed} of {len(scores_B)} responses have no finite score;"
                f" ppo.max_failed_share allows {self.config.max_failed_share:.0%}."
                f" The same command continues after iteration {iteration}. The first: {self._first_failure()}"
            )
        return scored_B

    def _first_failure(self) -> str:
        found = self.roles.scorers.first_failure()
        if not found and self.config.environment is not None:
            found = self.roles.generators.first_failure()
        return found or "its score is infinite"

    # Penalise.

    def _penalise(self, experience: Experience) -> tuple[Tensor, Tensor]:
        """Returns rewards [B, R], and the KL from the reference [B] in nats.

        The last token's reward is the scaled score minus the penalty for a missing EOS. What an environment gave for a
        turn is the reward of that turn's last token instead. Every token's reward is reduced by the KL penalty, unless
        that is in the loss (`kl.kind`), and has the terms of teachers of the kind "reward".
        """
        outputs, kl_coef = experience.outputs, self.kl.coef if self.config.kl.kind == "reward" else 0.0
        scored_BR = experience.scored_BR
        turns_BR = self.scale.coef / self.scale.std * experience.rollout.turn_rewards_BR
        turns_BR = torch.where(scored_BR, turns_BR, 0.0)
        terminal_B = experience.scaled_scores_B - turns_BR.sum(dim=1)
        rewards_BR, kl_B = token_rewards(
            terminal_B, outputs.logprobs_BR, outputs.ref_logprobs_BR, scored_BR, kl_coef, turns_BR
        )
        return rewards_BR + self._teacher_terms(experience, "reward"), kl_B

    def _teacher_terms(self, experience: Experience, kind: str) -> Tensor:
        """Returns the weighted sum of log π_T - log π [B, R] over the teachers of a kind, in units of the reward."""
        weight_M = torch.tensor([teacher.weight * (teacher.kind == kind) for teacher in self.config.teachers])
        outputs = experience.outputs
        return teacher_terms(outputs.logprobs_BR, outputs.teacher_logprobs_BMR, weight_M, experience.scored_BR)

    def _scaled(self, rollout: Rollout, scores_B: Tensor) -> Tensor:
        """Returns the rewards [B] of whole responses, without the KL penalty; 0 where scoring failed."""
        rewards_B = self.scale.apply(scores_B) - self.config.missing_eos_penalty * ~rollout.finished_B
        return torch.where(torch.isfinite(scores_B), rewards_B, 0.0)

    # Estimate advantages.

    def _estimate_advantages(
        self, experience: Experience, rewards_BR: Tensor, kl_B: Tensor
    ) -> tuple[PPOBatch, dict[str, float]]:
        """Returns the batch that the updates learn from, and the metrics that are known before the updates."""
        config, outputs, scored_BR = self.config, experience.outputs, experience.scored_BR
        own_BR = self._teacher_terms(experience, "token")
        estimate = config.advantage.estimate(
            experience.scaled_scores_B, rewards_BR, outputs.values_BR, scored_BR, own_BR
        )
        importance_BR, importance_metrics = importance_weights(
            outputs.logprobs_BR,
            experience.rollout.behaviour_logprobs_BR,
            scored_BR,
            cap=config.importance.cap,
            floor=config.importance.floor,
            beyond=config.importance.kind,
        )
        advantages_BR = estimate.advantages_BR
        # In all other cases the sampling policy is the learning policy, and the weights are 1 up to rounding.
        if experience.staleness or config.sampler.has_own_process:
            advantages_BR = importance_BR * advantages_BR
        batch = PPOBatch(
            rollout=experience.rollout,
            scores_B=experience.scores_B,
            kl_B=kl_B,
            rewards_BR=rewards_BR,
            scored_BR=scored_BR,
            counted_BR=estimate.counted_BR,
            logprobs_BR=outputs.logprobs_BR,
            ref_logprobs_BR=outputs.ref_logprobs_BR,
            teacher_BR=own_BR + self._teacher_terms(experience, "reward"),
            advantages_BR=advantages_BR,
            values_BR=outputs.values_BR,
            returns_BR=estimate.returns_BR,
        )
        own = self._metrics(experience, kl_B) | self._gold_metrics(experience) | self._source_metrics(experience)
        return batch, importance_metrics | estimate.metrics | experience.metrics(config) | own

    def _gold_metrics(self, experience: Experience) -> dict[str, float]:
        """Returns the mean gold score of the responses that the judge scored, and how far the judge's is above it."""
        gold_scores, scored_B = self.observers.gold, experience.scored_B
        if gold_scores is None:
            return {}
        gold = float(gold_scores(experience.rollout)[scored_B].mean())
        return {"gold": gold, "judge_minus_gold": float(experience.scores_B[scored_B].mean()) - gold}

    def _source_metrics(self, experience: Experience) -> dict[str, float]:
        """Returns the metrics of each source of prompts, if there are several."""
        if self.sources is None:
            return {}
        return self.sources.metrics(
            experience.rollout,
            experience.scores_B,
            experience.scaled_scores_B,
            self.config.advantage.samples_per_prompt,
            has_score=self.config.has_score,
        )

    def _metrics(self, experience: Experience, kl_B: Tensor) -> dict[str, float]:
        """Returns the metrics that depend on the controller's state: means over the responses that have a score."""
        scored_B = experience.scored_B
        scaled_score = float(self.scale.apply(experience.scores_B)[scored_B].mean())
        return {
            **({"scaled_score": scaled_score} if self.config.has_score else {}),
            "kl_nats": float(kl_B[scored_B].mean()),
            "kl_coef": self.kl.coef,
            "draw_evidence": self.evidence.nats,
        }

    def _age_metrics(self, iteration: int, rollout: Rollout) -> dict[str, float]:
        """Returns, with placement `continuous`, by how many iterations the weights of tokens are older than those that
        learn from them, the share of responses with tokens of several weights, and `Generators.round_metrics`.
        """
        if not self.config.placement.samples_rounds:
            return {}
        version_of = {digest: version for version, digest in self.started_with.items()}
        digests, places_C = rollout.sampled_by_BR[rollout.written_BR].unique(return_inverse=True)
        age_C = iteration - torch.tensor([version_of[digest] for digest in digests.tolist()])[places_C]
        last_B = rollout.sampled_by_BR.gather(1, rollout.response_tokens_B[:, None] - 1)[:, 0]
        return {
            "token_age": float(age_C.float().mean()),
            "token_age_max": float(age_C.max()),
            "continued_share": float((rollout.sampled_by_BR[:, 0] != last_B).float().mean()),
            **self.roles.generators.round_metrics,
        }

    # Learn.

    def _learn(self, iteration: int, batch: PPOBatch, minibatches: Sequence[Tensor]) -> dict[str, float]:
        """Update policy and value function on epochs of minibatches. Returns the metrics, averaged over the updates."""
        collected: list[Mapping[str, float]] = []
        for number, rows in enumerate(minibatches):
            metrics = self._update(batch.rows(rows), iteration * self.config.updates_per_iteration + number)
            if number == 0:
                require_same_policy(metrics["ratio_error"], iteration, self.max_difference)
            collected.append(metrics)
        return {name: float(np.mean([metrics[name] for metrics in collected])) for name in collected[0]}

    def _update(self, minibatch: PPOBatch, update: int) -> dict[str, float]:
        """Take one optimizer step of the policy and, if there is one, of the value function. Returns their metrics."""
        config, learners = self.config, self.roles.learners
        num_updates = config.num_iterations * config.updates_per_iteration
        policy_batch, rate = self._policy_batch(minibatch, update), config.policy_optimizer.rate(update, num_updates)
        self.roles.generators.mend()
        with self.phases.timed("policy_updates"):
            metrics = {**learners.update(Learner.update_policy, policy_batch, rate, update), "learning_rate": rate}
        if config.value_optimizer is not None:
            value_batch, rate = _value_batch(minibatch), config.value_optimizer.rate(update, num_updates)
            with self.phases.timed("value_updates"):
                metrics |= learners.update(Learner.update_value, value_batch, rate, update)
            metrics["value_learning_rate"] = rate
        return metrics

    def _policy_batch(self, minibatch: PPOBatch, update: int) -> PolicyBatch:
        """Build the batch of a policy update. Token weights refer to the whole minibatch, not to a rank's share."""
        config, ptx_rows, kl = self.config, torch.arange(0), None
        if config.ptx_rows:
            ptx_rows = torch.from_numpy(self.ptx_order.batch(update))
        weight_BR, num_tokens = token_weights(minibatch.counted_BR, config.loss.token_weight, config.max_new_tokens)
        if config.kl.kind == "loss":  # this counts groups of equal scores too: their KL has a gradient
            kl_weight_BR, num_scored = token_weights(
                minibatch.scored_BR, config.loss.token_weight, config.max_new_tokens
            )
            kl_weight_B = self.kl.coef * kl_weight_BR.amax(dim=1) / num_scored
            kl = ResponseKL(minibatch.ref_logprobs_BR.sum(dim=1), kl_weight_B)
        return PolicyBatch(
            rollout=minibatch.rollout,
            logprobs_BR=minibatch.logprobs_BR,
            advantages_BR=minibatch.advantages_BR,
            weight_BR=weight_BR,
            num_tokens=num_tokens,
            ptx_rows=ptx_rows,
            num_ptx_rows=len(ptx_rows),
            kl=kl,
        )

    def minibatches(self, iteration: int, num_responses: int) -> list[Tensor]:
        """Returns the row numbers of each update of an iteration; every epoch shuffles again."""
        batches: list[Tensor] = []
        for epoch in range(self.config.num_epochs):
            seed = derive_seed(self.seed, "ppo", "shuffle", iteration, epoch)
            rows = torch.randperm(num_responses, generator=torch.Generator().manual_seed(seed))
            batches.extend(rows.split(self.config.minibatch.batch_size))
        return batches

    # Log.

    def _log(self, iteration: int, batch: PPOBatch, followed_rollout: Pending[Rollout] | None) -> None:
        """Write the responses, and which weights sampled them, to the logs that were passed in."""
        samples, rollouts = self.observers.samples, self.observers.rollouts
        if samples is not None:
            samples.log_drawn(iteration, ScoredRollout(batch.rollout, batch.scores_B, batch.kl_B))
        if samples is not None and followed_rollout is not None:
            samples.log_followed(iteration, self._score_followed(iteration, followed_rollout()))
        if rollouts is not None:
            rollouts.write(iteration, batch.rollout, batch.scores_B, self.sent_digests)

    def _start_followed(self, iteration: int) -> Pending[Rollout] | None:
        """Start sampling responses to the followed prompts, in the iterations that log them.

        They do not affect training: they have their own seeds, and only the log reads them.
        """
        is_due = iteration % FOLLOW_EVERY_ITERATIONS == 0 or iteration == self.config.num_iterations - 1
        if self.observers.samples is None or not self.followed or not is_due:
            return None
        seeds = [derive_seed(self.seed, "ppo", "followed", iteration, place) for place in range(len(self.followed))]
        prompts = [self.prompts[row] for row in self.followed]
        return self.roles.start_sampling(self.followed, prompts, seeds, again=True)

    def _score_followed(self, iteration: int, rollout: Rollout) -> ScoredRollout:
        """Score the responses to the followed prompts, and compute their KL from the reference."""
        whole = [torch.arange(len(rollout))]
        scores_BO = self.roles.scorers.start_scores(rollout)()
        logprobs_BR = self.roles.learners.start_policy_logprobs(rollout, whole, tests_draws=True)()
        # This iteration's weights sampled these, however stale its own rollout is.
        require_one_policy(logprobs_BR, rollout, iteration, self.max_difference)
        self._test_draws(iteration)
        ref_logprobs_BR = self.roles.scorers.start_reference_logprobs(rollout, whole)()
        scores_B = self._scores_of(rollout, scores_BO, self._scored_by_BO(rollout))
        return ScoredRollout(rollout, scores_B, (logprobs_BR - ref_logprobs_BR).sum(dim=1))

    # Raise the alarm.

    def _start_initial_checks(self, iteration: int) -> Pending[Rollout] | None:
        """Start sampling the initial policy's responses that are to be checked. No update learns from them."""
        checks = self.observers.spot_checks
        if checks is None or iteration > 0:
            return None
        rows = checks.initial_rows(self.roles.rows_multiple)
        seeds = [derive_seed(self.seed, "ppo", "alarm", "sample", place) for place in range(len(rows))]
        return self.roles.start_sampling(rows, [self.prompts[row] for row in rows], seeds, again=True)

    def _check_spots(self, iteration: int, batch: PPOBatch, initial: Pending[Rollout] | None) -> dict[str, float]:
        """Have responses of the iteration's rollout checked, or in the first iteration the initial policy's. Returns
        the metrics.
        """
        checks = self.observers.spot_checks
        if checks is None:
            return {}
        policy = iteration - self._staleness(iteration)
        with self.phases.timed("spot_checks"):
            if initial is not None:
                rollout = initial()
                scores_BO = self.roles.scorers.start_scores(rollout)()
                scores_B = self._scores_of(rollout, scores_BO, self._scored_by_BO(rollout))
            elif policy > 0:
                rollout, scores_B = batch.rollout, batch.scores_B
            else:  # older weights sampled it: those of the initial policy, which has been checked
                return {}
            return checks.add(rollout, scores_B.tolist(), iteration=iteration, policy=policy)


def prompt_order(config: PPOConfig, sizes: Sequence[int], seed: int) -> Sampler | Mixture:
    """Returns which prompt rows each iteration samples responses to. `sizes` are the numbers of prompts per source."""
    num_prompts = config.sampled_batch_size // config.advantage.samples_per_prompt
    return order_of(sizes, config.prompt_weights, num_prompts, derive_seed(seed, "ppo", "prompts"))


def _value_batch(minibatch: PPOBatch) -> ValueBatch:
    """Build the batch of a value update."""
    scored_BR = minibatch.scored_BR
    num_tokens = max(1, int(scored_BR.sum()))  # 0 are scored if every score of the minibatch failed
    return ValueBatch(minibatch.rollout, minibatch.values_BR, minibatch.returns_BR, scored_BR, num_tokens)


class PhaseSeconds:
    """Adds up wall-clock seconds by phase. A phase lasts while the controller waits for it; work that other ranks do
    outside of that time is not counted. `enter` is called with the name of each phase when it begins.
    """

    def __init__(self, enter: Callable[[str], None]) -> None:
        self._enter = enter
        self._seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time that a block takes to the phase."""
        self._enter(phase.replace("_", " "))
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - started

    def take(self) -> Mapping[str, float]:
        """Returns the seconds of each phase since the last call, by metric name ("sampling_seconds" and so on)."""
        seconds = {f"{phase}_seconds": self._seconds[phase] for phase in PHASES if phase in self._seconds}
        self._seconds = {}
        return seconds
