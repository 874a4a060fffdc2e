"""The findings that a study tests: the arms each needs, and the claims that decide it (heed/studies/verdicts.py).

The smallest effects that matter were fixed before any run. Gold scores lie between 0 and 1; PPO's gain over SFT in the
demo is about .24.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from evaluation.measures.curves import Curve, mean_lead
from heed.studies.arms import KL_COEFS, LABELERS_PER_TASK
from heed.studies.contrasts import earlier, last_difference, negated, ratio_difference, rise_and_fall
from heed.studies.verdicts import Claim, Contrast, Overall, Rule, decide, overall
from preferences.statistics.estimates import Floats

GOLD = Rule("above", 0.02, "of gold score")
DISTANCE = Rule("above", 0.1, "√nats")
NATS = Rule("above", 0.5, "nats")
BITS = Rule("above", 0.01, "bits per byte")
ACCURACY = Rule("above", 0.01, "of accuracy")
NO_SHIFT = Rule("within", 0.05, "of gold score")
LITTLE_COST = Rule("below", 0.05, "of gold score")


class Measures(Protocol):
    """What the findings need from one seed (`heed.studies.measures.SeedMeasures`)."""

    @property
    def seed(self) -> int: ...

    def best_of_n(self, judge: str) -> Curve: ...

    def rl(self, arm: str) -> Curve: ...

    def tokens(self, arm: str) -> Floats: ...

    def bits(self, stage: str) -> tuple[Floats, Floats]: ...

    def right_pairs(self, judge: str) -> tuple[Floats, Floats]: ...


Curves = dict[str, Curve]  # by their labels in the figure


@dataclass(frozen=True)
class Found:
    """A finding's claims, its verdict, and each seed's curves for the figure."""

    finding: "Finding"
    claims: tuple[Claim, ...]
    verdict: Overall
    curves: tuple[Curves, ...]


@dataclass(frozen=True)
class Finding:
    """A published finding. `arms` lists the arms that its contrasts read."""

    name: str
    title: str
    source: str
    arms: tuple[str, ...]
    contrasts: Callable[[Measures], list[Contrast]]
    curves: Callable[[Measures], Curves]

    def evaluate(self, seeds: Sequence[Measures]) -> Found:
        by_seed = [self.contrasts(measures) for measures in seeds]
        claims = tuple(decide(of_claim) for of_claim in zip(*by_seed, strict=True))
        return Found(self, claims, overall(claims), tuple(self.curves(measures) for measures in seeds))


REWARD_MODELS = {"full": "full", "a smaller reward model": "small", "fewer comparisons": "few"}


def _over_optimisation_curves(of: Measures) -> Curves:
    found = {f"best-of-n, {name}": of.best_of_n(f"reward-{arm}") for name, arm in REWARD_MODELS.items()}
    return found | {f"PPO, {name}": of.rl(f"ppo-{arm}") for name, arm in REWARD_MODELS.items()}


def _over_optimisation(of: Measures) -> list[Contrast]:
    curves, found = _over_optimisation_curves(of), []
    for what in ("best-of-n", "PPO"):
        full = curves[f"{what}, full"]
        rise, fall = rise_and_fall(full, seed=of.seed)
        found += [
            Contrast(f"{what}: gold rises to its maximum by", GOLD, rise),
            Contrast(f"{what}: gold falls from there to the furthest policy by", GOLD, fall),
        ]
        for name in ("a smaller reward model", "fewer comparisons"):
            sooner = earlier(full, curves[f"{what}, {name}"], seed=of.seed)
            found.append(Contrast(f"{what}: with {name}, gold peaks earlier by", DISTANCE, sooner))
    return found


def _penalty_curves(of: Measures) -> Curves:
    coefs = {f"KL coefficient {coef:g}": of.rl(f"ppo-{name}") for name, coef in KL_COEFS.items()}
    return {"no penalty": of.rl("ppo-full"), **coefs}


def _penalty(of: Measures) -> list[Contrast]:
    free, *penalised = _penalty_curves(of).items()
    found = []
    for name, curve in penalised:
        less = last_difference("kl_KP", free[1], curve, seed=of.seed)
        lead = mean_lead("kl", curve, free[1], seed=of.seed)
        found += [
            Contrast(f"{name}: training ends closer to SFT by", NATS, less),
            Contrast(f"{name}: gold at equal KL, minus that without a penalty", NO_SHIFT, lead),
        ]
    return found


def _ptx_curves(of: Measures) -> Curves:
    return {"PPO": of.rl("ppo-kl-low"), "PPO-ptx": of.rl("ppo-ptx")}


def _ptx(of: Measures) -> list[Contrast]:
    curves = _ptx_curves(of)
    (before, num_bytes), (plain, _), (mixed, _) = (of.bits(f"{stage}") for stage in ("base/sft", *PTX_STAGES))
    cost = last_difference("gold_KP", curves["PPO"], curves["PPO-ptx"], seed=of.seed)
    return [
        Contrast(
            "PPO's tax: bits per byte above SFT's", BITS, ratio_difference(plain, before, num_bytes, seed=of.seed)
        ),
        Contrast("PPO-ptx lowers it by", BITS, ratio_difference(plain, mixed, num_bytes, seed=of.seed)),
        Contrast("PPO-ptx's cost in gold score", LITTLE_COST, cost),
    ]


PTX_STAGES = ("ppo-kl-low/ppo", "ppo-ptx/ppo")


def _equal_kl_curves(of: Measures) -> Curves:
    return {
        "best-of-n": of.best_of_n("reward-full"),
        "PPO, no penalty": of.rl("ppo-full"),
        "PPO, KL penalty": of.rl("ppo-kl-low"),
    }


def _equal_kl(of: Measures) -> list[Contrast]:
    best, *others = _equal_kl_curves(of).items()
    return [
        Contrast(f"best-of-n minus {name} at equal KL", GOLD, negated(mean_lead("kl", curve, best[1], seed=of.seed)))
        for name, curve in others
    ]


def _labelers(of: Measures) -> list[Contrast]:
    right, compared = of.right_pairs("reward-full")
    return [
        Contrast(
            f"accuracy with one labeler on every prompt, minus {count} labelers on 1/{count} of the prompts",
            ACCURACY,
            ratio_difference(right, of.right_pairs(f"reward-{count}")[0], compared, seed=of.seed),
        )
        for count in LABELERS_PER_TASK[1:]
    ]


FINDINGS = (
    Finding(
        "over-optimisation",
        "Gold score against KL rises, then falls; smaller reward models and fewer comparisons fall earlier",
        "Gao et al. 2022, arXiv 2210.10760",
        ("ppo-full", "ppo-few", "ppo-small"),
        _over_optimisation,
        _over_optimisation_curves,
    ),
    Finding(
        "kl-penalty",
        "A KL penalty moves along the frontier of gold score and KL rather than shifting it",
        "Gao et al. 2022, arXiv 2210.10760",
        ("ppo-full", *(f"ppo-{name}" for name in KL_COEFS)),
        _penalty,
        _penalty_curves,
    ),
    Finding(
        "ptx",
        "PPO-ptx lowers the alignment tax at little cost in score",
        "Ouyang et al. 2022, arXiv 2203.02155",
        ("ppo-kl-low", "ppo-ptx"),
        _ptx,
        _ptx_curves,
    ),
    Finding(
        "equal-kl",
        "At equal KL, best-of-n has the higher gold score: RL spends more KL for it",
        "Gao et al. 2022, arXiv 2210.10760",
        ("ppo-full", "ppo-kl-low"),
        _equal_kl,
        _equal_kl_curves,
    ),
    Finding(
        "labelers",
        "With equally many judgments, one label each on more prompts beats several on fewer",
        "Khetan et al. 2018, arXiv 1712.04577, for classifiers",
        ("reward-full", *(f"reward-{count}" for count in LABELERS_PER_TASK[1:])),
        _labelers,
        lambda _of: {},
    ),
)
