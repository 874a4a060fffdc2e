"""The findings on curves and counts with planted truths: every verdict can be reached, and is reached by its rule."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from evaluation.measures.best_of_n import best_of_n_kl
from preferences.statistics.estimates import UNKNOWN, Floats, Interval
from research.over_optimisation.curves import Curve
from research.studies.findings import FINDINGS, GOLD, LITTLE_COST, NO_SHIFT, Finding, Found
from research.studies.study import TRIAL, as_markdown, draw_curves, standalone
from research.studies.verdicts import Contrast, Rule, decide, earlier, overall, ratio_difference, rise_and_fall

NUM_PROMPTS = 400
BY_N = [math.sqrt(best_of_n_kl(2**power)) for power in range(1, 8)]
FAR = list(np.linspace(0.4, 4.0, 10))


def planted(kind: str, alpha: float, beta: float, distances: list[float], rng: np.random.Generator) -> Curve:
    """A curve of Gao et al.'s form with noise on every prompt, and its height a little different at every seed."""
    d_K1 = np.array(distances)[:, None]
    height = alpha * d_K1 - beta * (d_K1**2 if kind == "best_of_n" else d_K1 * np.log(d_K1))
    start_P = rng.uniform(0, 1, NUM_PROMPTS)
    noise_KP = rng.normal(0, 0.05, (len(distances), NUM_PROMPTS))
    gold_KP = start_P + height * rng.normal(1, 0.02) + noise_KP
    kl_KP = np.tile(d_K1**2, (1, NUM_PROMPTS))
    names = tuple(f"d = {d:.2f}" for d in distances)
    return Curve(kind, names, kl_KP, gold_KP, d_K1 + 0 * gold_KP, start_P, 0 * start_P)  # type: ignore[arg-type]


Shape = tuple[float, float, list[float]]  # α, β, distances


@dataclass(frozen=True)
class Planted:
    """Measures of one seed: curves by arm, bits a byte by stage, accuracy by arm."""

    seed: int
    best: dict[str, Shape]
    ppo: dict[str, Shape]
    bits_a_byte: dict[str, float]
    accuracy: dict[str, float]

    def best_of_n(self, judge: str) -> Curve:
        return planted("best_of_n", *self.best[judge], np.random.default_rng(self.seed))

    def rl(self, arm: str) -> Curve:
        return planted("rl", *self.ppo[arm], np.random.default_rng(self.seed))

    def bits(self, stage: str) -> tuple[Floats, Floats]:
        rng = np.random.default_rng(self.seed)
        bytes_D = rng.integers(100, 300, 80).astype(float)
        return bytes_D * (self.bits_a_byte[stage] + rng.normal(0, 0.1, 80)), bytes_D

    def right_pairs(self, judge: str) -> tuple[Floats, Floats]:
        rng = np.random.default_rng(self.seed)
        return np.clip(6 * self.accuracy[judge] + rng.normal(0, 1, 500), 0, 6), np.full(500, 6.0)


def as_published(seed: int) -> Planted:
    wobble = 0.002 * (seed - 1)
    full = (0.2, 0.12 + wobble, FAR)
    return Planted(
        seed,
        {"reward-full": (0.5, 0.2, BY_N), "reward-small": (0.3, 0.2, BY_N), "reward-few": (0.35, 0.2, BY_N)},
        {
            "ppo-full": full,
            "ppo-small": (0.12, 0.12, FAR),
            "ppo-few": (0.13, 0.12, FAR),
            "ppo-kl-low": (*full[:2], list(np.linspace(0.3, 2.5, 8))),
            "ppo-kl-high": (*full[:2], list(np.linspace(0.2, 1.5, 8))),
            "ppo-ptx": (*full[:2], list(np.linspace(0.3, 2.4, 8))),
        },
        {"base/sft": 1.0, "ppo-kl-low/ppo": 1.1 + wobble, "ppo-ptx/ppo": 1.02},
        {"reward-full": 0.78 + wobble, "reward-2": 0.75, "reward-4": 0.71},
    )


def the_opposite(seed: int) -> Planted:
    """Gold rises for ever, least judges last longest, a penalty helps, ptx does nothing, many labels win."""
    wobble = 0.002 * (seed - 1)
    full = (0.2, 0.12 + wobble, FAR)
    straight = (0.1, 0.0, BY_N)
    return Planted(
        seed,
        {"reward-full": straight, "reward-small": straight, "reward-few": straight},
        {
            "ppo-full": full,
            "ppo-small": (0.3, 0.12, FAR),
            "ppo-few": (0.3, 0.12, FAR),
            "ppo-kl-low": (0.5, 0.12, FAR),
            "ppo-kl-high": (0.5, 0.12, FAR),
            "ppo-ptx": (0.1, 0.12 + wobble, FAR),
        },
        {"base/sft": 1.1, "ppo-kl-low/ppo": 1.1 + wobble / 10, "ppo-ptx/ppo": 1.1},
        {"reward-full": 0.70 + wobble, "reward-2": 0.75, "reward-4": 0.78},
    )


def look(finding: Finding, plant: Callable[[int], Planted], num_seeds: int = 3) -> Found:
    return finding.evaluate([plant(seed) for seed in range(num_seeds)])


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.name)
def test_what_is_planted_as_published_replicates(finding: Finding) -> None:
    found = look(finding, as_published)
    assert [claim.verdict for claim in found.claims] == ["replicates"] * len(found.claims), as_markdown([found], 3)
    assert found.verdict == "replicates"


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.name)
def test_what_is_planted_the_other_way_does_not(finding: Finding) -> None:
    verdicts = {claim.text: claim.verdict for claim in look(finding, the_opposite).claims}
    # What the other world shares with the published one, or does not show: rises, PPO's fall, no top to compare.
    apart = {
        "best-of-n: gold rises to its maximum by": "replicates",
        "best-of-n: with a smaller reward model, gold peaks earlier by": "undecided",
        "best-of-n: with fewer comparisons, gold peaks earlier by": "undecided",
        "PPO: gold rises to its maximum by": "replicates",
        "PPO: gold falls from there to the furthest policy by": "replicates",
    }
    assert verdicts == {text: apart.get(text, "does not replicate") for text in verdicts}


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.name)
def test_one_seed_decides_nothing(finding: Finding) -> None:
    found = look(finding, as_published, num_seeds=1)
    assert found.verdict == "undecided"
    page = as_markdown([found], 1)
    assert "seed 0" in page
    assert "means nothing" not in page
    trial = as_markdown([found], 1, TRIAL)
    verdicts = [line for line in trial.splitlines() if found.verdict in line.lower() or line.startswith("# ")]
    assert len(verdicts) > 2
    assert all("a trial with --quick, which means nothing" in line for line in verdicts)


def test_seeds_that_disagree_leave_a_claim_open() -> None:
    found = look(
        next(f for f in FINDINGS if f.name == "labelers"), lambda seed: (as_published, the_opposite)[seed % 2](seed)
    )
    assert {claim.verdict for claim in found.claims} == {"undecided"}


@pytest.mark.parametrize(
    ("rule", "low", "high", "verdict"),
    [
        (GOLD, 0.01, 0.10, "replicates"),
        (GOLD, -0.01, 0.10, "undecided"),
        (GOLD, -0.05, 0.019, "does not replicate"),
        (GOLD, 0.005, 0.015, "does not replicate"),  # surely there, and too small to matter
        (NO_SHIFT, -0.04, 0.03, "replicates"),
        (NO_SHIFT, 0.01, 0.06, "undecided"),
        (NO_SHIFT, -0.12, -0.06, "does not replicate"),
        (LITTLE_COST, -0.30, 0.04, "replicates"),
        (LITTLE_COST, 0.04, 0.06, "undecided"),
        (LITTLE_COST, 0.05, 0.08, "does not replicate"),
        (GOLD, math.nan, math.nan, "undecided"),
    ],
)
def test_rules(rule: Rule, low: float, high: float, verdict: str) -> None:
    assert rule.verdict(Interval((low + high) / 2, low, high)) == verdict


def test_the_interval_over_seeds_is_students() -> None:
    values = (0.1, 0.2, 0.4)
    claim = decide([Contrast("c", GOLD, Interval(value, 0.0, 1.0)) for value in values])
    # Student's 97.5% point with two degrees of freedom is 4.3027.
    half = 4.3027 * np.std(values, ddof=1) / math.sqrt(3)
    assert claim.over_seeds.mean == pytest.approx(0.7 / 3)
    assert claim.over_seeds.high - claim.over_seeds.mean == pytest.approx(half, rel=1e-4)
    unknown = decide([Contrast("c", GOLD, value) for value in (Interval(0.3, 0.2, 0.4), UNKNOWN)])
    assert unknown.verdict == "undecided"


def test_a_finding_in_part() -> None:
    yes, no, open_ = (
        decide([Contrast("c", GOLD, Interval(value, 0, 1)) for value in values])
        for values in ((0.3, 0.31), (0.0, 0.0), (0.3, -0.3))
    )
    assert overall([yes, yes]) == "replicates"
    assert overall([yes, no]) == overall([yes, open_]) == "replicates in part"
    assert overall([no, no]) == "does not replicate"
    assert overall([no, open_]) == "undecided"


def test_noise_alone_neither_rises_nor_falls() -> None:
    """The highest of ten policies that are all alike looks high; told by other prompts, it is not."""
    rises, falls, naive = [], [], []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        curve = planted("rl", 0.0, 0.0, FAR, rng)
        rise, fall = rise_and_fall(curve, seed=seed)
        rises.append(rise.mean)
        falls.append(fall.mean)
        naive.append((curve.gold_KP - curve.start_gold_P).mean(axis=1).max())
    error = np.std(falls, ddof=1) / math.sqrt(len(falls))
    assert np.mean(naive) > 10 * abs(np.mean(rises))
    assert abs(np.mean(falls)) < 3 * error
    assert np.mean(naive) > 3 * error


def test_rise_and_fall_by_hand() -> None:
    """Policies out of order; the even prompts prefer the second, the odd ones the third."""
    gains = np.array([[0.5, 0.1], [0.2, 0.1], [0.3, 0.4]])  # [K, even or odd]; distances 3, 1, 2
    gold_KP = np.tile(gains, (1, 2))
    kl_KP = np.tile(np.array([[9.0], [1.0], [4.0]]), (1, 4))
    zeros = np.zeros(4)
    rise, fall = rise_and_fall(Curve("rl", ("c", "a", "b"), kl_KP, gold_KP, gold_KP, zeros, zeros), seed=0)
    # By the even prompts c is best, .1 by the odd ones; by the odd ones b, .3 by the even ones; c is the furthest.
    assert rise.mean == pytest.approx((0.1 + 0.3) / 2)
    assert fall.mean == pytest.approx((0.1 + 0.3) / 2 - (0.5 + 0.1) / 2)


def test_earlier_is_the_distance_between_planted_tops() -> None:
    rng = np.random.default_rng(0)
    full, small = planted("best_of_n", 0.6, 0.2, BY_N, rng), planted("best_of_n", 0.4, 0.2, BY_N, rng)
    found = earlier(full, small, seed=0)
    assert found.low < 0.5 < found.high
    straight = planted("best_of_n", 0.5, 0.0, BY_N, rng)
    cut = earlier(straight, small, seed=0)  # a top that was not seen counts as at the end of the range
    assert cut.low < BY_N[-1] - 1.0 < cut.high
    assert math.isnan(earlier(straight, straight, seed=0).mean)


def test_a_difference_of_ratios() -> None:
    found = ratio_difference(np.array([3.0, 5.0, 9.0]), np.array([1.0, 5.0, 0.0]), np.array([4.0, 6.0, 0.0]), seed=0)
    assert found.mean == pytest.approx((3 + 5 - 1 - 5) / 10)  # the last has nothing that was counted
    assert math.isnan(ratio_difference(np.zeros(2), np.zeros(2), np.zeros(2), seed=0).mean)


def test_a_figure_stands_alone() -> None:
    found = look(FINDINGS[0], as_published, num_seeds=2)
    svg = standalone(draw_curves("f", "a title", found.curves))
    assert svg.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert "var(" not in svg
    assert "calc(" not in svg
    assert svg.count("fewer comparisons") == 2  # named once for best-of-n and once for PPO, not once a seed
