"""The length-controlled win rate against statsmodels and planted length effects.

Numbers of statsmodels 0.15.0: `GEE(won, X, groups=prompts, family=Binomial(), cov_struct=Independence())`, its
`cov_type="bias_reduced"` errors (Mancl & DeRouen 2001), which are CR3 without the factor (C-1)/C.
"""

import math

import numpy as np
import pytest
from scipy import special, stats

from benchmarks.compare_worlds import comparisons
from evaluation.statistics.length import length_controlled
from evaluation.statistics.win_rates import prompt_means

INTERCEPT, SLOPE = 0.40471481, 0.16810127
ERROR, SLOPE_ERROR = 0.23064852, 0.46840432


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
