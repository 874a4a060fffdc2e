"""Intervals of shares and means whose rows come in clusters (a prompt with all answers about it).

Shape letters: R rows, C clusters (the prompts of a group), G groups (labelers).
"""

import math
from dataclasses import dataclass

import numpy as np
import scipy  # its parts are imported where they are first used: scipy.stats takes most of a second

from preferences.statistics.estimates import LEVEL, UNKNOWN, Floats, Interval, Ints, Share, Z
from preferences.statistics.score import wilson

MANY_ERRORS = 10  # prompts with an error


@dataclass(frozen=True)
class Tally:
    """One row per answer: group `group_R` got `right_R` of `compared_R` comparisons right on task `task_R`.

    Rows with the same `prompt_R` are not independent evidence. The comparisons cover `pairs_R` distinct pairs of the
    task's `responses_R` responses. `right_R` may contain halves.
    """

    group_R: Ints
    task_R: Ints
    prompt_R: Ints
    right_R: Floats
    compared_R: Floats
    pairs_R: Floats
    responses_R: Ints


def clustered_shares(tally: Tally, num_groups: int) -> list[Share]:
    """Returns each group's share, `right.sum() / compared.sum()`, with Wilson's interval for n* effective pairs.

        n* = min(n_K·(1 + e/10), p(1 - p)/v · (z/t)²),   v = C/(C-1) · Σ_c (right_c - p·compared_c)² / (Σ_c compared_c)²

    v is the variance of a ratio over C independent prompts; t is Student's quantile with C - 1 degrees of freedom (Korn
    & Graubard 1998, Survey Methodology 24(2)). With few errors v is too small, and with none it is 0, so n_K bounds how
    much independent evidence the pairs of one ranking can hold. In random rankings the share of pairs ordered alike
    varies like Kendall's tau, as if (2K + 5)/9 times fewer pairs were independent coin tosses:
    n_K = Σ_c 9·pairs_c/(2K_c + 5). The bound relaxes as e grows, the number of prompts with an error (or with a right
    answer, if those are fewer), and v takes over. The 10 is our choice.
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
        t_G = scipy.special.stdtrit(np.maximum(clusters_G - 1, 1), (1 + LEVEL) / 2)
        seen_G = np.where(v_G > 0, mean_G * (1 - mean_G) / v_G * (Z / t_G) ** 2, np.inf)
        bound_G = np.bincount(group_R, independent_R, num_groups)
        wrong_G = np.bincount(group_C, right_C < compared_C, num_groups)
        num_mixed_G = np.minimum(wrong_G, np.bincount(group_C, right_C > 0, num_groups))
        low_G, high_G = wilson(mean_G, np.minimum(bound_G * (1 + num_mixed_G / MANY_ERRORS), seen_G))
    counted = zip(mean_G, low_G, high_G, compared_G, tasks_G, strict=True)
    return [Share(float(m), float(lo), float(hi), round(n), int(c)) for m, lo, hi, n, c in counted]


def _cells(group_R: Ints, cluster_R: Ints) -> tuple[Ints, Ints]:
    """Returns each cluster's group [C], over the clusters of all groups, and the index of each row's cluster [R]."""
    num_clusters = int(cluster_R.max(initial=0)) + 1
    cells, cell_R = np.unique(group_R * num_clusters + cluster_R, return_inverse=True)
    return cells // num_clusters, cell_R


def clustered_mean(value_R: Floats, cluster_R: Ints, *, alpha: float = 1 - LEVEL) -> Interval:
    """Returns the mean of all rows with Student's interval over clusters, at level 1 - α: v as in `clustered_shares`,
    C - 1 degrees of freedom."""
    if len(value_R) == 0:
        return UNKNOWN
    mean, error, freedom = _mean_with_error(value_R, cluster_R)
    half = float(scipy.special.stdtrit(freedom, 1 - alpha / 2)) * error if freedom else math.nan
    return Interval(mean, mean - half, mean + half)


def mean_is_zero(value_R: Floats, cluster_R: Ints) -> float:
    """Returns the two-sided p of a mean of 0, by Student's test: `clustered_mean` at level 1 - α excludes 0 exactly if
    p < α. It is 1 for a single cluster, which shows nothing.

    Raises: ValueError if there are no rows.
    """
    if len(value_R) == 0:
        raise ValueError("no rows; a test needs at least one")
    mean, error, freedom = _mean_with_error(value_R, cluster_R)
    if not freedom or mean == 0:
        return 1.0
    return 2 * float(scipy.special.stdtr(freedom, -abs(mean) / error)) if error else 0.0


def _mean_with_error(value_R: Floats, cluster_R: Ints) -> tuple[float, float, int]:
    """Returns the mean, its standard error, and the degrees of freedom."""
    mean = float(value_R.mean())
    _, index_R = np.unique(cluster_R, return_inverse=True)
    num_clusters = int(index_R.max()) + 1
    if num_clusters == 1:
        return mean, math.nan, 0
    residual_C = np.bincount(index_R, value_R - mean)
    variance = num_clusters / (num_clusters - 1) * float((residual_C**2).sum()) / len(value_R) ** 2
    return mean, math.sqrt(variance), num_clusters - 1
