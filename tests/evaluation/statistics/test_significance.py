"""Tests, Holm and power against statsmodels, scipy, enumeration and simulation.

Numbers of statsmodels 0.15.0: `mcnemar([[5, 14], [4, 9]], exact=True)`, `multipletests(p, method="holm")`.
"""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from evaluation.statistics.significance import holm, power_of, sign_flip_test, sign_test


def prompts(wins, ties, losses):
    return np.repeat([1.0, 0.5, 0.0], [wins, ties, losses])


def test_the_sign_test_is_mcnemars():
    assert sign_test(prompts(14, 14, 4)) == pytest.approx(0.0308837890625)
    assert sign_test(prompts(0, 9, 0)) == 1.0


def test_the_sign_test_counts_prompts_by_their_mean():
    assert sign_test(np.array([0.6, 0.9, 0.51, 0.7, 0.55, 0.8])) == pytest.approx(2 / 2**6)


def test_few_prompts_are_enumerated():
    x_P = np.array([1.0, 0.7, 0.5, 0.2, 0.9, 1.0])
    d = x_P - 0.5
    sums = [abs(np.dot(signs, d)) for signs in itertools.product([1, -1], repeat=len(d))]
    expected = np.mean(np.array(sums) >= abs(d.sum()) - 1e-9)
    assert sign_flip_test(x_P, seed=0) == (pytest.approx(expected), 0)


def test_many_prompts_of_few_values_are_enumerated_too():
    """With verdicts of 0, ½ or 1 it is the sign test; with preferences in thirds, it is what random signs
    approximate."""
    assert sign_flip_test(prompts(30, 5, 14), seed=0) == (pytest.approx(sign_test(prompts(30, 5, 14))), 0)
    x_P = np.random.default_rng(3).integers(0, 4, size=100) / 3
    exact, num_permutations = sign_flip_test(x_P, seed=0)
    assert num_permutations == 0
    sign_DP = np.random.default_rng(1).choice([-1.0, 1.0], size=(40_000, 100))
    drawn = np.abs(sign_DP @ (x_P - 0.5)) >= abs((x_P - 0.5).sum()) - 1e-9
    assert exact == pytest.approx(drawn.mean(), abs=0.01)


def test_it_agrees_with_scipys_permutation_test():
    x_P = np.random.default_rng(2).beta(3, 2, size=60)
    expected = stats.permutation_test(
        (x_P - 0.5,), np.mean, permutation_type="samples", n_resamples=9_999, rng=np.random.default_rng(0)
    ).pvalue
    found, num_permutations = sign_flip_test(x_P, seed=0)
    assert num_permutations == 10_000
    assert found == pytest.approx(expected, abs=0.01)


def test_a_random_p_is_never_0_and_ties_change_nothing():
    assert sign_flip_test(np.linspace(0.6, 1.0, 50), seed=0) == (1 / 10_001, 10_000)
    assert sign_flip_test(prompts(9, 500, 2), seed=0) == sign_flip_test(prompts(9, 0, 2), seed=0)
    assert sign_flip_test(np.full(30, 0.5), seed=0) == (1.0, 0)


@pytest.mark.parametrize("num", [15, 80])
def test_swapping_policies_gives_the_same_p(num):
    x_P = np.random.default_rng(num).random(num)
    assert sign_flip_test(x_P, seed=3) == sign_flip_test(1 - x_P, seed=3)


def test_holm():
    assert holm(np.array([0.01, 0.04, 0.03, 0.005])) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm(np.array([0.5, 0.9])).tolist() == [1.0, 1.0]


def test_prompts_needed_by_hand():
    """Connor 1987 with 40% discordant and a difference of 0.2: (1.95996·√0.4 + 0.84162·√0.36)²/0.04 = 76.02."""
    assert power_of(prompts(30, 60, 10)).num_prompts_needed == 76 + 1
    assert power_of(prompts(7, 3, 7)).num_prompts_needed is None


def test_the_detectable_difference_solves_the_same_formula():
    x_P = np.random.default_rng(0).random(100)
    found = power_of(x_P).detectable
    m = ((x_P - 0.5) ** 2).mean()
    needed = (1.959964 * math.sqrt(m) + 0.841621 * math.sqrt(m - found**2)) ** 2 / found**2
    assert needed == pytest.approx(100, rel=1e-4)


def test_the_exact_detectable_difference_nears_the_formula_with_many_prompts():
    found = power_of(prompts(500, 100, 400)).detectable
    m = 0.9 / 4
    needed = (1.959964 * math.sqrt(m) + 0.841621 * math.sqrt(m - found**2)) ** 2 / found**2
    assert needed == pytest.approx(1_000, rel=0.05)


@pytest.mark.parametrize(("num", "tie"), [(20, 0.0), (60, 0.3), (400, 0.6)])
def test_a_detectable_difference_is_detected_four_times_in_five(num, tie):
    decided = round(num * (1 - tie))
    detectable = power_of(prompts(decided, num - decided, 0)).detectable
    generator = np.random.default_rng(0)
    found = 0
    for world in range(300):
        u_P = generator.random(num)
        x_P = np.where(u_P < (1 - tie) / 2 + detectable, 1.0, np.where(u_P < 1 - tie, 0.0, 0.5))
        found += sign_flip_test(x_P, seed=world)[0] < 0.05
    assert 0.72 <= found / 300 <= 0.87


def test_five_decided_prompts_can_show_nothing():
    assert math.isnan(power_of(prompts(5, 100, 0)).detectable)
    # If all six are won, p = 2/64; with q = 0.8^(1/6) that happens in 80% (and the reverse almost never).
    assert power_of(prompts(6, 0, 0)).detectable == pytest.approx(0.8 ** (1 / 6) - 0.5, abs=1e-4)
