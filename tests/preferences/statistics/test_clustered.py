"""Student's interval of a mean, and the test that it inverts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from preferences.statistics.intervals import clustered_mean, mean_is_zero
from tests.examples import examples


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
