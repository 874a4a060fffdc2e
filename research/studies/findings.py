"""The findings that a study tests: the arms each needs, and the claims that decide it (research/studies/verdicts.py).

`FINDINGS` are about reward models, PPO and labels. Every claim of `ALGORITHMS` compares algorithms whose arms read the
same rankings and the same reward model. `CONTROL` compares rejection sampling with training on random samples. `ALARM`
asks where spot checks stop a policy that hacks its reward. `LORA_FINDINGS` compare adapters with full tuning, and one
body with four roles with four models. `JUDGED` trains against a language model that grades by a rubric; its score
lies between 0 and 1, as gold does. The findings on the choice of labels are in the module that runs their arms
(`research.studies.label_choice`).

The claims and the smallest effects that matter were fixed before any run; research/findings says what the sources
claim. Gold scores lie between 0 and 1; PPO's gain over SFT in the demo is about .24.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ppo.alarm import evidence_of
from preferences.statistics.estimates import Floats
from research.over_optimisation.curves import Curve, mean_lead
from research.studies.arms import BEST_OF, KL_COEFS, LABELERS_PER_TASK, arm_names
from research.studies.verdicts import (
    Claim,
    Contrast,
    Overall,
    Rule,
    best_difference,
    bootstrap_mean,
    decide,
    earlier,
    furthest_rise,
    last_difference,
    overall,
    ratio_difference,
    rise_and_fall,
)

GOLD = Rule("above", 0.02, "of gold score")
DISTANCE = Rule("above", 0.1, "√nats")
NATS = Rule("above", 0.5, "nats")
BITS = Rule("above", 0.01, "bits per byte")
ACCURACY = Rule("above", 0.01, "of accuracy")
NO_SHIFT = Rule("within", 0.05, "of gold score")
LITTLE_COST = Rule("below", 0.05, "of gold score")
TOKENS = Rule("above", 1.0, "tokens")
JUDGE_SCORE = Rule("above", 0.02, "of the judge's score")
SAME_ACCURACY = Rule("within", 0.02, "of accuracy")

REWARD_MODELS = {"full": "full", "a smaller reward model": "small", "fewer comparisons": "few"}
PTX_STAGES = ("ppo-kl-low/ppo", "ppo-ptx/ppo")
ALGORITHM_TITLES = {
    "ppo": "PPO", "rloo": "RLOO", "grpo": "GRPO", "dr-grpo": "Dr. GRPO", "dpo": "DPO", "ipo": "IPO",
    "rejection": "rejection sampling",
}  # fmt: skip
TITLES = {**ALGORITHM_TITLES, "random": "random samples", "lora": "PPO by adapters", "shared": "PPO on a shared body"}
LORA_SOURCE = 'Schulman et al. 2025, "LoRA Without Regret" (thinkingmachines.ai/blog/lora)'


class Measures(Protocol):
    """What the findings need from one seed (`research.studies.measures.SeedMeasures`)."""

    @property
    def seed(self) -> int: ...

    def best_of_n(self, judge: str) -> Curve: ...

    def rl(self, arm: str) -> Curve: ...

    def tokens(self, arm: str) -> Floats: ...

    def metrics(self, arm: str) -> Floats: ...

    def bits(self, stage: str) -> tuple[Floats, Floats]: ...

    def right_pairs(self, judge: str) -> tuple[Floats, Floats]: ...

    def spot_checks(self, arm: str) -> tuple[Floats, Floats, Floats]: ...

    def labels(self, arm: str) -> tuple[Floats, Floats]: ...


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
    """A published finding. `arms` lists the arms that its contrasts use."""

    name: str
    title: str
    source: str
    arms: tuple[str, ...]
    contrasts: Callable[[Measures], list[Contrast]]
    curves: Callable[[Measures], Curves]

    def evaluate(self, seeds: Sequence[Measures]) -> Found:
        by_seed = [self.contrasts(measures) for measures in seeds]
        claims = tuple(decide(of_claim) for of_claim in zip(*by_seed, strict=True))
        curves = tuple(self.curves(measures) for measures in seeds)
        return Found(self, claims, overall(claims), curves)


def _over_optimisation_curves(measures: Measures) -> Curves:
    curves = {f"best-of-n, {name}": measures.best_of_n(f"reward-{arm}") for name, arm in REWARD_MODELS.items()}
    return curves | {f"PPO, {name}": measures.rl(f"ppo-{arm}") for name, arm in REWARD_MODELS.items()}


def _over_optimisation(measures: Measures) -> list[Contrast]:
    curves, contrasts = _over_optimisation_curves(measures), []
    for what in ("best-of-n", "PPO"):
        full = curves[f"{what}, full"]
        rise, fall = rise_and_fall(full, seed=measures.seed)
        contrasts += [
            Contrast(f"{what}: gold rises to its maximum by", GOLD, rise),
            Contrast(f"{what}: gold falls from there to the furthest policy by", GOLD, fall),
        ]
        for name in ("a smaller reward model", "fewer comparisons"):
            sooner = earlier(full, curves[f"{what}, {name}"], seed=measures.seed)
            contrasts.append(Contrast(f"{what}: with {name}, gold peaks earlier by", DISTANCE, sooner))
    return contrasts


def _penalty_curves(measures: Measures) -> Curves:
    coefs = {f"KL coefficient {coef:g}": measures.rl(f"ppo-{name}") for name, coef in KL_COEFS.items()}
    return {"no penalty": measures.rl("ppo-full"), **coefs}


def _penalty(measures: Measures) -> list[Contrast]:
    free, *penalised = _penalty_curves(measures).items()
    contrasts = []
    for name, curve in penalised:
        less = last_difference("kl_KP", free[1], curve, seed=measures.seed)
        lead = mean_lead(curve, free[1], seed=measures.seed)
        contrasts += [
            Contrast(f"{name}: training ends closer to SFT by", NATS, less),
            Contrast(f"{name}: gold at equal KL, minus that without a penalty", NO_SHIFT, lead),
        ]
    return contrasts


def _ptx_curves(measures: Measures) -> Curves:
    return {"PPO": measures.rl("ppo-kl-low"), "PPO-ptx": measures.rl("ppo-ptx")}


def _ptx(measures: Measures) -> list[Contrast]:
    curves = _ptx_curves(measures)
    (before, num_bytes), (plain, _), (mixed, _) = (measures.bits(f"{stage}") for stage in ("base/sft", *PTX_STAGES))
    cost = last_difference("gold_KP", curves["PPO"], curves["PPO-ptx"], seed=measures.seed)
    return [
        Contrast(
            "PPO's tax: bits per byte above SFT's", BITS, ratio_difference(plain, before, num_bytes, seed=measures.seed)
        ),
        Contrast("PPO-ptx lowers it by", BITS, ratio_difference(plain, mixed, num_bytes, seed=measures.seed)),
        Contrast("PPO-ptx's cost in gold score", LITTLE_COST, cost),
    ]


def _equal_kl_curves(measures: Measures) -> Curves:
    return {
        "best-of-n": measures.best_of_n("reward-full"),
        "PPO, no penalty": measures.rl("ppo-full"),
        "PPO, KL penalty": measures.rl("ppo-kl-low"),
    }


def _best_of_n_leads(curves: Curves, at_equal_kl: str, seed: int) -> list[Contrast]:
    """Compares the first curve, best-of-n's, with each of the others. `at_equal_kl` ends each contrast's name."""
    best, *others = curves.items()
    return [
        Contrast(f"best-of-n minus {name}{at_equal_kl}", GOLD, -mean_lead(curve, best[1], seed=seed))
        for name, curve in others
    ]


def _labelers(measures: Measures) -> list[Contrast]:
    right, compared = measures.right_pairs("reward-full")
    return [
        Contrast(
            f"accuracy with one labeler on every prompt, minus {count} labelers on 1/{count} of the prompts",
            ACCURACY,
            ratio_difference(right, measures.right_pairs(f"reward-{count}")[0], compared, seed=measures.seed),
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
        lambda measures: _best_of_n_leads(_equal_kl_curves(measures), " at equal KL", measures.seed),
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


def pooled(measures: Measures, name: str) -> Curve:
    """Joins the policies of all runs of an algorithm into one curve."""
    curves = [measures.rl(arm) for arm in arm_names(name)]
    names = tuple(
        f"{arm}, {policy}" for arm, curve in zip(arm_names(name), curves, strict=True) for policy in curve.names
    )
    return replace(
        curves[0],
        names=names,
        kl_KP=np.concatenate([curve.kl_KP for curve in curves]),
        gold_KP=np.concatenate([curve.gold_KP for curve in curves]),
        proxy_KP=np.concatenate([curve.proxy_KP for curve in curves]),
    )


def _curves(*names: str) -> Callable[[Measures], Curves]:
    return lambda measures: {TITLES[name]: pooled(measures, name) for name in names}


def _at_equal_kl(measures: Measures, one: str, other: str, rule: Rule = GOLD) -> Contrast:
    lead = mean_lead(pooled(measures, one), pooled(measures, other), seed=measures.seed)
    return Contrast(f"{TITLES[one]} minus {TITLES[other]}: gold at equal KL", rule, lead)


def _best(measures: Measures, one: str, other: str, rule: Rule = GOLD) -> Contrast:
    lead = best_difference(pooled(measures, one), pooled(measures, other), seed=measures.seed)
    return Contrast(f"{TITLES[one]} minus {TITLES[other]}: gold of the best policy", rule, lead)


def _response_lengths(measures: Measures) -> Contrast:
    grpo_P, dr_grpo_P = (
        np.mean([measures.tokens(arm) for arm in arm_names(name)], axis=0) for name in ("grpo", "dr-grpo")
    )
    value = bootstrap_mean(grpo_P - dr_grpo_P, seed=measures.seed)
    return Contrast("GRPO minus Dr. GRPO: tokens of the last policies' responses", TOKENS, value)


def _falls(measures: Measures) -> list[Contrast]:
    return [
        Contrast(
            f"{TITLES[name]}: gold falls from its maximum to the furthest policy by",
            GOLD,
            rise_and_fall(pooled(measures, name), seed=measures.seed)[1],
        )
        for name in ("dpo", "ipo")
    ]


def _best_of_n_curves(measures: Measures) -> Curves:
    return {"best-of-n": measures.best_of_n("reward-full"), **_curves(*ALGORITHM_TITLES)(measures)}


def _arms(*names: str) -> tuple[str, ...]:
    return tuple(arm for name in names for arm in arm_names(name))


ALGORITHMS = (
    Finding(
        "dpo-frontier",
        "DPO has more gold than PPO at equal KL",
        "Rafailov et al. 2023, arXiv 2305.18290, figure 2",
        _arms("dpo", "ppo"),
        lambda measures: [_at_equal_kl(measures, "dpo", "ppo")],
        _curves("dpo", "ppo"),
    ),
    Finding(
        "ppo-over-dpo",
        "PPO's best policy is better than DPO's",
        "Xu et al. 2024, arXiv 2404.10719",
        _arms("dpo", "ppo"),
        lambda measures: [_best(measures, "ppo", "dpo")],
        _curves("ppo", "dpo"),
    ),
    Finding(
        "rloo",
        "RLOO is better than PPO",
        "Ahmadian et al. 2024, arXiv 2402.14740",
        _arms("rloo", "ppo"),
        lambda measures: [_at_equal_kl(measures, "rloo", "ppo"), _best(measures, "rloo", "ppo")],
        _curves("rloo", "ppo"),
    ),
    Finding(
        "dr-grpo",
        "GRPO lengthens responses; Dr. GRPO does not, at equal quality",
        "Liu et al. 2025, arXiv 2503.20783",
        _arms("grpo", "dr-grpo"),
        lambda measures: [_response_lengths(measures), _at_equal_kl(measures, "dr-grpo", "grpo", NO_SHIFT)],
        _curves("grpo", "dr-grpo"),
    ),
    Finding(
        "dpo-over-optimisation",
        "Direct alignment over-optimises: gold falls at the smallest β",
        "Rafailov et al. 2024, arXiv 2406.02900",
        _arms("dpo", "ipo"),
        _falls,
        _curves("dpo", "ipo"),
    ),
    Finding(
        "online",
        "Online algorithms have more gold than offline ones at equal KL",
        "Tang et al. 2024, arXiv 2405.08448, for IPO's loss online and offline",
        _arms("rloo", "ppo", "ipo"),
        lambda measures: [_at_equal_kl(measures, "rloo", "ipo"), _at_equal_kl(measures, "ppo", "ipo")],
        _curves("rloo", "ppo", "ipo"),
    ),
    Finding(
        "raft",
        "Rejection sampling is better than PPO",
        "Dong et al. 2023, arXiv 2304.06767",
        _arms("rejection", "ppo"),
        lambda measures: [_at_equal_kl(measures, "rejection", "ppo"), _best(measures, "rejection", "ppo")],
        _curves("rejection", "ppo"),
    ),
    Finding(
        "best-of-n",
        "Best-of-n has more gold at equal KL than every algorithm that trains",
        "Gao et al. 2022, arXiv 2210.10760, for PPO",
        _arms(*ALGORITHM_TITLES),
        lambda measures: _best_of_n_leads(_best_of_n_curves(measures), ": gold at equal KL", measures.seed),
        _best_of_n_curves,
    ),
)


def _chosen_minus_random(measures: Measures) -> list[Contrast]:
    contrasts = []
    for best_of, chosen, random in zip(BEST_OF, arm_names("rejection"), arm_names("random"), strict=True):
        lead = last_difference("gold_KP", measures.rl(chosen), measures.rl(random), seed=measures.seed)
        contrasts.append(
            Contrast(f"training on the best of {best_of} minus training on a random one: gold", GOLD, lead)
        )
    gain_P = np.concatenate(
        [curve.gold_KP - curve.start_gold_P for curve in map(measures.rl, arm_names("random"))]
    ).mean(axis=0)
    mean_gain = bootstrap_mean(gain_P, seed=measures.seed)
    return [
        *contrasts,
        Contrast("training on random samples minus SFT: gold, over the three runs", NO_SHIFT, mean_gain),
    ]


CONTROL = Finding(
    "rejection-control",
    "Rejection sampling gains by choosing: as many random samples of the same prompts gain nothing",
    "Dong et al. 2023, arXiv 2304.06767, for the first half",
    _arms("rejection", "random"),
    _chosen_minus_random,
    _curves("rejection", "random"),
)


ALARM_CHECKS = ((1024, 128), (256, 32))  # of the initial policy, and per iteration
FALSE_ALARMS = 0.05
ALARM_SHARES = (0.5, 1.0)  # of the gain in score that must be real


def _alarms(measures: Measures) -> list[Contrast]:
    """Returns what a run would have been worth that the alarm stops, or rolls back, at these numbers of checks."""
    curve, contrasts = measures.rl("ppo-alarm"), []
    gold_KP = np.concatenate([curve.start_gold_P[None], curve.gold_KP])  # by the iterations that trained the policy
    for (initial, each), share in itertools.product(ALARM_CHECKS, ALARM_SHARES):
        rang, fall = _first_alarm(
            *measures.spot_checks("ppo-alarm"), initial, each, share, num_iterations=len(curve.gold_KP)
        )
        name = f"{initial} + {each} per iteration, share {share:g}"
        gains = {
            "stopped, minus SFT": gold_KP[rang] - gold_KP[0],
            "rolled back, minus SFT": gold_KP[fall] - gold_KP[0],
            "stopped, minus the last policy": gold_KP[rang] - gold_KP[-1],
        }
        contrasts += [
            Contrast(f"{name}: gold of the policy {what}", GOLD, bootstrap_mean(gain_P, seed=measures.seed))
            for what, gain_P in gains.items()
        ]
    return contrasts


def _first_alarm(
    check_N: Floats, score_N: Floats, policy_N: Floats, initial: int, each: int, share: float, *, num_iterations: int
) -> tuple[int, int]:
    """Returns by how many iterations the policies were trained that an alarm leaves: when it stops the run, and when it
    rolls back to before the fall. Without an alarm it is the last policy.
    """
    policies = [*range(int(policy_N.max()) + 1)]
    rows = [np.flatnonzero(policy_N == policy)[: each if policy else initial] for policy in policies]
    for policy in policies[1:]:
        seen = np.concatenate(rows[: policy + 1])
        evidence = evidence_of(
            check_N[seen],
            score_N[seen],
            policy_N[seen].astype(np.int64),
            share=share,
            num_iterations=num_iterations,
            false_alarms=FALSE_ALARMS,
        )
        if evidence.rings(FALSE_ALARMS):
            return policy + 1, evidence.fall - 1
    return num_iterations, num_iterations


ALARM = Finding(
    "alarm",
    "An alarm on spot checks stops PPO while its policy is still better than SFT's",
    "Heed",
    ("ppo-alarm",),
    _alarms,
    lambda measures: {"PPO": measures.rl("ppo-alarm")},
)


def _lora_accuracy(measures: Measures) -> list[Contrast]:
    (right, compared), (full, _) = measures.right_pairs("reward-lora"), measures.right_pairs("reward-full")
    lead = ratio_difference(right, full, compared, seed=measures.seed)
    return [Contrast("reward model by adapters minus full: accuracy", SAME_ACCURACY, lead)]


def _against_ppo(name: str, title: str, source: str, arm: str) -> Finding:
    return Finding(
        name,
        title,
        source,
        _arms(arm, "ppo"),
        lambda measures: [_at_equal_kl(measures, arm, "ppo", NO_SHIFT), _best(measures, arm, "ppo", NO_SHIFT)],
        _curves(arm, "ppo"),
    )


LORA_FINDINGS = (
    Finding(
        "lora-reward",
        "A reward model of adapters is as accurate as a fully tuned one",
        LORA_SOURCE,
        ("reward-lora", "reward-full"),
        _lora_accuracy,
        lambda measures: {name: measures.best_of_n(name) for name in ("reward-lora", "reward-full")},
    ),
    _against_ppo("lora-ppo", "PPO by adapters against PPO of all weights", LORA_SOURCE, "lora"),
    _against_ppo("shared-body", "PPO on one shared body against PPO with four models", "Heed", "shared"),
)


def _judged_curves(measures: Measures) -> Curves:
    return {"all criteria": measures.rl("ppo-judge"), "rubric dropout": measures.rl("ppo-dropout")}


def _judged(measures: Measures) -> list[Contrast]:
    whole, dropped = _judged_curves(measures).values()
    lead = mean_lead(dropped, whole, seed=measures.seed)
    fall = rise_and_fall(whole, seed=measures.seed)[1]
    return [
        Contrast(
            "the judge's score of the furthest policy, minus SFT's", JUDGE_SCORE, furthest_rise(whole, measures.seed)
        ),
        Contrast("gold falls from its maximum to the furthest policy by", GOLD, fall),
        Contrast("rubric dropout minus all criteria: gold at equal KL", GOLD, lead),
    ]


JUDGED = Finding(
    "judge",
    "Training against a rubric judge raises its score while gold falls; rubric dropout helps",
    "arXiv 2608.11669",
    ("ppo-judge", "ppo-dropout"),
    _judged,
    _judged_curves,
)
