"""The findings of `heed study algorithms`: published claims on which algorithm is better, on equal labels.

Every claim compares algorithms whose arms read the same rankings and the same reward model (`algorithm_arms.py`).
The claims and the smallest effects that matter were fixed before any run; docs/findings.md says what the sources claim.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from evaluation.measures.curves import Curve, mean_lead
from evaluation.statistics.means import bootstrap_mean
from heed.studies.algorithm_arms import arms_of
from heed.studies.contrasts import best_difference, negated, rise_and_fall
from heed.studies.findings import GOLD, NO_SHIFT, Curves, Finding, Measures
from heed.studies.verdicts import Contrast, Rule

TOKENS = Rule("above", 1.0, "tokens")
TITLES = {
    "ppo": "PPO", "rloo": "RLOO", "grpo": "GRPO", "dr-grpo": "Dr. GRPO", "dpo": "DPO", "ipo": "IPO",
    "rejection": "rejection sampling",
}  # fmt: skip


def pooled(of: Measures, name: str) -> Curve:
    """The policies of all runs of an algorithm as one curve."""
    curves = [of.rl(arm) for arm in arms_of(name)]
    names = tuple(
        f"{arm}, {policy}" for arm, curve in zip(arms_of(name), curves, strict=True) for policy in curve.names
    )
    return replace(
        curves[0],
        names=names,
        kl_KP=np.concatenate([curve.kl_KP for curve in curves]),
        gold_KP=np.concatenate([curve.gold_KP for curve in curves]),
        proxy_KP=np.concatenate([curve.proxy_KP for curve in curves]),
    )


def _curves(*names: str) -> Callable[[Measures], Curves]:
    return lambda of: {TITLES[name]: pooled(of, name) for name in names}


def _at_equal_kl(of: Measures, one: str, other: str, rule: Rule = GOLD) -> Contrast:
    lead = mean_lead("kl", pooled(of, one), pooled(of, other), seed=of.seed)
    return Contrast(f"{TITLES[one]} minus {TITLES[other]}: gold at equal KL", rule, lead)


def _best(of: Measures, one: str, other: str) -> Contrast:
    lead = best_difference(pooled(of, one), pooled(of, other), seed=of.seed)
    return Contrast(f"{TITLES[one]} minus {TITLES[other]}: gold of the best policy", GOLD, lead)


def _lengths(of: Measures) -> Contrast:
    grpo_P, dr_grpo_P = (np.mean([of.tokens(arm) for arm in arms_of(name)], axis=0) for name in ("grpo", "dr-grpo"))
    value = bootstrap_mean(grpo_P - dr_grpo_P, seed=of.seed)
    return Contrast("GRPO minus Dr. GRPO: tokens of the last policies' responses", TOKENS, value)


def _falls(of: Measures) -> list[Contrast]:
    return [
        Contrast(
            f"{TITLES[name]}: gold falls from its maximum to the furthest policy by",
            GOLD,
            rise_and_fall(pooled(of, name), seed=of.seed)[1],
        )
        for name in ("dpo", "ipo")
    ]


def _best_of_n_curves(of: Measures) -> Curves:
    return {"best-of-n": of.best_of_n("reward-full"), **_curves(*TITLES)(of)}


def _best_of_n(of: Measures) -> list[Contrast]:
    best, *others = _best_of_n_curves(of).items()
    return [
        Contrast(
            f"best-of-n minus {title}: gold at equal KL", GOLD, negated(mean_lead("kl", curve, best[1], seed=of.seed))
        )
        for title, curve in others
    ]


def _arms(*names: str) -> tuple[str, ...]:
    return tuple(arm for name in names for arm in arms_of(name))


ALGORITHMS = (
    Finding(
        "dpo-frontier",
        "DPO has more gold than PPO at equal KL",
        "Rafailov et al. 2023, arXiv 2305.18290, figure 2",
        _arms("dpo", "ppo"),
        lambda of: [_at_equal_kl(of, "dpo", "ppo")],
        _curves("dpo", "ppo"),
    ),
    Finding(
        "ppo-over-dpo",
        "PPO's best policy is better than DPO's",
        "Xu et al. 2024, arXiv 2404.10719",
        _arms("dpo", "ppo"),
        lambda of: [_best(of, "ppo", "dpo")],
        _curves("ppo", "dpo"),
    ),
    Finding(
        "rloo",
        "RLOO is better than PPO",
        "Ahmadian et al. 2024, arXiv 2402.14740",
        _arms("rloo", "ppo"),
        lambda of: [_at_equal_kl(of, "rloo", "ppo"), _best(of, "rloo", "ppo")],
        _curves("rloo", "ppo"),
    ),
    Finding(
        "dr-grpo",
        "GRPO lengthens responses; Dr. GRPO does not, at equal quality",
        "Liu et al. 2025, arXiv 2503.20783",
        _arms("grpo", "dr-grpo"),
        lambda of: [_lengths(of), _at_equal_kl(of, "dr-grpo", "grpo", NO_SHIFT)],
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
        lambda of: [_at_equal_kl(of, "rloo", "ipo"), _at_equal_kl(of, "ppo", "ipo")],
        _curves("rloo", "ppo", "ipo"),
    ),
    Finding(
        "raft",
        "Rejection sampling is better than PPO",
        "Dong et al. 2023, arXiv 2304.06767",
        _arms("rejection", "ppo"),
        lambda of: [_at_equal_kl(of, "rejection", "ppo"), _best(of, "rejection", "ppo")],
        _curves("rejection", "ppo"),
    ),
    Finding(
        "best-of-n",
        "Best-of-n has more gold at equal KL than every algorithm that trains",
        "Gao et al. 2022, arXiv 2210.10760, for PPO",
        _arms(*TITLES),
        _best_of_n,
        _best_of_n_curves,
    ),
)
