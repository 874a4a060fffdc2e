"""Win rates of verdicts grouped by prompt and labeler; at equal length, against statsmodels and planted effects.

Numbers of statsmodels 0.15.0: `GEE(won, X, groups=prompts, family=Binomial(), cov_struct=Independence())`, its
`cov_type="bias_reduced"` errors (Mancl & DeRouen 2001), which are CR3 without the factor (C-1)/C.
"""

import math

import numpy as np
import pytest
from scipy import special, stats

from benchmarks.compare_worlds import comparisons
from evaluation.statistics.results import Counts
from evaluation.statistics.significance import EqualityTest
from evaluation.statistics.win_rates import (
    counts_of,
    interval_over_labelers,
    length_controlled,
    pair_win_rate,
    prompt_means,
    win_rate_at_equal_length,
)
from preferences.statistics.intervals import score_interval

INTERCEPT, SLOPE = 0.40471481, 0.16810127
ERROR, SLOPE_ERROR = 0.23064852, 0.46840432


def pair(rows):
    """Makes comparisons from rows (prompt, labeler, preference)."""
    prompt_V, labeler_V, won_V = (np.array(column) for column in zip(*rows, strict=True))
    return comparisons(won_V.astype(np.float64), prompt_V, labeler_V=labeler_V)


def win_rate(found, *, seed):
    return pair_win_rate(found, EqualityTest(prompt_means(found), seed=seed))


def test_every_prompt_weighs_the_same_whatever_its_verdicts():
    found = win_rate(pair([(0, 0, 1), (0, 0, 1), (0, 0, 1), (0, 0, 0), (1, 0, 0), (2, 0, 0.5)]), seed=0)
    assert found.mean == pytest.approx((0.75 + 0 + 0.5) / 3)
    assert (found.num_prompts, found.num_verdicts, found.num_labelers) == (3, 6, 1)


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


def test_one_prompt_has_a_wide_interval_and_none_over_labelers():
    found = win_rate(pair([(0, 0, 1)]), seed=0)
    assert (found.low, found.high) == pytest.approx((0.2065, 1.0), abs=1e-4)
    assert np.isnan(found.over_labelers.mean)


def test_no_verdicts_are_refused():
    with pytest.raises(ValueError, match="no prompts"):
        win_rate(pair([(0, 0, 1)]).between(1, 0).where(np.array([False])), seed=0)


def example():
    """20 prompts with two verdicts each."""
    row_V = np.arange(40)
    won_V = ((row_V * 7) % 10 > 3).astype(float)
    won_V[[3, 8, 21, 30]] = 0.5
    return comparisons(won_V, row_V // 2, longer_V=np.round(np.sin(row_V * 1.7) * 200))


def test_it_agrees_with_statsmodels():
    found = length_controlled(example())
    t, factor = stats.t.ppf(0.975, 19), math.sqrt(19 / 20)
    assert special.logit([found.mean, found.low, found.high]) == pytest.approx(
        [INTERCEPT, INTERCEPT - t * factor * ERROR, INTERCEPT + t * factor * ERROR], abs=1e-6
    )
    assert found.length_effect.mean == pytest.approx(SLOPE, abs=1e-6)
    assert found.length_effect.high == pytest.approx(SLOPE + t * factor * SLOPE_ERROR, abs=1e-6)
    assert (found.num_prompts, found.shrunk, found.reason) == (20, False, "")


def test_a_policy_that_wins_by_length_alone_wins_half_at_equal_length():
    generator = np.random.default_rng(0)
    longer_V = 300 + 300 * generator.normal(size=3_000)
    won_V = (generator.random(3_000) < special.expit(2 * np.tanh(longer_V / 424))).astype(float)
    pair = comparisons(won_V, np.arange(3_000), longer_V=longer_V)
    assert prompt_means(pair).mean() > 0.68
    found = length_controlled(pair)
    assert found.low < 0.5 < found.high
    assert found.high - found.low < 0.1
    assert found.length_effect.mean == pytest.approx(2, abs=0.3)


def test_swapping_policies_mirrors_it():
    pair = example()
    one, other = length_controlled(pair), length_controlled(pair.between(1, 0))
    assert (other.mean, other.low, other.high) == pytest.approx((1 - one.mean, 1 - one.high, 1 - one.low))
    assert other.length_effect.mean == pytest.approx(one.length_effect.mean)


def test_the_unit_of_length_does_not_matter():
    pair = example()
    in_words = comparisons(pair.won_V, pair.prompt_V, longer_V=pair.longer_V / 5)
    assert length_controlled(in_words).mean == pytest.approx(length_controlled(pair).mean)


@pytest.mark.parametrize("won", ["always", "the longer"])
def test_separation_is_shrunk_and_has_a_wide_interval(won):
    longer_V = np.linspace(-500, 500, 24)
    won_V = np.ones(24) if won == "always" else (longer_V > 0).astype(float)
    found = length_controlled(comparisons(won_V, np.arange(24), longer_V=longer_V))
    assert found.shrunk
    assert found.low < found.mean < found.high
    if won == "always":
        assert found.low > 0.5
        assert found.mean > 0.9
    else:
        assert found.mean == pytest.approx(0.5)
        assert found.high - found.low > 0.3
        assert found.length_effect.low > 0


@pytest.mark.parametrize(
    ("num_prompts", "longer", "reason"),
    [
        (4, [3.0, -2.0, 1.0, 9.0], "4 prompts; at least 5 were expected"),
        (9, [0.0] * 9, "no two responses differ in length"),
        (9, [70.0] * 9, "all differences in length are equal, so the effect of length is not identified"),
    ],
)
def test_what_cannot_be_known_has_a_reason(num_prompts, longer, reason):
    won_V = np.arange(num_prompts) % 2 * 1.0
    found = length_controlled(comparisons(won_V, np.arange(num_prompts), longer_V=np.array(longer)))
    assert math.isnan(found.mean)
    assert found.reason == reason


@pytest.mark.parametrize(("num_longer", "is_known"), [(5, False), (6, True), (34, True), (35, False)])
def test_lengths_that_overlap_too_little_give_no_win_rate_at_equal_length(num_longer, is_known):
    """Of 40 prompts a is longer on 5 (12.5%) or 6 (15%): below 15% the win rate would be extrapolated."""
    generator = np.random.default_rng(0)
    longer_V = np.where(np.arange(40) < num_longer, 1.0, -1.0) * generator.uniform(10, 200, size=40)
    won_V = (generator.random(40) < 0.4).astype(float)
    found = length_controlled(comparisons(won_V, np.arange(40), longer_V=longer_V))
    assert (found.reason == "") == is_known == math.isfinite(win_rate_at_equal_length(won_V, longer_V))
    if not is_known:
        assert math.isnan(found.mean)
        assert "longer on only 12% of prompts; 15% were expected" in found.reason
