"""The bootstrap over clusters against hand calculations and its nominal coverage."""

import numpy as np
import pytest

from preferences.statistics.estimates import LEVEL, Interval
from preferences.statistics.intervals import bootstrap_ratio


def bootstrap_mean(values, *, seed, num_resamples=10_000, level=LEVEL):
    """The mean of all values, which are one number per prompt, or one array per prompt."""
    rows = [np.atleast_1d(value) for value in values]
    sums, counts = np.array([row.sum() for row in rows]), np.array([row.size for row in rows])
    return Interval(*bootstrap_ratio(sums, counts, seed=seed, num_resamples=num_resamples, level=level))


def test_bootstrap_mean_of_two_prompts_by_hand():
    # Resamples of {0, 1} have means 0 (1/4), 1/2 (1/2), 1 (1/4): the 2.5% and 97.5% quantiles are 0 and 1.
    assert bootstrap_mean([0.0, 1.0], seed=1) == Interval(mean=0.5, low=0.0, high=1.0)
    # At level 0.4, the quantiles 0.3 and 0.7 both lie in the middle half.
    assert bootstrap_mean([0.0, 1.0], seed=1, level=0.4) == Interval(mean=0.5, low=0.5, high=0.5)


def test_bootstrap_mean_is_near_the_normal_interval():
    values = np.random.default_rng(3).normal(2.0, 5.0, size=400)
    interval = bootstrap_mean(values, seed=0)
    half_width = 1.96 * values.std() / np.sqrt(400)
    assert interval.mean == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - half_width, abs=0.05)
    assert interval.high == pytest.approx(values.mean() + half_width, abs=0.05)


def test_the_same_seed_gives_the_same_interval():
    values = [0.1, 0.7, 0.4, 0.9]
    assert bootstrap_mean(values, seed=5) == bootstrap_mean(values, seed=5)


def test_clusters_of_copies_are_no_more_certain_than_one_each():
    values = np.random.default_rng(0).normal(size=40)
    clusters = [np.full(10, value) for value in values]
    single, copied = bootstrap_mean(values, seed=2), bootstrap_mean(clusters, seed=2)
    assert (copied.mean, copied.low, copied.high) == pytest.approx((single.mean, single.low, single.high))
    as_rows = bootstrap_mean(np.concatenate(clusters), seed=2)
    assert as_rows.high - as_rows.low < 0.5 * (copied.high - copied.low)  # the interval from resampling rows


def test_clusters_of_unequal_size_average_all_rows():
    assert bootstrap_mean([np.array([1.0, 2.0, 3.0]), np.array([10.0])], seed=0).mean == pytest.approx(16 / 4)


def test_one_prompt_has_a_mean_and_no_interval():
    interval = bootstrap_mean([np.array([1.0, 3.0])], seed=0)
    assert interval.mean == 2.0
    assert np.isnan([interval.low, interval.high]).all()
    assert interval.as_dict() == {"mean": 2.0, "low": None, "high": None}


def test_no_prompts_are_refused():
    with pytest.raises(ValueError, match="values is empty"):
        bootstrap_mean([], seed=0)


def test_bootstrap_mean_refuses_a_level_of_one():
    with pytest.raises(ValueError, match="level is 1"):
        bootstrap_mean([1.0, 2.0], seed=0, level=1)


@pytest.mark.parametrize("draw", ["normal", "coin", "clusters"])
def test_the_interval_covers_the_truth_as_often_as_it_says(draw):
    generator = np.random.default_rng(11)
    num_covered = 0
    for trial in range(300):
        if draw == "normal":
            values, truth = generator.normal(1.0, 2.0, size=50), 1.0
        elif draw == "coin":
            values, truth = generator.binomial(1, 0.4, size=50).astype(float), 0.4
        else:  # the prompt's own level plus noise over its 8 samples: rows are far from independent
            values, truth = generator.normal(size=(50, 1)) + generator.normal(size=(50, 8)), 0.0
        interval = bootstrap_mean(values, seed=trial, num_resamples=2_000)
        num_covered += interval.low <= truth <= interval.high
    assert 0.90 <= num_covered / 300 <= 0.98
