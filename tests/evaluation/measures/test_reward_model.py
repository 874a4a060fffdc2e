"""Reward models with a known truth: calibrated, overconfident, and a real one on files in published formats."""

import math

import numpy as np
import pytest

from benchmarks.measures_coverage import calibration_coverage, planted_pairs
from evaluation.measures.reward_model import (
    ScoredPairs,
    accuracy_of,
    best_scale,
    calibration,
    highest_accuracy,
)


def pairs_of(leads: list[float], prompts: list[int] | None = None, categories: tuple[str, ...] = ("",)) -> ScoredPairs:
    ones = np.ones(len(leads), dtype=np.int64)
    place = np.arange(len(leads))
    prompt = place if prompts is None else np.array(prompts)
    category = place % len(categories)
    return ScoredPairs(np.array(leads), prompt, place, 2 * ones, ones, category, categories)


def test_by_hand() -> None:
    """Four pairs, two bins: leads -1, 1, 3, 3; confidences σ(1) twice, σ(3) twice; half of the first bin is right."""
    found = calibration(pairs_of([-1.0, 3.0, 1.0, 3.0]), seed=0, num_bins=2)
    one, three = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-3))
    assert found.error.found == pytest.approx(0.5 * (one - 0.5) + 0.5 * (1 - three))
    assert found.overconfidence.mean == pytest.approx((one + three) / 2 - 0.75)
    losses = [math.log(1 + math.e), *[math.log(1 + math.exp(-lead)) for lead in (1, 3, 3)]]
    assert found.log_loss.mean == pytest.approx(sum(losses) / 4)


def test_equal_scores_are_half_right_and_equal_margins_share_a_bin() -> None:
    found = calibration(pairs_of([0.0] * 30), seed=0)
    assert accuracy_of(pairs_of([0.0] * 30), np.ones(30, dtype=bool)).mean == 0.5
    assert found.error.num_bins == 1
    assert found.error.found == 0.0
    assert math.isnan(found.scale.mean)


def test_the_best_scale_makes_the_likelihood_largest() -> None:
    pairs = planted_pairs(0.5, num_prompts=200, generator=np.random.default_rng(0))
    found = best_scale(pairs)
    grid = np.linspace(0.2, 0.9, 701)
    losses = [np.logaddexp(0, -s * pairs.lead_N).sum() for s in grid]
    assert found.mean == pytest.approx(grid[int(np.argmin(losses))], abs=1e-3)
    assert math.isnan(best_scale(pairs_of([1.0, 2.0])).mean)  # all pairs are right, so the larger the better


@pytest.mark.parametrize("sharpness", [1.0, 0.5])
def test_intervals_hold_and_only_the_too_sure_are_called_so(sharpness: float) -> None:
    """`python -m benchmarks.measures_coverage` draws 2,000 worlds; docs/measures.md has the table."""
    covered, rejected = calibration_coverage(sharpness, num_worlds=200, num_prompts=150, seed=0)
    assert covered.keys() == {"accuracy", "overconfidence", "log-loss", "scale"}
    for what, found in covered.items():
        assert 0.91 <= found.share <= 0.985, (what, found)
        assert abs(found.bias) < 0.1 * found.width, (what, found)
    assert rejected < 0.1 if sharpness == 1.0 else rejected > 0.9


def test_the_calibration_error_of_a_calibrated_model_is_all_excess_noise() -> None:
    found = [
        calibration(planted_pairs(1.0, num_prompts=100, generator=np.random.default_rng([9, w])), seed=w).error
        for w in range(100)
    ]
    assert np.mean([error.found for error in found]) > 0.03  # although the model is calibrated
    assert np.mean([error.found - error.if_calibrated for error in found]) == pytest.approx(0, abs=0.006)
    assert np.mean([error.p_value for error in found]) == pytest.approx(0.5, abs=0.1)


def test_intervals_are_over_prompts() -> None:
    """Ten copies of the same pair are one piece of evidence."""
    leads = [1.0, -1.0, 2.0, 1.5, -0.5, 0.7]
    once = calibration(pairs_of(leads), seed=0)
    copied = calibration(pairs_of(leads * 10, list(range(6)) * 10), seed=0)
    assert copied.overconfidence.low == pytest.approx(once.overconfidence.low)
    assert copied.scale.high == pytest.approx(once.scale.high)


def test_nobody_foretells_more_than_the_ceiling() -> None:
    """Labelers who prefer the first with probability p: simulated agreement and best accuracy match the formula."""
    generator = np.random.default_rng(0)
    for spread in (0.3, 1.0, 5.0):
        p = generator.beta(spread, spread, size=200_000)
        agreement, best = np.mean(p**2 + (1 - p) ** 2), np.mean(np.maximum(p, 1 - p))
        assert agreement <= best <= highest_accuracy(float(agreement)) < best + 0.05
    assert highest_accuracy(0.8**2 + 0.2**2) == pytest.approx(0.8)  # all pairs are equally hard
    assert highest_accuracy(1.0) == 1.0
    assert highest_accuracy(0.45) == 0.5


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"lead_N\[1\] is not a finite number"):
        calibration(pairs_of([1.0, math.nan]), seed=0)
