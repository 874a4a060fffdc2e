"""Shares, means and medians with 95% intervals whose rows come in clusters: a prompt, and what was said of it.

Shape letters: R rows, C clusters (a group's prompts), G groups (labelers).
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from intervals.resampling import Floats

LEVEL = 0.95
Z = float(stats.norm.ppf((1 + LEVEL) / 2))
MANY_ERRORS = 10  # prompts with one

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Interval:
    """A mean and its interval's ends, in the unit of the values. From a single prompt `low` and `high` are NaN."""

    mean: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float | None]:
        """For JSON: what is NaN (unknown) becomes None."""
        return without_nan(asdict(self))


UNKNOWN = Interval(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Share:
    """A share of comparisons of two responses, from 0 to 1, with a 95% interval.

    `num_pairs` comparisons were counted, from `num_tasks` tasks. What is unknown is NaN: all three numbers without
    comparisons; `low` and `high` where an interval is bootstrapped from a single prompt.
    """

    mean: float
    low: float
    high: float
    num_pairs: int
    num_tasks: int

    def as_dict(self) -> dict[str, float | int | None]:
        """For JSON: what is NaN becomes None."""
        return without_nan(asdict(self))


@dataclass(frozen=True)
class Tally:
    """What is counted, a row an answer of group `group_R` on task `task_R`: `right_R` of `compared_R` comparisons.

    Rows of one `prompt_R` are no independent evidence. The comparisons lie on `pairs_R` distinct pairs of the task's
    `responses_R` responses; halves in `right_R` are allowed.
    """

    group_R: Ints
    task_R: Ints
    prompt_R: Ints
    right_R: Floats
    compared_R: Floats
    pairs_R: Floats
    responses_R: Ints


def without_nan(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The same numbers with None for NaN, as JSON has it."""
    return {
        name: None if isinstance(number, float) and math.isnan(number) else number for name, number in numbers.items()
    }


def plain(value: Any) -> Any:
    """A tree of dataclasses, mappings and sequences in JSON's types: NaN and infinity become None, a tuple a list."""
    if is_dataclass(value):
        return {entry.name: plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def wilson(mean: Floats, num: Floats) -> tuple[Floats, Floats]:
    """Wilson's score interval of shares `mean` of `num` independent trials; `num` need not be whole.

    Unlike mean ± z·s it stays within 0 to 1 and has a width where all trials came out alike. Wilson 1927; Brown, Cai
    & DasGupta 2001, Statistical Science 16(2), who recommend it for few trials.
    """
    centre = (mean + Z**2 / (2 * num)) / (1 + Z**2 / num)
    half = Z / (1 + Z**2 / num) * np.sqrt(mean * (1 - mean) / num + Z**2 / (4 * num**2))
    return np.clip(centre - half, 0.0, mean), np.clip(centre + half, mean, 1.0)  # to rounding they hold the mean


def clustered_shares(tally: Tally, num_groups: int) -> list[Share]:
    """Each group's share, `right.sum() / compared.sum()`, with Wilson's interval for an effective number of pairs n*.

        n* = min(n_K·(1 + e/10), p(1 - p)/v · (z/t)²),   v = C/(C-1) · Σ_c (right_c - p·compared_c)² / (Σ_c compared_c)²

    v is the variance of a ratio over C independent prompts, t Student's with C - 1 degrees (Korn & Graubard 1998,
    Survey Methodology 24(2)). Where few errors were seen v is too small, and 0 where none was; n_K then bounds what
    the pairs of one ranking are worth. In rankings at random the share of pairs ordered alike varies as Kendall's tau
    does, as if (2K + 5)/9 times fewer pairs were coins: n_K = Σ_c 9·pairs_c/(2K_c + 5). The bound gives way to v as e
    grows, the number of prompts with an error (or with something right, if those are fewer); ten is our choice.
    """
    used = tally.compared_R > 0
    group_R = tally.group_R[used]
    group_C, cell_R = _cells(group_R, tally.prompt_R[used])
    tasks_G = np.bincount(_cells(group_R, tally.task_R[used])[0], minlength=num_groups)
    right_C = np.bincount(cell_R, tally.right_R[used], len(group_C))
    compared_C = np.bincount(cell_R, tally.compared_R[used], len(group_C))
    independent_R = 9 * tally.pairs_R[used] / (2 * tally.responses_R[used] + 5)
    compared_G = np.bincount(group_C, compared_C, num_groups)
    clusters_G = np.bincount(group_C, minlength=num_groups)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean_G = np.bincount(group_C, right_C, num_groups) / compared_G
        squares_G = np.bincount(group_C, (right_C - mean_G[group_C] * compared_C) ** 2, num_groups)
        v_G = clusters_G / (clusters_G - 1) * squares_G / compared_G**2
        t_G = stats.t.ppf((1 + LEVEL) / 2, np.maximum(clusters_G - 1, 1))
        seen_G = np.where(v_G > 0, mean_G * (1 - mean_G) / v_G * (Z / t_G) ** 2, np.inf)
        bound_G = np.bincount(group_R, independent_R, num_groups)
        wrong_G = np.bincount(group_C, right_C < compared_C, num_groups)
        num_mixed_G = np.minimum(wrong_G, np.bincount(group_C, right_C > 0, num_groups))
        low_G, high_G = wilson(mean_G, np.minimum(bound_G * (1 + num_mixed_G / MANY_ERRORS), seen_G))
    counted = zip(mean_G, low_G, high_G, compared_G, tasks_G, strict=True)
    return [Share(float(m), float(lo), float(hi), round(n), int(c)) for m, lo, hi, n, c in counted]


def _cells(group_R: Ints, cluster_R: Ints) -> tuple[Ints, Ints]:
    """The clusters of all groups: the group of each [C], and the place of each row's own [R]."""
    num_clusters = int(cluster_R.max(initial=0)) + 1
    cells, cell_R = np.unique(group_R * num_clusters + cluster_R, return_inverse=True)
    return cells // num_clusters, cell_R


def clustered_mean(value_R: Floats, cluster_R: Ints) -> Interval:
    """The mean of all rows, with Student's interval over clusters: v as in `clustered_shares`, C - 1 degrees."""
    if len(value_R) == 0:
        return UNKNOWN
    mean = float(value_R.mean())
    _, place_R = np.unique(cluster_R, return_inverse=True)
    num_clusters = int(place_R.max()) + 1
    if num_clusters == 1:
        return Interval(mean, math.nan, math.nan)
    residual_C = np.bincount(place_R, value_R - mean)
    variance = num_clusters / (num_clusters - 1) * float((residual_C**2).sum()) / len(value_R) ** 2
    half = float(stats.t.ppf((1 + LEVEL) / 2, num_clusters - 1)) * math.sqrt(variance)
    return Interval(mean, mean - half, mean + half)


def difference_of_means(earlier_R: Floats, later_R: Floats) -> Interval:
    """mean(later) - mean(earlier) of independent rows; Welch 1947. Unknown where either has fewer than two rows."""
    if min(len(earlier_R), len(later_R)) < 2:
        return UNKNOWN
    change = float(later_R.mean() - earlier_R.mean())
    one, other = earlier_R.var(ddof=1) / len(earlier_R), later_R.var(ddof=1) / len(later_R)
    if one + other == 0:
        return Interval(change, change, change)
    freedom = (one + other) ** 2 / (one**2 / (len(earlier_R) - 1) + other**2 / (len(later_R) - 1))
    half = float(stats.t.ppf((1 + LEVEL) / 2, freedom)) * math.sqrt(one + other)
    return Interval(change, change - half, change + half)


def median_interval(value_R: Floats) -> Interval:
    """The median, between two order statistics: whatever the distribution, P(low <= median <= high) >= 95%.

    The number of values below the median is binomial(R, ½); low is the k-th value from below and high the k-th from
    above, for the largest k with P(fewer than k below) <= 2.5%. Up to five values have no such k: low and high are
    NaN. Conover 1999, Practical Nonparametric Statistics, 3.2.
    """
    if len(value_R) == 0:
        return UNKNOWN
    ordered = np.sort(value_R)
    median = float(np.median(ordered))
    k = int(stats.binom.ppf((1 - LEVEL) / 2, len(ordered), 0.5))
    if k == 0:
        return Interval(median, math.nan, math.nan)
    return Interval(median, float(ordered[k - 1]), float(ordered[-k]))
