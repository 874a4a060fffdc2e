"""Intervals and win rates against hand calculations, a loop, and their own promise of coverage."""

import itertools
import time

import numpy as np
import pytest

from evaluation.statistics.means import bootstrap_mean, win_rate
from intervals.estimates import Interval

NAN = float("nan")


def test_bootstrap_mean_of_two_prompts_by_hand():
    # Resamples of {0, 1} have means 0 (1/4), 1/2 (1/2), 1 (1/4): the 2.5% and 97.5% quantiles are 0 and 1.
    assert bootstrap_mean([0.0, 1.0], seed=1) == Interval(mean=0.5, low=0.0, high=1.0)
    # At level 0.4 the quantiles 0.3 and 0.7 both fall into the middle half.
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
    assert as_rows.high - as_rows.low < 0.5 * (copied.high - copied.low)  # what resampling rows would claim


def test_clusters_of_unequal_size_average_all_rows():
    assert bootstrap_mean([np.array([1.0, 2.0, 3.0]), np.array([10.0])], seed=0).mean == pytest.approx(16 / 4)


def test_one_prompt_has_a_mean_and_no_interval():
    interval = bootstrap_mean([np.array([1.0, 3.0])], seed=0)
    assert interval.mean == 2.0
    assert np.isnan([interval.low, interval.high]).all()
    assert interval.as_dict() == {"mean": 2.0, "low": None, "high": None}


@pytest.mark.parametrize(
    ("values", "message"),
    [([], "values is empty"), ([1.0, NAN], r"values\[1\]"), ([np.array([1.0]), np.array([])], r"values\[1\]")],
)
def test_bootstrap_mean_refuses(values, message):
    with pytest.raises(ValueError, match=message):
        bootstrap_mean(values, seed=0)


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


def test_win_rate_by_hand():
    # Prompt 0: 2>1 win, 2=2 tie, 3>1 win, 3>2 win: 3.5 of 4. Prompt 1: 0<5, 0<5, 5=5, 5=5: 1 of 4.
    result = win_rate([[2.0, 3.0], [0.0, 5.0]], [[1.0, 2.0], [5.0, 5.0]])
    assert result.mean == pytest.approx((3.5 / 4 + 1 / 4) / 2)
    assert (result.num_prompts, result.num_masked, result.num_prompts_lost) == (2, 0, 0)
    assert result.low < 0.2 < 0.85 < result.high  # two prompts tell little


def test_win_rate_equals_a_loop_over_pairs(monkeypatch):
    monkeypatch.setattr("evaluation.statistics.means._PAIRS_PER_CHUNK", 40)  # several chunks
    generator = np.random.default_rng(4)
    a, b = generator.integers(0, 4, size=(23, 3)).astype(float), generator.integers(0, 4, size=(23, 5)).astype(float)
    a[2, 1] = b[7, 0] = b[7, 4] = NAN
    rates = []
    for row_a, row_b in zip(a, b, strict=True):
        pairs = [(x, y) for x, y in itertools.product(row_a, row_b) if x == x and y == y]
        rates.append(np.mean([1.0 if x > y else 0.5 if x == y else 0.0 for x, y in pairs]))
    result = win_rate(a, b)
    assert result.mean == pytest.approx(np.mean(rates))
    assert (result.num_prompts, result.num_masked) == (23, 3)


def test_win_rate_is_antisymmetric():
    generator = np.random.default_rng(8)
    a, b = generator.integers(0, 6, size=(60, 4)), generator.integers(0, 5, size=(60, 2))
    forth, back = win_rate(a, b), win_rate(b, a)
    assert (forth.mean, forth.low, forth.high) == pytest.approx((1 - back.mean, 1 - back.high, 1 - back.low))
    assert win_rate(a, a).mean == pytest.approx(0.5)


def test_a_failed_score_is_masked_and_counted_never_a_loss():
    result = win_rate([[1.0, NAN], [1.0, 1.0], [NAN, NAN]], [[0.0], [0.0], [0.0]])
    assert (result.mean, result.num_prompts, result.num_masked, result.num_prompts_lost) == (1.0, 2, 3, 1)


def test_prompts_that_all_went_alike_have_an_interval_with_a_width():
    """Wilson's lower end for n wins of n is n / (n + z²), the upper end for none n's mirror image."""
    all_won, none_won = win_rate(np.ones(6), np.zeros(6)), win_rate(np.zeros(6), np.ones(6))
    assert (all_won.mean, all_won.low, all_won.high) == pytest.approx((1.0, 6 / (6 + 1.959964**2), 1.0))
    assert (none_won.mean, none_won.low, none_won.high) == pytest.approx((0.0, 0.0, 1.959964**2 / (6 + 1.959964**2)))


def test_nothing_left_is_unknown_not_zero():
    result = win_rate([NAN, NAN], [1.0, 2.0])
    assert result.as_dict() == {
        "mean": None,
        "low": None,
        "high": None,
        "num_prompts": 0,
        "num_masked": 2,
        "num_prompts_lost": 2,
    }


def test_win_rate_refuses_other_prompts_and_shapes():
    with pytest.raises(ValueError, match="scores_a has 2 prompts and scores_b 3"):
        win_rate([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="scores_b has shape"):
        win_rate([1.0], np.zeros((1, 1, 1)))
    with pytest.raises(ValueError, match="scores_a has shape"):
        win_rate([], [])


def test_500_prompts_of_8_samples_are_quick():
    a, b = np.random.default_rng(0).normal(size=(2, 500, 8))
    began = time.process_time()
    win_rate(a, b)
    assert time.process_time() - began < 1.0  # about 0.1 s; the machine may be busy
