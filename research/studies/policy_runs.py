"""`research.study freshness` and `router-replay`: policy gradients in this process, on samples of other policies.

An arm is PPO's own controller with all roles in one process (`ppo.roles.Roles.in_process`), which has the bits of the
placements on several machines: which weights sample which tokens is decided by counts. Two things that no job can ask
for are planted here: no correction of stale samples, and a sampler of another precision than the learner's. The reward
is the gold score, so no error of a reward model mixes with what is asked; the prompts are those that ask for a list,
which models of this size can learn to answer.

    runs/study/policy/base/                      pretraining and SFT of the job's model; dense-base/ that of `DENSE`
    runs/study/policy/measured/seed-0-ARM-*.npz  what an arm reached, written when it ends; it is not run again

All seeds share these models, since training them is most of the cost. A seed draws prompts, samples and minibatches.

What is called truncated and decoupled has the same decoupled objective (`ppo.algorithm.importance_weights`): its
weights are cut at 2, as by default, or not at all. The claims were written down before any run.

Shape letters: K policies, P prompts, I iterations, M metrics.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import starmap
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from evaluation.measures.kl import Policy, response_kls
from heed.jobs.job import JobConfig
from heed.jobs.pipeline import run_job
from lm.samplers.engine import SentWeights, held_tensors, noted, take
from lm.samplers.heed_engine import HeedSampler
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.experience import Experience
from ppo.loop import kept_policy
from ppo.rank import InitialModels, ScoreScale
from ppo.roles import Roles
from ppo.rollout import PPOBatch
from ppo.stage import STAGE as PPO
from preferences.statistics.estimates import Floats
from research.over_optimisation.curves import Curve
from research.studies.arms import Arm, arm_job
from research.studies.findings import GOLD, NO_SHIFT, Finding, Measures
from research.studies.measures import SeedMeasures
from research.studies.verdicts import Contrast, Rule, bootstrap_mean, last_difference
from stages.lineage import LINEAGE
from training.data import DataConfig, Prompt, read_prompts

Claimed = Callable[[Measures], Contrast]
NATS_PER_TOKEN = Rule("above", 0.001, "nats per token")
METRICS = (  # of each iteration that are kept, as PPO logs them; NaN where an arm has none
    "score", "kl_nats", "effective_share", "importance_max", "token_age", "sampler_difference",
    "sampler_difference_unreplayed", "routes_changed", "clip_share",
)  # fmt: skip
DENSE: Mapping[str, Any] = {  # as many parameters as a token of the mixture uses, without the router's
    f"model.{name}": None for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
} | {"engine.router_aux_loss_coef": 0.0}


@dataclass(frozen=True)
class Setting:
    """How an arm differs from its job: changes of [ppo], whether stale samples are corrected, the sampler's precision,
    and the arm whose SFT model it starts from.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    corrects: bool = True
    sampler: Literal["fp32", "int8"] = "fp32"
    start: str = "base"

    def config(self, job: JobConfig) -> PPOConfig:
        return PPOConfig.model_validate(
            {**job.section_of(PPO).model_dump(mode="json", exclude_none=True), **self.changes}
        )


def _stale(staleness: int, correction: str = "truncated", placement: str = "asynchronous") -> Setting:
    placed = {"kind": placement, "max_staleness": staleness}
    cap = 1e9 if correction == "decoupled" else 2.0
    return Setting({"placement": placed, "importance": {"cap": cap}}, corrects=correction != "none")


SETTINGS: Mapping[str, Setting] = {
    "fresh": Setting(),
    **{
        f"{correction}-{age}": _stale(age, correction)
        for correction in ("truncated", "decoupled")
        for age in (1, 4, 16)
    },
    **{f"none-{age}": _stale(age, "none") for age in (2, 4, 16)},
    "within-4": _stale(4, placement="continuous"),
    "replay": Setting(sampler="int8"),
    "no-replay": Setting({"router_replay": False}, sampler="int8"),
    "same-precision": Setting(),
    "dense": Setting(start="dense-base"),
}


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

    def _test_draws(self, iteration: int) -> None:
        """Does nothing: the tokens of a rounded sampler are no draws from the learner's policy."""

    def _estimate_advantages(self, experience: Experience, *args: Tensor) -> tuple[PPOBatch, dict[str, float]]:
        """Leaves importance weights away unless they are wanted: samples that count as fresh have none."""
        return super()._estimate_advantages(experience if self.corrects else replace(experience, staleness=0), *args)


@dataclass(frozen=True)
class PolicyMeasures(SeedMeasures):
    """The measures of one seed. An arm is trained when it is first asked for, from what all seeds share in `folder`:
    the world and the SFT models of the seed `start_seed`.
    """

    start_seed: int = 0

    def rl(self, arm: str) -> Curve:
        kept, start = self._of_arm(arm), SETTINGS[arm].start
        policy = Policy.load(self._start(start))
        start_gold_P = self._kept(
            f"seed-{self.seed}-{start}.npz", [f"{start}/sft"], lambda: {"gold_P": self._measured(policy, policy)[0]}
        )["gold_P"]
        names = tuple(f"iteration {number}" for number in kept["iterations_K"].astype(int))
        return Curve("rl", names, kept["kl_KP"], kept["gold_KP"], kept["gold_KP"], start_gold_P, start_gold_P)

    def metrics(self, arm: str) -> Floats:
        return self._of_arm(arm)["metrics_MI"]

    def _start(self, name: str) -> Path:
        """Returns the SFT model that arms start from, after training it if needed. The first one writes the world."""
        shared = self.job.model_copy(update={"seed": self.start_seed})
        for start, changes in {"base": {}, name: {} if name == "base" else DENSE}.items():
            if not (self.folder / start / "sft" / LINEAGE).is_file():
                run_job(arm_job(shared, Arm(start, ("pretrain", "sft"), changes=changes), self.folder), self.folder)
        return self.folder / name / "sft" / "model"

    def _prompts(self, name: str = "collect_prompts") -> list[Prompt]:
        """Returns prompts that ask for a list; by default those that nothing learns from here."""
        prompts = read_prompts(DataConfig(source=str(self._world_file(name))))
        return [prompt for prompt in prompts if prompt.kind == "list"]

    def _of_arm(self, arm: str) -> dict[str, Floats]:
        start, setting = self._start(SETTINGS[arm].start), SETTINGS[arm]
        name = f"seed-{self.seed}-{arm}-{policy_stamps(self.job)[arm][:8]}"
        return self._kept(
            f"{name}.npz", [f"{setting.start}/sft"], lambda: self._trained(self.folder / name, setting, start)
        )

    def _trained(self, folder: Path, setting: Setting, start: Path) -> dict[str, Floats]:
        """Runs an arm's iterations. Returns KL and gold of the policies that it kept, and metrics of all iterations."""
        controller, kept, logged = self._controller(setting, start), list[int](), list[list[float]]()
        folder.mkdir(exist_ok=True)
        config = controller.config
        every = config.keep_policies_every or config.num_iterations
        for done in range(1, config.num_iterations + 1):
            metrics = controller.step(done - 1)
            logged.append([metrics.get(name, math.nan) for name in METRICS])
            if done % every == 0:
                controller.roles.learners.keep_policy(kept_policy(folder, done))
                kept.append(done)
        controller.roles.close()
        reference, policies = Policy.load(start), [Policy.load(kept_policy(folder, done)) for done in kept]
        gold, kl = zip(*(self._measured(policy, reference) for policy in policies), strict=True)
        return {
            "iterations_K": np.array(kept, dtype=np.float64), "gold_KP": np.stack(gold), "kl_KP": np.stack(kl),
            "metrics_MI": np.array(logged).T,
        }  # fmt: skip

    def _controller(self, setting: Setting, start: Path) -> ArmController:
        config, prompts = setting.config(self.job), [prompt.messages for prompt in self._prompts("ppo_prompts")]
        if config.external_reward is None:
            raise ValueError(f"job {self.job.name!r}: ppo.reward is a model; a function was expected")
        models = InitialModels(start, config.external_reward, ScoreScale(0.0, 1.0), None)
        roles = Roles.in_process(config, self.job.engine, models, prompts)
        if setting.sampler == "int8":
            sampler = RoundedSampler.load(start, "fp32", end_ids=models.tokenizer.end_ids)
            sampler.receive([SentWeights.of(held_tensors(sampler.policy))])
            roles.generators.ranks.kept.sampler = sampler  # type: ignore[attr-defined]  # of a `Local`
        tokens = models.tokenizer.encode_prompts(prompts)
        controller = ArmController(
            config, roles, tokens, models.scale, num_pretraining_rows=0, seed=self.seed, max_difference=math.inf
        )
        controller.corrects = setting.corrects
        return controller

    def _measured(self, policy: Policy, reference: Policy) -> tuple[Floats, Floats]:
        """Returns the mean gold score and KL [P] of a policy's samples."""
        drawn = self._draw(policy, self._num_samples)
        kls = response_kls(policy.model, reference.model, drawn.queries, drawn.responses, drawn.temperature)
        gold = np.asarray(self.gold(drawn.conversations, drawn.texts), dtype=np.float64)
        shape = (-1, drawn.num_samples)
        return gold.reshape(shape).mean(axis=1), np.asarray(kls.full_N, np.float64).reshape(shape).mean(axis=1)


def policy_stamps(job: JobConfig) -> dict[str, str]:
    """Returns by arm a hash of what its measures depend on, as `research.studies.measures.stamps_of` does."""
    values = job.model_dump(mode="json", exclude_defaults=True, exclude={"cluster", "name", "note"})

    return {
        name: hashlib.sha256(json.dumps([values, [*asdict(setting).values()]], sort_keys=True).encode()).hexdigest()
        for name, setting in SETTINGS.items()
    }


GoldClaim = tuple[str, Rule, str, str]  # on one arm's gold minus another's: text, rule, arm, other arm


def _compared(title: str, name: str, source: str, *claims: GoldClaim, more: Sequence[Claimed] = ()) -> Finding:
    """Returns a finding whose claims compare the gold of two arms' last policies, on the same prompts."""

    def contrasts(measures: Measures) -> list[Contrast]:
        gold = [
            Contrast(f"{text}: gold", rule, last_difference("gold_KP", *map(measures.rl, both), seed=measures.seed))
            for text, rule, *both in claims
        ]
        return [*gold, *(claim(measures) for claim in more)]

    arms = tuple(dict.fromkeys(arm for _, _, *both in claims for arm in both))
    return Finding(name, title, source, arms, contrasts, lambda measures: {arm: measures.rl(arm) for arm in arms})


FRESHNESS = (
    *(
        _compared(
            f"With {name} importance weights, samples may be 4 iterations old, but not 16", f"{name}-weights", "Heed",
            (f"{name} weights, staleness 4, minus staleness 0", NO_SHIFT, f"{name}-4", "fresh"),
            (f"staleness 0 minus {name} weights, staleness 16", GOLD, "fresh", f"{name}-16"),
        )
        for name in ("truncated", "decoupled")
    ),
    _compared(
        "Without a correction, quality falls at staleness 4 and 16", "no-weights", "Heed",
        *((f"staleness 0 minus no correction, staleness {age}", GOLD, "fresh", f"none-{age}") for age in (4, 16)),
        *((f"truncated weights minus no correction, staleness {age}", GOLD, f"truncated-{age}", f"none-{age}")
          for age in (4, 16)),
    ),
    _compared(
        "Without a correction, quality falls from staleness 2", "no-weights-2", "Heed",
        ("staleness 0 minus no correction, staleness 2", GOLD, "fresh", "none-2"),
    ),
    _compared(
        "With truncated importance weights, samples one iteration old cost nothing", "truncated-weights-1", "Heed",
        ("truncated weights, staleness 1, minus staleness 0", NO_SHIFT, "truncated-1", "fresh"),
    ),
    _compared(
        "Updates within responses do no harm at staleness 4", "within-responses", "Heed",
        ("updates within responses minus between them, staleness 4", NO_SHIFT, "within-4", "truncated-4"),
        ("updates within responses, staleness 4, minus staleness 0", NO_SHIFT, "within-4", "fresh"),
    ),
)  # fmt: skip


def _closer(measures: Measures) -> Contrast:
    sampler, unreplayed = (METRICS.index(name) for name in ("sampler_difference", "sampler_difference_unreplayed"))
    closer_I = measures.metrics("replay")[unreplayed] - measures.metrics("replay")[sampler]
    value = bootstrap_mean(closer_I, seed=measures.seed)
    return Contrast("replay brings the sampler's and the learner's log-probs closer by", NATS_PER_TOKEN, value)


ROUTER_REPLAY = (
    _compared(
        "Replaying the sampler's routes helps if it samples with int8 weights", "replay", "arXiv 2510.11370",
        ("replay minus no replay", GOLD, "replay", "no-replay"),
        ("replay with an int8 sampler, minus an fp32 sampler", NO_SHIFT, "replay", "same-precision"),
        more=(_closer,),
    ),
    _compared(
        "A mixture is better than a dense model of equal active parameters", "mixture", "arXiv 1701.06538",
        ("mixture minus dense", GOLD, "same-precision", "dense"),
    ),
)  # fmt: skip
