"""Win rates of verdicts that are grouped by prompt and labeler."""

import numpy as np
import pytest
from scipy import stats

from benchmarks.compare_worlds import comparisons
from evaluation.statistics.results import Counts
from evaluation.statistics.significance import EqualityTest
from evaluation.statistics.win_rates import (
    bootstrap_labelers,
    bootstrap_prompts,
    counts_of,
    expanded_level,
    interval_over_labelers,
    pair_win_rate,
    prompt_means,
)
from preferences.statistics.intervals import score_interval


def pair(rows):
    """Makes comparisons from rows (prompt, labeler, preference)."""
    prompt_V, labeler_V, won_V = (np.array(column) for column in zip(*rows, strict=True))
    return comparisons(won_V.astype(np.float64), prompt_V, labeler_V=labeler_V)


def win_rate(found, *, seed):
    return pair_win_rate(found, EqualityTest(prompt_means(found), seed=seed), seed=seed)


def test_every_prompt_weighs_the_same_whatever_its_verdicts():
    found = win_rate(pair([(0, 0, 1), (0, 0, 1), (0, 0, 1), (0, 0, 0), (1, 0, 0), (2, 0, 0.5)]), seed=0)
    assert found.mean == pytest.approx((0.75 + 0 + 0.5) / 3)
    assert (found.num_prompts, found.num_verdicts, found.num_labelers, found.method) == (3, 6, 1, "score")


def test_it_is_wilsons_with_one_verdict_a_prompt_and_neither_ties_nor_soft_values():
    def methods(won):
        return win_rate(pair([(prompt, 0, x) for prompt, x in enumerate(won)]), seed=0).method

    assert methods([1, 0, 1]) == "wilson"
    assert methods([1, 0, 0.5]) == methods([1, 0, 0.7]) == "score"


def test_repeating_a_prompts_verdict_tells_nothing_new():
    once = pair([(prompt, 0, prompt % 3 > 0) for prompt in range(30)])
    often = pair([(prompt, 0, prompt % 3 > 0) for prompt in range(30) for _ in range(5)])
    one, other = win_rate(once, seed=0), win_rate(often, seed=0)
    assert (one.low, one.high) == pytest.approx((other.low, other.high))


def test_prompts_without_verdicts_of_this_pair_do_not_count():
    assert prompt_means(pair([(0, 0, 1), (7, 0, 0), (7, 0, 1)])).tolist() == [1.0, 0.5]


def test_counts():
    assert counts_of(np.array([1.0, 0.5, 0.2, 0.7, 0.1 + 0.2 + 0.2])) == Counts(wins=2, ties=2, losses=1)


def test_labelers_who_differ_widen_the_interval_over_labelers_alone():
    """Labeler 0 always prefers a, labeler 1 always b, and labeler 2 depends on the prompt."""
    rows = [(prompt, 0, 1) for prompt in range(60)] + [(prompt, 1, 0) for prompt in range(60)]
    found = win_rate(pair(rows + [(prompt, 2, prompt % 2) for prompt in range(60)]), seed=0)
    assert found.mean == pytest.approx(0.5)
    assert found.high - found.low < 0.1
    assert found.over_labelers.high - found.over_labelers.low > 0.8  # Student's t with 2 degrees of freedom
    assert found.bootstrap.high - found.bootstrap.low > 0.5


def test_the_variance_over_labelers_by_hand():
    """Two prompts, two labelers: x = (1, ½), mean ¾; e_pl = [[1/16, 1/16], [1/16, -3/16]]."""
    rows = pair([(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 0)])
    found = interval_over_labelers(rows, EqualityTest(prompt_means(rows), seed=0))
    # v_P = 2·2/64, v_L = 2·2/64, v_PL = 12/256: the labelers' part is 1/16 - 3/64 = 1/64.
    v_p, extra = 1 / 16, 1 / 64
    expected = score_interval(np.array([1.0, 0.5]), quantile=stats.t.ppf(0.975, 1), inflation=1 + extra / v_p)
    assert (found.low, found.high) == pytest.approx(expected)


def test_labelers_who_agree_leave_the_interval_over_prompts():
    rows = [(prompt, labeler, prompt % 4 > 0) for prompt in range(40) for labeler in range(3)]
    found = win_rate(pair(rows), seed=0)
    assert (found.over_labelers.low, found.over_labelers.high) == (found.low, found.high)


def test_the_pigeonhole_bootstrap_equals_a_loop():
    """The spread over resamples against a loop that draws prompts and labelers."""
    generator = np.random.default_rng(5)
    table_PL = generator.integers(0, 2, size=(25, 4)).astype(float) * 0.8 + generator.random(4) * 0.2
    found = bootstrap_labelers(pair([(p, j, table_PL[p, j]) for p in range(25) for j in range(4)]), seed=1)
    looped = [table_PL[np.ix_(generator.integers(0, 25, 25), generator.integers(0, 4, 4))].mean() for _ in range(4_000)]
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(looped, [0.025, 0.975])), abs=0.02)


def test_a_bootstrap_of_few_prompts_is_expanded():
    assert expanded_level(20) == pytest.approx(1 - 2 * 0.0159, abs=5e-4)  # Hesterberg 2015, table 1: 0.0159
    assert expanded_level(10_000) == pytest.approx(0.95, abs=1e-4)
    values = np.random.default_rng(0).random(20)
    found = bootstrap_prompts(values, seed=0)
    assert found.high - found.low == pytest.approx(2 * 2.093 * values.std(ddof=1) / 20**0.5, rel=0.1)


def test_one_prompt_has_a_wide_interval_and_no_bootstrap():
    found = win_rate(pair([(0, 0, 1)]), seed=0)
    assert (found.low, found.high) == pytest.approx((0.2065, 1.0), abs=1e-4)
    assert np.isnan([found.bootstrap.low, found.over_labelers.mean]).all()


def test_no_verdicts_are_refused():
    with pytest.raises(ValueError, match="no prompts"):
        win_rate(pair([(0, 0, 1)]).between(1, 0).where(np.array([False])), seed=0)
