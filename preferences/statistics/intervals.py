"""Intervals for means and shares of independent rows, and of rows in clusters (a prompt with all its answers).

clustered_mean, mean_is_zero         the mean of all rows, by Student's distribution over clusters
clustered_shares                     shares of comparisons, by Wilson's interval for the effective number of pairs
wilson, score_interval,              a share, and the mean of values from 0 to 1, by the score test
strata_interval, share_interval
bootstrap_ratio, resampled_sums,     anything that is computed from sums over clusters, by resampling clusters
studentised_ratios
difference_of_means                  independent rows, by Welch's interval

Shape letters: R rows, C clusters (the prompts of a group), G groups (labelers), X distinct values, O outcomes,
N resamples, S sums, B blocks of clusters.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # loads each subpackage on first use: scipy.stats takes most of a second

from preferences.statistics.estimates import LEVEL, UNKNOWN, Floats, Interval, Ints, Share, Z

MANY_ERRORS = 10  # prompts with an error
NUM_RESAMPLES = 2_000  # enough for two digits of an interval's ends
MAX_CLUSTERS = 2_000  # if there are more clusters, they are grouped at random into this many blocks
_INDICES_PER_CHUNK = 1_000_000  # bounds the memory of resampling at about 20 MB


# ---- means and shares whose rows come in clusters ----


def prompt_numbers(prompts: Sequence[Hashable]) -> Ints:
    """Numbers the distinct prompts: equal prompts get the same number."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(prompt, len(numbers)) for prompt in prompts], dtype=np.int64)


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
    """Returns the mean of all rows with Student's interval over clusters, at level 1 - α.

    The variance is v of `clustered_shares`, with C - 1 degrees of freedom.
    """
    if len(value_R) == 0:
        return UNKNOWN
    mean, error, freedom = _mean_with_error(value_R, cluster_R)
    half = float(scipy.special.stdtrit(freedom, 1 - alpha / 2)) * error if freedom else math.nan
    return Interval(mean, mean - half, mean + half)


def mean_is_zero(value_R: Floats, cluster_R: Ints) -> float:
    """Returns the two-sided p-value of Student's test that the mean is 0.

    `clustered_mean` at level 1 - α excludes 0 exactly if p < α. A single cluster shows nothing, so its p is 1.

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


# ---- means of values from 0 to 1 ----


def wilson(mean: Floats, num: Floats, z: float = Z) -> tuple[Floats, Floats]:
    """Wilson's score interval for shares `mean` of `num` independent trials. `num` need not be a whole number.

    Unlike mean ± z·s it stays within 0 to 1 and has a width even if all trials came out alike. Wilson 1927; Brown, Cai
    & DasGupta 2001, Statistical Science 16(2), who recommend it for few trials.
    """
    centre = (mean + z**2 / (2 * num)) / (1 + z**2 / num)
    half = z / (1 + z**2 / num) * np.sqrt(mean * (1 - mean) / num + z**2 / (4 * num**2))
    # The interval always contains the mean; clipping undoes rounding.
    return np.clip(centre - half, 0.0, mean), np.clip(centre + half, mean, 1.0)


class DesignEffect:
    """By how much clusters of prompts raise the variance of the mean of their values, if the mean is μ.

        I(μ) = max(1, Σ_c (Σ_p (x_p - μ))² / Σ_p (x_p - μ)²),   the inner sum over the prompts of cluster c

    Like the variance of the score interval it is the one under μ, so it is also known if all prompts came out alike:
    each cluster then counts as one observation. At the mean it is Kish's (1965, Survey Sampling) design effect. If
    every prompt is its own cluster, or `cluster_P` is None, it is exactly 1.
    """

    def __init__(self, value_P: Floats, cluster_P: Ints | None) -> None:
        place_P = np.arange(len(value_P)) if cluster_P is None else np.unique(cluster_P, return_inverse=True)[1]
        self.sum_C, self.size_C = np.bincount(place_P, value_P), np.bincount(place_P)
        self._sum, self._squares = float(value_P.sum()), float((value_P**2).sum())

    def __call__(self, mu: float) -> float:
        num_prompts = int(self.size_C.sum())
        if len(self.size_C) == num_prompts:
            return 1.0
        own = self._squares - 2 * mu * self._sum + num_prompts * mu**2
        return max(1.0, float(((self.sum_C - self.size_C * mu) ** 2).sum()) / own) if own > 0 else 1.0


def score_interval(
    value_C: Floats, cluster_C: Ints | None = None, *, quantile: float = Z, inflation: float = 1.0
) -> tuple[float, float]:
    """Returns the score interval (low, high) for the mean of independent prompts' values, each from 0 to 1.

    It is Wilson's interval, generalised to values that are not all 0 or 1. For each candidate mean μ, the prompts get
    the weights q that are most likely if μ is true,

        maximise Σ log q_i  subject to  Σ q_i·x_i = μ,  where 0 and 1 may get weight even if no prompt had them,

    and μ is in the interval if n·(x̄ - μ)² <= z²·Σ q_i·(x_i - μ)². The variance is the one under μ, not the observed
    one. So the interval has a width even if all prompts came out alike, and it keeps its coverage for few prompts with
    a mean far from ½, where mean ± t·s does not. For values 0 and 1 it is Wilson's interval (Wilson 1927); with ties at
    ½ it is Tango's for two paired proportions (Tango 1998, Statistics in Medicine 17); in general the weights are those
    of empirical likelihood (Owen 2001, 2.9).

    If prompts depend on each other, `cluster_C` numbers their clusters, and V is multiplied by I(μ) of `DesignEffect`.
    With C clusters of equal size whose means have the standard deviation s, I·V/n is close to (s² + (x̄ - μ)²)/C. So
    with Student's statistic t over clusters the score is t·√(C/(C - 1 + t²)), and z allows |t| up to z·√((C - 1)/(C -
    z²)), which is more than his quantile with C - 1 degrees of freedom (2.37 against 2.26 for 10 clusters): a further
    correction for few clusters would count them twice.

    `quantile` replaces z: with Student's quantile if the variance is poorly known, or with a test's critical value.
    `inflation` >= 1 multiplies the variance, if labelers differ.

    Raises: ValueError if there are no prompts.
    """
    if len(value_C) == 0:
        raise ValueError("no prompts; an interval needs at least one")
    value_X, times_X = np.unique(np.clip(value_C, 0.0, 1.0), return_counts=True)
    mean = float(np.average(value_X, weights=times_X))
    effect = DesignEffect(np.clip(value_C, 0.0, 1.0), cluster_C)
    if len(effect.size_C) == len(value_C) and np.isin(value_X, (0.0, 1.0)).all():
        ends = wilson(np.array(mean), np.array(len(value_C)), quantile * math.sqrt(inflation))
        return float(ends[0]), float(ends[1])

    def excess(mu: float) -> float:
        variance = effect(mu) * variance_under(mu, value_X, times_X)
        return len(value_C) * (mean - mu) ** 2 - quantile**2 * inflation * variance

    return _end(excess, 0.0, mean), _end(excess, 1.0, mean)


def strata_interval(
    parts: Sequence[tuple[float, Floats, Ints | None]], *, quantile: float = Z, inflation: float = 1.0
) -> tuple[float, float]:
    """Returns (low, high) for the sum of λ·mean over parts (λ, values, clusters) with different prompts.

    The squared distances from the means to the ends of their score intervals add up. Unlike an interval from residuals,
    this one has a width even if a few prompts all came out alike. Zou & Donner 2008, Statistics in Medicine 27;
    Newcombe 1998. `quantile` and `inflation` are as in `score_interval`.
    """
    if len(parts) == 1:
        return score_interval(parts[0][1], parts[0][2], quantile=quantile, inflation=inflation)
    mean, below, above = 0.0, 0.0, 0.0
    for share, value_P, cluster_P in parts:
        own = float(value_P.mean())
        low, high = score_interval(value_P, cluster_P, quantile=quantile, inflation=inflation)
        mean, below, above = mean + share * own, below + (share * (own - low)) ** 2, above + (share * (high - own)) ** 2
    return mean - math.sqrt(below), mean + math.sqrt(above)


def share_interval(value_P: Floats, cluster_P: Ints | None = None) -> Interval:
    """Returns the mean of prompts' values, each from 0 to 1, with its 95% score interval over prompts or clusters.

    Unlike a bootstrap interval it has a width even if all prompts came out alike: 0 of 6 gives 0 (0 to .39), not
    0 (0 to 0).

    Raises: ValueError if there are no prompts.
    """
    return Interval(float(value_P.mean()) if len(value_P) else math.nan, *score_interval(value_P, cluster_P))


def variance_under(mu: float, value_X: Floats, times_X: Ints) -> float:
    """Returns Σ q·(x - μ)² for the most likely weights with mean μ, 0 < μ < 1. `times_X` counts the distinct values.

    The weights are q_i = 1/(n·(1 + λ·(x_i - μ))), where λ, between -1/(1 - μ) and 1/μ, is the root of
    Σ q_i·(x_i - μ) = 0. At either end of that range, the weight missing from Σ q = 1 lies on 1 or on 0.
    """
    from_mu_X = value_X - mu

    def slope(tilt: float) -> float:
        return float((times_X * from_mu_X / (1 + tilt * from_mu_X)).sum())

    # The slope falls with λ and is finite just inside the ends of the range.
    low, high = -(1 - 1e-12) / (1 - mu), (1 - 1e-12) / mu
    if slope(low) <= 0:
        tilt = low
    elif slope(high) >= 0:
        tilt = high
    else:
        tilt = float(scipy.optimize.brentq(slope, low, high, xtol=1e-10))
    weight_X = times_X / (times_X.sum() * (1 + tilt * from_mu_X))
    missing = max(0.0, 1 - float(weight_X.sum()))
    unseen = 1.0 if tilt < 0 else 0.0
    return float((weight_X * from_mu_X**2).sum()) + missing * (unseen - mu) ** 2


def _end(excess: Callable[[float], float], limit: float, mean: float) -> float:
    """Returns where `excess` crosses 0 between `limit` (0 or 1) and the mean."""
    if math.isclose(mean, limit, abs_tol=1e-12):
        return limit
    nearly = abs(limit - 1e-9)
    if excess(nearly) <= 0:
        return limit
    inside = mean + (limit - mean) * 1e-9
    return float(scipy.optimize.brentq(excess, nearly, inside, xtol=1e-10)) if excess(inside) < 0 else mean


# ---- the cluster bootstrap ----


def bootstrap_ratio(
    sums: Floats, counts: Floats, *, seed: int, num_resamples: int, level: float
) -> tuple[float, float, float]:
    """Returns (mean, low, high) of all rows, resampling clusters. The mean is `sums.sum() / counts.sum()`.

    Resampling rows as if they were independent would make intervals far too narrow, so whole clusters are resampled.
    Efron & Tibshirani 1993, ch. 13 (percentile interval); Davison & Hinkley 1997, 3.8 (clusters).

    `sums[c]` is the total over cluster c's rows and `counts[c]` its number of rows, above 0. `level` is the interval's
    nominal coverage. With a single cluster low and high are NaN.

    Raises: ValueError if there are no clusters, or `level` is not between 0 and 1.
    """
    assert sums.shape == counts.shape, f"{sums.shape} sums, {counts.shape} counts"
    assert bool((counts > 0).all()), "a cluster without rows"
    num_clusters = len(sums)
    if num_clusters == 0:
        raise ValueError("values is empty; an interval needs at least one prompt or task")
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; a number between 0 and 1 was expected")
    mean = float(sums.sum() / counts.sum())
    if num_clusters == 1:
        return mean, float("nan"), float("nan")
    resampled_NS = resampled_sums(np.stack([sums, counts], axis=1), seed=seed, num_resamples=num_resamples)
    low, high = percentiles(resampled_NS[:, 0] / resampled_NS[:, 1], level)
    return mean, low, high


def percentiles(values: Floats, level: float) -> tuple[float, float]:
    """Returns the percentile interval, which leaves out (1 - level)/2 of the resampled values on either side."""
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def resampled_sums(table_CS: Floats, *, seed: int, num_resamples: int) -> Floats:
    """Returns [N, S]: the column sums of a table with one row per cluster, for N resamples of C rows with replacement.

    Above MAX_CLUSTERS clusters it resamples random blocks of equal size (to within one). Sums over blocks of
    independent clusters are independent too, and have the same total variance.
    """
    if num_resamples < 1:
        raise ValueError(f"num_resamples is {num_resamples}; at least 1 was expected")
    generator = np.random.default_rng(seed)
    table_BS = in_blocks(table_CS, generator)
    num_blocks = len(table_BS)
    sums_NS = np.empty((num_resamples, table_CS.shape[1]))
    step = max(1, _INDICES_PER_CHUNK // num_blocks)
    for start in range(0, num_resamples, step):
        stop = min(start + step, num_resamples)
        drawn_NB = generator.integers(0, num_blocks, size=(stop - start, num_blocks), dtype=np.int32)
        # Count how often each block was drawn, so that one matrix product gives all columns.
        index_NB = drawn_NB + num_blocks * np.arange(stop - start)[:, None]
        times_NB = np.bincount(index_NB.ravel(), minlength=(stop - start) * num_blocks)
        sums_NS[start:stop] = times_NB.reshape(-1, num_blocks).astype(np.float64) @ table_BS
    return sums_NS


def studentised_ratios(sum_C: Floats, count_C: Floats, *, seed: int, num_resamples: int) -> tuple[float, float, Floats]:
    """Returns (mean, error, t [N]) of the ratio `sum_C.sum() / count_C.sum()`: what bootstrap-t intervals are made of.

    t is how many of its own standard errors a resample of clusters is off the mean, and infinite if they are all alike
    but off it. Its distribution is as skewed as that of the mean, so 95% of intervals from mean - t_97.5%·error to
    mean - t_2.5%·error hold the truth where Student's hold fewer (Efron & Tibshirani 1993, 12.5). `error` is 0 if all
    clusters are alike; t then has no meaning, and is empty.
    """
    table_CS = np.stack([sum_C, count_C, sum_C**2, sum_C * count_C, count_C**2], axis=1)

    def errors(sums_NS: Floats) -> tuple[Floats, Floats]:
        """Returns the means and their standard errors, from residuals sum - mean · count of each cluster."""
        total_N, count_N, *squares = sums_NS.T
        mean_N = total_N / count_N
        variance_N = squares[0] - 2 * mean_N * squares[1] + mean_N**2 * squares[2]
        return mean_N, np.sqrt(np.where(variance_N > 1e-12 * squares[0], variance_N, 0.0)) / count_N

    (mean,), (error,) = errors(table_CS.sum(axis=0)[None])
    if not error:
        return float(mean), 0.0, np.zeros(0)
    mean_N, error_N = errors(resampled_sums(table_CS, seed=seed, num_resamples=num_resamples))
    off_N = mean_N - mean
    infinite_N = np.where(np.abs(off_N) > 1e-9 * error, np.copysign(np.inf, off_N), 0.0)
    return float(mean), float(error), np.divide(off_N, error_N, out=infinite_N, where=error_N > 0)


def between_quantiles(mean: float, error: float, t_N: Floats, alpha: float) -> tuple[float, float]:
    """Returns the ends of the bootstrap-t interval at level 1 - α; an end is infinite if few clusters leave it open."""
    below, above = np.quantile(t_N, [alpha / 2, 1 - alpha / 2], method="closest_observation")
    return float(mean - above * error), float(mean - below * error)


def in_blocks(table_CS: Floats, generator: np.random.Generator) -> Floats:
    """Returns the table or, if it has more than MAX_CLUSTERS rows, the sums over random blocks of equally many rows."""
    if len(table_CS) <= MAX_CLUSTERS:
        return table_CS
    block_C = generator.permutation(len(table_CS)) % MAX_CLUSTERS
    return np.stack([np.bincount(block_C, column, MAX_CLUSTERS) for column in table_CS.T], axis=1)


# ---- independent rows ----


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
