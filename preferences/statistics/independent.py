"""Intervals for independent rows: the difference of two means, and a median."""

import math

import numpy as np
import scipy

from preferences.statistics.estimates import LEVEL, UNKNOWN, Floats, Interval


def difference_of_means(earlier_R: Floats, later_R: Floats) -> Interval:
    """Returns mean(later) - mean(earlier) with Welch's interval (1947); unknown if a side has fewer than two rows."""
    if min(len(earlier_R), len(later_R)) < 2:
        return UNKNOWN
    change = float(later_R.mean() - earlier_R.mean())
    one, other = earlier_R.var(ddof=1) / len(earlier_R), later_R.var(ddof=1) / len(later_R)
    if one + other == 0:
        return Interval(change, change, change)
    freedom = (one + other) ** 2 / (one**2 / (len(earlier_R) - 1) + other**2 / (len(later_R) - 1))
    half = float(scipy.special.stdtrit(freedom, (1 + LEVEL) / 2)) * math.sqrt(one + other)
    return Interval(change, change - half, change + half)


def median_interval(value_R: Floats) -> Interval:
    """Returns the median between two order statistics: P(low <= median <= high) >= 95% for any distribution.

    The number of values below the median is binomial(R, ½). low is the k-th smallest value and high the k-th largest,
    for the largest k with P(fewer than k below) <= 2.5%. With five values or fewer there is no such k, so low and high
    are NaN. Conover 1999, Practical Nonparametric Statistics, 3.2.
    """
    if len(value_R) == 0:
        return UNKNOWN
    ordered = np.sort(value_R)
    median = float(np.median(ordered))
    k = int(scipy.stats.binom.ppf((1 - LEVEL) / 2, len(ordered), 0.5))
    if k == 0:
        return Interval(median, math.nan, math.nan)
    return Interval(median, float(ordered[k - 1]), float(ordered[-k]))
