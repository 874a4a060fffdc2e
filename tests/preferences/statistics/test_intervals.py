"""Student's interval of a mean and the test that it inverts; score intervals against Wilson's by scipy, Tango's closed
form, and what must hold of any interval.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from preferences.statistics.intervals import (
    clustered_mean,
    mean_is_zero,
    score_interval,
    variance_under,
)
from tests.examples import examples

Z = stats.norm.ppf(0.975)


# ---- Student's interval ----


def test_one_row_per_cluster_gives_students_test():
    value_R = np.random.default_rng(0).normal(0.3, 1.0, size=12)
    expected = stats.ttest_1samp(value_R, 0.0)
    interval = expected.confidence_interval(0.9)
    found = clustered_mean(value_R, np.arange(12), alpha=0.1)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert mean_is_zero(value_R, np.arange(12)) == pytest.approx(expected.pvalue)


@examples(200)
@given(st.lists(st.floats(-3, 3, width=16), min_size=1, max_size=20), st.integers(1, 3), st.sampled_from([0.05, 0.3]))
def test_the_interval_excludes_zero_exactly_if_p_is_below_alpha(values, rows_per_cluster, alpha):
    value_R, cluster_R = np.array(values), np.arange(len(values)) // rows_per_cluster
    found = clustered_mean(value_R, cluster_R, alpha=alpha)
    assert (found.low > 0 or found.high < 0) == (mean_is_zero(value_R, cluster_R) < alpha)


def test_one_cluster_shows_nothing_and_no_rows_are_refused():
    assert mean_is_zero(np.array([1.0, 2.0]), np.zeros(2, dtype=np.int64)) == 1.0
    assert np.isnan(clustered_mean(np.array([1.0, 2.0]), np.zeros(2, dtype=np.int64)).low)
    with pytest.raises(ValueError, match="no rows"):
        mean_is_zero(np.zeros(0), np.zeros(0, dtype=np.int64))


# ---- score intervals ----


@pytest.mark.parametrize(("wins", "prompts"), [(0, 20), (1, 20), (10, 20), (17, 20), (20, 20), (1, 1), (1_900, 2_000)])
def test_wins_and_losses_give_wilsons_interval(wins, prompts):
    expected = stats.binomtest(wins, prompts).proportion_ci(method="wilson")
    found = score_interval(np.repeat([1.0, 0.0], [wins, prompts - wins]))
    assert found == pytest.approx((expected.low, expected.high), abs=1e-9)


def tango(wins: int, losses: int, num: int) -> tuple[float, float]:
    """Tango 1998's interval of p_win - p_loss, from his closed form of the restricted estimate."""

    def score(delta: float) -> float:
        b = -wins - losses + (2 * num - wins + losses) * delta
        root = math.sqrt(b**2 + 8 * num * losses * delta * (1 - delta))
        p_loss = (root - b) / (4 * num)
        variance = num * (2 * p_loss + delta * (1 - delta))
        return (wins - losses - num * delta) / math.sqrt(variance)

    middle = (wins - losses) / num
    low = optimize.brentq(lambda delta: score(delta) - Z, -1 + 1e-9, middle - 1e-9)
    high = optimize.brentq(lambda delta: score(delta) + Z, middle + 1e-9, 1 - 1e-9)
    return low, high


@pytest.mark.parametrize(("wins", "losses", "num"), [(12, 2, 50), (3, 0, 20), (1, 0, 44), (9, 9, 20), (30, 5, 60)])
def test_ties_give_tangos_interval_of_paired_proportions(wins, losses, num):
    value_C = np.repeat([1.0, 0.0, 0.5], [wins, losses, num - wins - losses])
    low, high = tango(wins, losses, num)
    assert score_interval(value_C) == pytest.approx((0.5 + low / 2, 0.5 + high / 2), abs=1e-7)


def test_the_weights_are_the_likeliest_with_that_mean():
    """Against a general optimiser, over the seen values and both ends."""
    value_X, times_X, mu = np.array([0.2, 0.5, 0.9]), np.array([3, 4, 2]), 0.7
    support = np.append(value_X, [0.0, 1.0])

    def unlikely(logs):
        q = np.exp(logs)
        return -(times_X * np.log(q[:3])).sum()

    constraints = [
        {"type": "eq", "fun": lambda logs: np.exp(logs).sum() - 1},
        {"type": "eq", "fun": lambda logs: (np.exp(logs) * support).sum() - mu},
    ]
    found = optimize.minimize(unlikely, np.full(5, math.log(0.2)), constraints=constraints, options={"maxiter": 500})
    q = np.exp(found.x)
    assert variance_under(mu, value_X, times_X) == pytest.approx((q * (support - mu) ** 2).sum(), abs=1e-4)


def test_many_soft_values_give_the_normal_interval():
    value_C = np.random.default_rng(0).beta(2, 3, size=5_000)
    half = Z * value_C.std() / math.sqrt(5_000)
    assert score_interval(value_C) == pytest.approx((value_C.mean() - half, value_C.mean() + half), abs=1e-4)


@pytest.mark.parametrize("value", [0.0, 0.3, 0.5, 1.0])
def test_prompts_that_all_came_out_alike_have_an_interval_with_width(value):
    low, high = score_interval(np.full(20, value))
    assert low <= value <= high
    assert 0.1 < high - low < 0.25


def test_swapping_policies_mirrors_it():
    value_C = np.random.default_rng(1).choice([0.0, 0.25, 0.5, 1.0], size=30, p=[0.1, 0.2, 0.2, 0.5])
    low, high = score_interval(value_C)
    assert score_interval(1 - value_C) == pytest.approx((1 - high, 1 - low), abs=1e-9)


def test_inflation_widens_as_fewer_prompts_would():
    value_C = np.repeat([1.0, 0.0], [60, 40])
    assert score_interval(value_C, inflation=4.0) == pytest.approx(score_interval(value_C[::4]), abs=1e-9)


def test_no_prompts_are_refused():
    with pytest.raises(ValueError, match="no prompts"):
        score_interval(np.zeros(0))
