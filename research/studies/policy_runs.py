"""`research.study freshness` and `router-replay`: policy gradients in this process, on samples of other policies.

The arms are in `research.studies.policy_arms`. The reward is the gold score, so no error of a reward model mixes with
what is asked; the prompts are those that ask for a list, which models of this size can learn to answer.

    runs/study/policy/base/                      pretraining and SFT of the job's model; dense-base/ that of `DENSE`
    runs/study/policy/measured/seed-0-ARM-*.npz  what an arm reached, written when it ends; it is not run again

All seeds share these models, since training them is most of the cost. A seed draws prompts, samples and minibatches.
The learning rate of a tuned arm is the one of `RATES` whose last policies have the most gold as a mean over
`TUNING_SEEDS`, which no claim is about. The claims were written down before any run.

Shape letters: A arms, K policies, P prompts, I iterations, M metrics, T times, R learning rates, S tuning seeds.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.measures.kl import Policy, response_kls
from heed.jobs.job import JobConfig
from heed.jobs.pipeline import run_job
from lm.samplers.engine import SentWeights, held_tensors
from ppo.loop import kept_policy
from ppo.rank import InitialModels, ScoreScale
from ppo.roles import Roles
from ppo.stage import STAGE as PPO
from preferences.statistics.estimates import Floats, Interval
from research.over_optimisation.curves import Curve
from research.studies.arms import Arm, arm_job
from research.studies.findings import GOLD, NO_SHIFT, Curves, Finding, Measures
from research.studies.measures import SeedMeasures
from research.studies.policy_arms import (
    GRADIENT,
    GRADIENT_ARMS,
    SETTINGS,
    TUNING_SEEDS,
    ArmController,
    RoundedSampler,
    Setting,
    candidates,
)
from research.studies.verdicts import Contrast, Rule, bootstrap_mean, last_difference
from stages.lineage import LINEAGE
from training.data import DataConfig, Prompt, read_prompts

Claimed = Callable[[Measures], Contrast]
NATS_PER_TOKEN = Rule("above", 0.001, "nats per token")
LOG_RATIO = Rule("above", 0.1, "in the natural logarithm")
COSINE = Rule("above", 0.05, "of cosine")
# Seconds of an iteration of configs/jobs/cluster/hh-8b-8gpus.toml on eight H200 by `heed plan`, with a tenth of the
# responses ten times as long, each part times what one H200 took of its plan (docs/plan.md): 1.28 for sampling, 1.88
# for learning. A `max_staleness` above 1 saves nothing more.
SECONDS = {"disaggregated": 84.4, "colocated": 54.1, "asynchronous": 44.8}
METRICS = (  # of each iteration that are kept, as PPO logs them; NaN where an arm has none
    "score", "kl_nats", "effective_share", "importance_max", "token_age", "sampler_difference",
    "sampler_difference_unreplayed", "routes_changed", "clip_share",
)  # fmt: skip
KEPT_EVERY = 10  # iterations between policies that are measured, if the job does not say
ENDS = ("ppo-", "third-", "thrice-")  # arms of which only the last one is
DENSE: Mapping[str, Any] = {  # as many parameters as a token of the mixture uses, without the router's
    f"model.{name}": None for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
} | {"engine.router_aux_loss_coef": 0.0}


@dataclass(frozen=True)
class PolicyMeasures(SeedMeasures):
    """The measures of one seed. An arm is trained when it is first asked for, from what all seeds share in `folder`:
    the world and the SFT models of the seed `start_seed`.
    """

    start_seed: int = 0

    def rl(self, arm: str) -> Curve:
        if len(candidates(arm)) > 1:
            arm = candidates(arm)[int(self._gold_by_rate(arm).mean(axis=1).argmax())]
        kept, start = self._of_arm(arm), SETTINGS[arm].start
        policy = Policy.load(self._start(start))
        start_gold_P = self._kept(
            f"seed-{self.seed}-{start}.npz", [f"{start}/sft"], lambda: {"gold_P": self._measured(policy, policy)[0]}
        )["gold_P"]
        names = tuple(f"iteration {number}" for number in kept["iterations_K"].astype(int))
        return Curve("rl", names, kept["kl_KP"], kept["gold_KP"], kept["gold_KP"], start_gold_P, start_gold_P)

    def metrics(self, arm: str) -> Floats:
        """Returns the metrics of an arm's iterations [M, I]; `ArmController.gradient_moments` [A, T, 3]; or gold by
        learning rate and tuning seed [R, S] of an arm with a tuned rate.
        """
        return self._gold_by_rate(arm) if len(candidates(arm)) > 1 else self._of_arm(arm)["metrics_MI"]

    def _gold_by_rate(self, arm: str) -> Floats:
        others = [replace(self, job=self.job.model_copy(update={"seed": seed})) for seed in TUNING_SEEDS]
        return np.array([[other.rl(name).gold_KP[-1].mean() for other in others] for name in candidates(arm)])

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

        def make() -> dict[str, Floats]:
            if arm == GRADIENT:
                return {"metrics_MI": self._controller(setting, start).gradient_moments(self.job)}
            often = self.job.section_of(PPO).keep_policies_every or KEPT_EVERY
            every = math.inf if arm.startswith(ENDS) else often
            return self._trained(self.folder / name, setting, start, every)

        return self._kept(f"{name}.npz", [f"{setting.start}/sft"], make)

    def _trained(self, folder: Path, setting: Setting, start: Path, every: float) -> dict[str, Floats]:
        """Runs an arm's iterations. Returns KL and gold of the policies that it kept, and metrics of all iterations."""
        controller, kept, logged = self._controller(setting, start), list[int](), list[list[float]]()
        folder.mkdir(exist_ok=True)
        config = controller.config
        for done in range(1, config.num_iterations + 1):
            metrics = controller.step(done - 1)
            logged.append([metrics.get(name, math.nan) for name in METRICS])
            if done % every == 0 or done == config.num_iterations:
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

    def stamp(arm: str) -> str:
        read = [[*asdict(SETTINGS[name]).values()] for name in candidates(arm)]
        return hashlib.sha256(json.dumps([values, *read], sort_keys=True).encode()).hexdigest()

    return {arm: stamp(arm) for arm in SETTINGS}


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


def _stale(title: str, name: str, *claims: GoldClaim) -> Finding:
    """Returns a finding on the age of samples. It reads metrics too, so that they are stored for its page's tables."""
    found = _compared(title, name, "Heed", *claims)

    def curves(measures: Measures) -> Curves:
        _ = [measures.metrics(arm) for arm in found.arms]
        return found.curves(measures)

    return replace(found, curves=curves)


def _held(weights: str, name: str, prefix: str = "", of: str = "") -> Finding:
    """Returns the finding on importance weights at staleness 4 and 16, of an algorithm's or a learning rate's arms."""
    arm, fresh = f"{prefix}{name}", f"{prefix}fresh"
    return _stale(
        f"{of}With {weights}, samples may be 4 iterations old, but not 16", f"{prefix}{name}-weights",
        (f"{of}{weights}, staleness 4, minus staleness 0", NO_SHIFT, f"{arm}-4", fresh),
        (f"{of}staleness 0 minus {weights}, staleness 16", GOLD, fresh, f"{arm}-16"),
    )  # fmt: skip


def _needed(prefix: str = "", of: str = "") -> Finding:
    """Returns the finding on a correction, likewise."""
    none, cut = f"{prefix}none", f"{prefix}truncated"
    return _stale(
        f"{of}Without a correction, quality falls at staleness 4 and 16", f"{prefix}no-weights",
        *((f"{of}staleness 0 minus no correction, staleness {age}", GOLD, f"{prefix}fresh", f"{none}-{age}")
          for age in (4, 16)),
        *((f"{of}truncated weights minus no correction, staleness {age}", GOLD, f"{cut}-{age}", f"{none}-{age}")
          for age in (4, 16)),
    )  # fmt: skip


def gold_after(curve: Curve, iterations: float) -> Floats:
    """Returns gold [P] after a number of iterations, between those of the kept policies, by linear interpolation."""
    kept_K = [int(name.split()[-1]) for name in curve.names]
    gold_KP = np.stack([curve.start_gold_P, *curve.gold_KP])
    place = float(np.interp(iterations, [0, *kept_K], range(len(gold_KP))))
    low, share = int(place), place % 1
    return (1 - share) * gold_KP[low] + share * gold_KP[math.ceil(place)]


def _per_hour(text: str, other: str, placement: str) -> Claimed:
    """Compares gold after the time in which `asynchronous` at staleness 1 ends, with an arm in another placement."""

    def claim(measures: Measures) -> Contrast:
        curve = measures.rl("truncated-1")
        last = int(curve.names[-1].split()[-1]) * SECONDS["asynchronous"] / SECONDS[placement]
        difference_P = curve.gold_KP[-1] - gold_after(measures.rl(other), last)
        claimed = f"in equal time, staleness 1 minus {text}: gold"
        return Contrast(claimed, GOLD, bootstrap_mean(difference_P, seed=measures.seed))

    return claim


def _of_gradient(text: str, rule: Rule, value: Callable[[Mapping[str, Floats]], float]) -> Claimed:
    """Returns a claim on each arm's variance, squared mean, and product with fresh samples' gradient [3], summed over
    the times at which they were measured.
    """

    def claim(measures: Measures) -> Contrast:
        sums_A3 = measures.metrics(GRADIENT).sum(axis=1)
        number = value(dict(zip(GRADIENT_ARMS, sums_A3, strict=True)))
        return Contrast(text, rule, Interval(number, math.nan, math.nan))

    return claim


def log_variance(sums_3: Floats) -> float:
    """Returns the natural logarithm of a minibatch's relative variance E|g - E g|² / |E g|²."""
    return math.log(sums_3[0] / sums_3[1]) if sums_3[1] > 0 else math.nan


def cosine(sums_3: Floats, fresh_3: Floats) -> float:
    """Returns the cosine of the angle between a mean gradient and that of fresh samples."""
    return float(sums_3[2] / math.sqrt(sums_3[1] * fresh_3[1])) if min(sums_3[1], fresh_3[1]) > 0 else math.nan


def _varies(one: str, other: str, names: str) -> Claimed:
    return _of_gradient(
        f"relative variance of the gradient, {names}, logarithm of the ratio", LOG_RATIO,
        lambda sums: log_variance(sums[one]) - log_variance(sums[other]),
    )  # fmt: skip


FRESHNESS = (
    _held("truncated weights", "truncated"),
    _held("decoupled weights", "decoupled"),
    _needed(),
    _stale(
        "Without a correction, quality falls from staleness 2", "no-weights-2",
        ("staleness 0 minus no correction, staleness 2", GOLD, "fresh", "none-2"),
    ),
    _stale(
        "With truncated importance weights, samples one iteration old cost nothing", "truncated-weights-1",
        ("truncated weights, staleness 1, minus staleness 0", NO_SHIFT, "truncated-1", "fresh"),
    ),
    _stale(
        "Updates within responses do no harm at staleness 4", "within-responses",
        ("updates within responses minus between them, staleness 4", NO_SHIFT, "within-4", "truncated-4"),
        ("updates within responses, staleness 4, minus staleness 0", NO_SHIFT, "within-4", "fresh"),
    ),
    _stale(
        "Staleness 8 costs quality with truncated weights, and more without", "staleness-8",
        ("staleness 0 minus truncated weights, staleness 8", GOLD, "fresh", "truncated-8"),
        ("staleness 0 minus no correction, staleness 8", GOLD, "fresh", "none-8"),
        ("truncated weights minus no correction, staleness 8", GOLD, "truncated-8", "none-8"),
    ),
    _held("dropped tokens", "drop"),
    _stale(
        "Dropping tokens is as good as cutting their weights, and better than no correction", "dropped-or-cut",
        *((f"dropped tokens minus truncated weights, staleness {age}", NO_SHIFT, f"drop-{age}", f"truncated-{age}")
          for age in (4, 16)),
        ("dropped tokens minus no correction, staleness 16", GOLD, "drop-16", "none-16"),
    ),
    _held("truncated weights", "truncated", "ppo-", "PPO: "),
    _needed("ppo-", "PPO: "),
    _stale(
        "PPO: Samples one iteration old cost nothing, eight iterations do", "ppo-truncated-weights-1",
        ("PPO: truncated weights, staleness 1, minus staleness 0", NO_SHIFT, "ppo-truncated-1", "ppo-fresh"),
        ("PPO: staleness 0 minus truncated weights, staleness 8", GOLD, "ppo-fresh", "ppo-truncated-8"),
    ),
    Finding(
        "per-hour", "Samples one iteration old give the most gold per hour", "Heed",
        ("fresh", *(f"truncated-{age}" for age in (1, 4, 8, 16))),
        lambda measures: [claim(measures) for claim in (
            _per_hour("staleness 0, disaggregated", "fresh", "disaggregated"),
            _per_hour("staleness 0, colocated", "fresh", "colocated"),
            *(_per_hour(f"staleness {age}", f"truncated-{age}", "asynchronous") for age in (4, 8, 16)),
        )],
        lambda _of: {},
    ),
    Finding(
        "gradient", "Old samples make the gradient vary more; the cap limits that, and no correction turns it", "Heed",
        (GRADIENT,),
        lambda measures: [claim(measures) for claim in (
            _varies("truncated-4", "fresh", "truncated at staleness 4 over staleness 0"),
            _varies("truncated-16", "fresh", "truncated at staleness 16 over staleness 0"),
            _varies("decoupled-16", "truncated-16", "uncut over truncated, staleness 16"),
            _varies("drop-16", "truncated-16", "dropped tokens over truncated, staleness 16"),
            _of_gradient(
                "cosine to the gradient of fresh samples, staleness 16, truncated minus no correction", COSINE,
                lambda sums: cosine(sums["truncated-16"], sums["fresh"]) - cosine(sums["none-16"], sums["fresh"]),
            ),
        )],
        lambda _of: {},
    ),
    _held("truncated weights", "truncated", "tuned-", "tuned rates: "),
    _needed("tuned-", "tuned rates: "),
    _stale(
        "A learning rate of its own helps old samples", "tuned-or-not",
        ("tuned rate minus one rate, truncated weights, staleness 16", GOLD, "tuned-truncated-16", "truncated-16"),
        ("tuned rate minus one rate, no correction, staleness 16", GOLD, "tuned-none-16", "none-16"),
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
