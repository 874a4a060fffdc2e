"""The arms of `research.study freshness` and `router-replay`: how each differs from its job, the controller that runs
it in this process, and how much its gradient's estimate varies.

An arm is PPO's own controller with all roles in one process (`ppo.roles.Roles.in_process`), which has the bits of the
placements on several machines: which weights sample which tokens is decided by counts. Two things that no job can ask
for are planted here: no correction of stale samples, and a sampler of another precision than the learner's.

What is called truncated and decoupled has the same decoupled objective (`ppo.algorithm.importance_weights`): its
weights are cut at 2, as by default, or not at all. "drop" leaves out tokens whose weight is below .5 or above 2
(IcePop). Arms of "ppo" have a value function; "third", "thrice" and "tuned" are about the learning rate.

Shape letters: A arms, T times, D numbers of a gradient, N minibatches.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import starmap
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from heed.jobs.job import JobConfig
from lm.samplers.engine import SentWeights, noted, take
from lm.samplers.heed_engine import HeedSampler
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.experience import Experience
from ppo.kept_passes import Taken
from ppo.learner import Learner
from ppo.rollout import PolicyBatch, PPOBatch, sample_seed
from ppo.stage import STAGE as PPO
from preferences.statistics.estimates import Floats

RATE = 1e-3  # of the job; the tuned arms choose among three
RATES: Mapping[str, float] = {"third-": RATE / 3, "": RATE, "thrice-": 3 * RATE}
TUNED = ("fresh", *(f"{name}-{age}" for name in ("truncated", "none") for age in (4, 16)))
# The policy's: of this, a third and three times it, the best at staleness 0 with seed 100. The value function's: twice.
PPO_RATE = 1e-3
TUNING_SEEDS = (100, 101)  # no claim is about these
AGES = (1, 4, 16)  # in iterations, of the samples whose gradients are compared
CORRECTIONS = ("truncated", "decoupled", "drop", "none")
GRADIENT = "gradient"  # the arm whose weights these gradients are of; it is `fresh`
GRADIENT_ARMS = ("fresh", *(f"{name}-{age}" for name in CORRECTIONS for age in AGES))
TIMES = (20, 30, 40)  # iterations after which they are estimated
NUM_ROLLOUTS = 8  # of an iteration's size, for each time and age


@dataclass(frozen=True)
class Setting:
    """How an arm differs from its job: changes of [ppo], whether stale samples are corrected, the sampler's precision,
    and the arm whose SFT model it starts from.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    corrects: bool = True
    sampler: Literal["fp32", "int8"] = "fp32"
    start: str = "base"

    @property
    def staleness(self) -> int:
        return int(self.changes.get("placement", {}).get("max_staleness", 0))

    def config(self, job: JobConfig) -> PPOConfig:
        return PPOConfig.model_validate(
            {**job.section_of(PPO).model_dump(mode="json", exclude_none=True), **self.changes}
        )


def _stale(staleness: int, correction: str = "truncated", placement: str = "asynchronous", **changes: Any) -> Setting:
    placed = {"kind": placement, "max_staleness": staleness}
    importance = IMPORTANCE.get(correction, {"cap": 2.0})
    return Setting({"placement": placed, "importance": importance, **changes}, corrects=correction != "none")


def _stale_arms(ages: Mapping[str, Iterable[int]], prefix: str = "", **changes: Any) -> dict[str, Setting]:
    return {
        f"{prefix}{correction}-{age}": _stale(age, correction, **changes)
        for correction, of_correction in ages.items()
        for age in of_correction
    }


def _rate(rate: float) -> dict[str, Any]:
    return {"learning_rate": rate, "betas": [0.9, 0.99], "eps": 1e-5}


IMPORTANCE: Mapping[str, Mapping[str, Any]] = {
    "decoupled": {"cap": 1e9},
    "drop": {"kind": "drop_tokens", "floor": 0.5, "cap": 2.0},
}
WITH_VALUES: Mapping[str, Any] = {
    "advantage": {"kind": "gae", "value_optimizer": _rate(2 * PPO_RATE)},
    "loss": {},
    "policy_optimizer": _rate(PPO_RATE),
}
AT_ONE_RATE = {
    "fresh": Setting(),
    **_stale_arms({"truncated": (1, 4, 8, 16), "decoupled": AGES, "drop": AGES, "none": (1, 2, 4, 8, 16)}),
}
SETTINGS: Mapping[str, Setting] = {
    **AT_ONE_RATE,
    **{
        f"{prefix}{arm}": replace(setting, changes={**setting.changes, "policy_optimizer": _rate(rate)})
        for arm, setting in AT_ONE_RATE.items()
        for prefix, rate in RATES.items()
        if arm in TUNED and prefix
    },
    **{f"tuned-{arm}": AT_ONE_RATE[arm] for arm in TUNED},
    GRADIENT: Setting(),
    "ppo-fresh": Setting(WITH_VALUES),
    **_stale_arms({"truncated": (1, 4, 8, 16), "none": (4, 16)}, "ppo-", **WITH_VALUES),
    "within-4": _stale(4, placement="continuous"),
    "replay": Setting(sampler="int8"),
    "no-replay": Setting({"router_replay": False}, sampler="int8"),
    "same-precision": Setting(),
    "dense": Setting(start="dense-base"),
}


def candidates(arm: str) -> list[str]:
    """Returns the arms that a tuned one is chosen from; the arm itself for others."""
    name = arm.removeprefix("tuned-")
    return [arm] if name == arm else [f"{prefix}{name}" for prefix in RATES]


class RoundedSampler(HeedSampler):
    """Samples with the matrices of attention and experts rounded to 255 levels per row (int8), computed in fp32."""

    def receive(self, sent: Iterable[SentWeights]) -> None:
        self._digests = {}  # of the weights as they were sent, by which the controller knows them
        arriving = noted(sent, self._digests)
        take(self.policy, (SentWeights.of(dict(starmap(_rounded, chunk.weights.items()))) for chunk in arriving))


def _rounded(name: str, weight: Tensor) -> tuple[str, Tensor]:
    if ".attention." not in name and ".experts." not in name:
        return name, weight
    step = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 127
    return name, (weight / step).round() * step


class ArmController(PPOController):
    """PPO's controller, for samplers that are not the learner's policy."""

    corrects = True
    age = 0  # of samples drawn apart from the iterations, in iterations

    def _staleness(self, iteration: int) -> int:
        return self.age or super()._staleness(iteration)

    def _test_draws(self, iteration: int) -> None:
        """Does nothing: the tokens of a rounded sampler are no draws from the learner's policy."""

    def _estimate_advantages(self, experience: Experience, *args: Tensor) -> tuple[PPOBatch, dict[str, float]]:
        """Leaves importance weights away unless they are wanted: samples that count as fresh have none."""
        return super()._estimate_advantages(experience if self.corrects else replace(experience, staleness=0), *args)

    def gradient_moments(self, job: JobConfig) -> Floats:
        """Runs the iterations, and estimates the policy's gradient after `TIMES` of them: with the weights as they are
        then, on minibatches of samples of weights of each age, as the losses of each arm of `GRADIENT_ARMS` have it.

        Returns [A, T, 3]: the variance E|g - E g|² of one minibatch's gradient g, the squared mean |E g|², and the
        product of E g and that of fresh samples. All are unbiased: the squared mean of N minibatches is reduced by a
        share 1/N of their variance, and samples of different ages are drawn apart.
        """
        held, found = dict[int, dict[str, Tensor]](), list[Floats]()
        for done in range(1, TIMES[-1] + 1):
            self.step(done - 1)
            held[done] = {name: tensor.clone() for name, tensor in self._learner.policy.weights(torch.float32)}
            if done in TIMES:
                found.append(self._moments(job, {age: held[done - age] for age in (0, *AGES)}))
                self._sample_with(held[done])
        return np.stack(found, axis=1)

    @property
    def _learner(self) -> Learner:
        return self.roles.learners.ranks.kept  # type: ignore[attr-defined]  # of a `Local`

    def _sample_with(self, weights: Mapping[str, Tensor]) -> None:
        self.roles.generators.ranks.kept.receive([SentWeights.of(weights)])  # type: ignore[attr-defined]

    def _moments(self, job: JobConfig, weights_by_age: Mapping[int, Mapping[str, Tensor]]) -> Floats:
        """Returns [A, 3]."""
        gradients: dict[str, list[Tensor]] = {arm: [] for arm in GRADIENT_ARMS}
        own, size = (self.config, self.corrects), self.config.rollout_batch_size
        for place, (age, weights) in enumerate(weights_by_age.items()):
            self._sample_with(weights)
            self.age = age
            for number in range(NUM_ROLLOUTS):
                experience = self._drawn(place * NUM_ROLLOUTS + number)
                for arm in GRADIENT_ARMS:
                    if SETTINGS[arm].staleness == age:
                        self.config, self.corrects = SETTINGS[arm].config(job), SETTINGS[arm].corrects
                        batch, _ = self._estimate_advantages(experience, *self._penalise(experience))
                        for rows in torch.arange(size).split(self.config.minibatch.batch_size):
                            gradients[arm].append(self._gradient_D(self._policy_batch(batch.rows(rows), 0)))
                self.config, self.corrects = own
        self.age = 0
        fresh_D = torch.stack(gradients["fresh"]).mean(dim=0)
        return np.array([moments(torch.stack(gradients[arm]), fresh_D, arm == "fresh") for arm in GRADIENT_ARMS])

    def _drawn(self, number: int) -> Experience:
        """Returns responses of an iteration's number, to prompts of their own, with their scores and log-probs."""
        rollout_number = self.config.num_iterations + number
        samples = self.config.advantage.samples_per_prompt
        chosen = self.prompt_order.batch(rollout_number).repeat(samples).tolist()
        seeds = [sample_seed(self.seed, rollout_number, place) for place in range(len(chosen))]
        rollout = self.roles.start_sampling(chosen, [self.prompts[row] for row in chosen], seeds, again=True)()
        return self._score(0, rollout, list(torch.arange(len(chosen)).split(self.config.minibatch.batch_size)))

    def _gradient_D(self, batch: PolicyBatch) -> Tensor:
        """Returns the gradient of a minibatch's loss, without a step."""
        learner = self._learner
        (share,) = batch.shares(self.roles.learners.shares(batch.rollout))
        loss = partial(learner._policy_loss, whole=share, kept=Taken(deque()))
        learner.policy.accumulate(share.parts(), loss)
        parameters = [weight for weight in learner.policy.module.parameters() if weight.grad is not None]
        gradient_D = torch.cat([weight.grad.flatten() for weight in parameters if weight.grad is not None])
        for weight in parameters:
            weight.grad = None
        return gradient_D


def moments(gradients_ND: Tensor, fresh_D: Tensor, is_fresh: bool) -> tuple[float, float, float]:
    """Returns the variance of one gradient, the squared length of the mean one, and its product with `fresh_D`."""
    mean_D = gradients_ND.mean(dim=0)
    variance = float(((gradients_ND - mean_D) ** 2).sum()) / (len(gradients_ND) - 1)
    square = float(mean_D @ mean_D) - variance / len(gradients_ND)
    return variance, square, square if is_fresh else float(mean_D @ fresh_D)
