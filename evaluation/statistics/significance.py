"""Tests whether a difference is real, and computes which difference could have been shown.

All tests are over clusters of prompts: every prompt is its own cluster unless the comparison names clusters. d_p is
x_p - ½, a prompt's mean preference for policy a minus ½, and d_c the sum of d_p over a cluster, divided by the largest
cluster's number of prompts. The null hypothesis is that d_c is as likely as -d_c.

Shape letters: P prompts, C clusters, M pairs (hypotheses), D draws, N sums in falling order of size, K pluses, X
distinct |d_c|.
"""

import math
from statistics import NormalDist

import numpy as np
import scipy

from evaluation.statistics.results import Power
from preferences.statistics.estimates import Floats, Interval, Ints
from preferences.statistics.intervals import (
    DesignEffect,
    between_quantiles,
    clustered_mean,
    mean_is_zero,
    strata_interval,
    studentised_ratios,
    variance_under,
)

ALPHA = 0.05
MOST_IGNORED = 0.02  # share of answers or verdicts that may be missing without a word in the conclusion
MOST_BOUNDED = 0.1  # if more are missing, not even a bound is given
POWER = 0.8
NUM_PERMUTATIONS = 10_000
MAX_SUMS = 2**20  # to enumerate: those of 20 clusters, or of many more if preferences take few values
MAX_SKEW = 0.1  # times √C: below it, Student's test of C gains is false in 5% to 6%
UNSEEN = 0.05  # the rate of an event that gains which are all alike may have missed
MAX_ENUMERATED = 1_000  # clusters: 2^-1000 can still be represented

_Z_BETA = NormalDist().inv_cdf(POWER)
_DRAWS_PER_CHUNK = 1_000
_LEAST = math.ulp(0.0)
_ROUNDING = 1e-9
_ALIKE = 2e-6  # spread of gains, of the largest, that is rounding: `studentised_ratios` sees none below 1e-6
_LEAST_QUANTILE, _MOST_QUANTILE = 1e-3, 1e3


class EqualityTest:
    """The one test of "both policies are preferred equally often", and the win rate's interval, which inverts it.

        T(μ) = √P·|x̄ - μ| / √(I(μ)·V(μ)),   V and I (`DesignEffect`) as in `preferences.statistics.intervals`
        p = max(share of sign vectors s with |Σ s_c·d_c| >= |Σ d_c|,  2·Φ(-T(½)))
        interval = {μ: T(μ) <= max(z, T(½) of the largest Σ s_c·d_c whose p is not below α)}

    The critical value of the score interval is that of the sign-flip test, if that is larger than the normal one. So
    at every α the interval excludes ½ exactly if p < α, and it is never narrower than the score interval.

    `SignFlips` counts or draws the sign vectors. If every prompt has one verdict, this is McNemar's exact test.
    `x_P` are the prompts' mean preferences, and `cluster_P` numbers their clusters; by default each is its own.

    Prompts may have different weights `weight_P`, such as those shown in the rarer order. The interval is then that of
    a weighted sum of the means of prompts with equal weights (`strata_interval`), wider if clusters have several of
    them, and T(½) is the quantile at which it touches ½; the critical values remain.

    Raises: ValueError for no prompts.
    """

    def __init__(
        self, x_P: Floats, cluster_P: Ints | None = None, weight_P: Floats | None = None, *, seed: int
    ) -> None:
        if len(x_P) == 0:
            raise ValueError("no prompts; a test needs at least one")
        self.x_P, self.mean = x_P, float(np.average(x_P, weights=weight_P))
        self._parts, self._across = _parts_of(x_P, cluster_P, np.ones(len(x_P)) if weight_P is None else weight_P)
        effect = DesignEffect(x_P - 0.5, cluster_P)
        self.num_clusters, largest = len(effect.size_C), int(effect.size_C.max())
        self._largest, self._d_C = largest, decided(effect.sum_C / largest)
        d_C = self._d_C
        self._flips = SignFlips(d_C, seed=seed)
        self.num_draws = self._flips.num_draws
        value_X, times_X = np.unique(np.clip(x_P, 0.0, 1.0), return_counts=True)
        # Converts a sum of d_c to a score T(½); 0 if all clusters are ties.
        variance = len(x_P) * (effect(0.0) * variance_under(0.5, value_X, times_X))
        self._per_sum = largest / math.sqrt(variance) if len(d_C) else 0.0
        score = abs(float(d_C.sum())) * self._per_sum
        self.flipped_p = self._flips.p
        if len(self._parts) > 1 and self._per_sum:
            score = self._touching()
            self.flipped_p = self._flips.share_reaching(score / self._per_sum)
        self.p = max(self.flipped_p, 2 * float(scipy.special.ndtr(-score)))

    def _touching(self) -> float:
        """Returns the quantile at which an end of the interval is ½."""
        side = 0 if self.mean > 0.5 else 1

        def beyond(quantile: float) -> float:
            return (self.ends(quantile)[side] - 0.5) * (-1) ** side

        if beyond(_LEAST_QUANTILE) <= 0:
            return 0.0
        most = 1.0
        while beyond(most) > 0:
            if most > _MOST_QUANTILE:  # with four parts, even the widest interval may only touch ½
                return most
            most *= 2
        return float(scipy.optimize.brentq(beyond, most / 2 if most > 1 else _LEAST_QUANTILE, most, xtol=1e-4))

    def ends(self, quantile: float, inflation: float = 1.0) -> tuple[float, float]:
        """Returns (low, high) of the win rate where T <= `quantile`; `inflation` >= 1 multiplies the variance."""
        return strata_interval(self._parts, quantile=quantile, inflation=inflation * self._across)

    def quantile(self, alpha: float = ALPHA) -> float:
        """Returns the largest T that the interval at 1 - α includes."""
        return max(-NormalDist().inv_cdf(alpha / 2), self._flips.largest_kept(alpha) * self._per_sum)

    def interval(self, alpha: float = ALPHA) -> tuple[float, float]:
        """Returns (low, high) of the win rate at level 1 - α."""
        low, high = self.ends(self.quantile(alpha))
        # An end that equals ½ up to rounding is moved to the side of ½ that agrees with the test.
        if self.p >= alpha:
            return min(low, 0.5), max(high, 0.5)
        if self.mean > 0.5:
            return max(low, math.nextafter(0.5, 1.0)), high
        return low, min(high, math.nextafter(0.5, 0.0))

    def power(self, alpha: float = ALPHA) -> Power:
        """Returns the smallest distance of the win rate from ½ that C clusters show at level α with 80% power, and the
        number of prompts needed to show the observed one, in clusters like these.

            C = (c·√m + z_β·√(m - δ²))² / δ²,   T = δ·√(C/m),   c = `quantile(α)`

        m is the variance of a cluster's difference if there is none on average, m - δ² if there is. With one verdict
        per prompt and one prompt per cluster, 4m is the share of prompts that are not ties, and this is McNemar's
        sample size (Miettinen 1968; Connor 1987, Biometrics 43) with the test's own critical value for z_α. The
        equation is quadratic in δ. If all sign vectors are counted, δ is exact: see `_exact_detectable`.

        A distance that was observed and not shown is below δ, and needs more prompts than there are.
        """
        critical, total = self.quantile(alpha), float(np.abs(self._d_C).sum())
        if total * self._per_sum <= critical * (1 + _ROUNDING):
            return Power(math.nan, None)
        num, per_cluster = self.num_clusters, len(self.x_P) / self.num_clusters
        root_m = self._largest / (self._per_sum * per_cluster * math.sqrt(num))
        if self.num_draws:
            spread = math.sqrt(max(0.0, num - critical**2 + _Z_BETA**2))
            detectable = root_m * (critical * math.sqrt(num) + _Z_BETA * spread) / (num + _Z_BETA**2)
        else:
            mean = _exact_detectable(self._d_C, critical / self._per_sum)
            detectable = mean * len(self._d_C) * self._largest / len(self.x_P)
        # If clusters differ much in size, a sum near the critical one can be as likely as 80%.
        detectable = float(np.maximum(detectable, root_m * critical / math.sqrt(num) * (1 + _ROUNDING)))
        observed, is_shown = abs(self.mean - 0.5), self.p < alpha
        if observed <= _ROUNDING:
            return Power(detectable, None)
        if not is_shown:  # follows from the equations, but for prompts with different weights
            detectable = max(detectable, observed)
        spread = math.sqrt(max(0.0, root_m**2 - observed**2))
        needed = ((critical * root_m + _Z_BETA * spread) / observed) ** 2 * per_cluster
        return Power(detectable, max(math.floor(needed * (1 + _ROUNDING)), 0 if is_shown else len(self.x_P)) + 1)


def _parts_of(
    x_P: Floats, cluster_P: Ints | None, weight_P: Floats
) -> tuple[list[tuple[float, Floats, Ints | None]], float]:
    """Returns the parts of prompts with equal weights, each with its share of all weights, and how much larger their
    sum's variance is than if no cluster were in several parts (at least 1).
    """
    weights, part_P = np.unique(weight_P.round(9), return_inverse=True)
    share_P = weight_P / weight_P.sum()
    mean_P = np.array([x_P[part_P == part].mean() for part in range(len(weights))])[part_P]
    _, place_P = np.unique(part_P if cluster_P is None else cluster_P, return_inverse=True)
    residual_P = share_P * (x_P - mean_P)
    together = float((np.bincount(place_P, residual_P) ** 2).sum()) if cluster_P is not None else 0.0
    apart = float((np.bincount(place_P * len(weights) + part_P, residual_P) ** 2).sum())
    parts = [
        (float(share_P[kept].sum()), x_P[kept], None if cluster_P is None else cluster_P[kept])
        for kept in (part_P == part for part in range(len(weights)))
    ]
    return parts, max(1.0, together / apart) if len(weights) > 1 and apart > _ROUNDING**2 else 1.0


class GainTest:
    """The one test of "the mean gain is 0", and the mean's interval at any level. One gain per prompt, in any unit.

        p = max(share of sign vectors s with |Σ s_c·X_c| >= |Σ X_c|,  Student's p,  bootstrap-t's p if gains are skewed)

    X_c is Σ x_p of a cluster's prompts. Student's test alone is too sure of a few equal gains: their standard error is
    0. It is also too sure of skewed ones, whose rare large values a sample mostly lacks: the mean and its error are
    then too small together. So if the skewness of X_c is more than .1·√C, p is at least the bootstrap-t's
    (`studentised_ratios`), and the interval contains its interval. If all gains are alike, nothing is known of their
    spread, and p is at least .95^C: the chance to miss an event that happens once in 20 clusters.

    The interval is otherwise Student's, mean ± h, and if p >= α, h is at least |mean|. So at every α the interval
    excludes 0 exactly if p < α, and it is never narrower than Student's; an end may be infinite. A single cluster
    shows nothing: p is 1, and the ends are NaN. `cluster_P` numbers the prompts' clusters; without it every prompt is
    its own.

    Raises: ValueError for no prompts.
    """

    def __init__(self, x_P: Floats, cluster_P: Ints | None = None, *, seed: int) -> None:
        self.x_P, self._cluster_P = x_P, np.arange(len(x_P)) if cluster_P is None else cluster_P
        student = mean_is_zero(x_P, self._cluster_P)
        place_P = np.unique(self._cluster_P, return_inverse=True)[1]
        sum_C, size_C = (np.bincount(place_P, of_P).astype(np.float64) for of_P in (x_P, np.ones_like(x_P)))
        largest = float(np.abs(sum_C).max())
        self._error, self._t_N = 0.0, np.zeros(0)
        # Sums are compared up to an absolute rounding error, so the largest becomes 1.
        self.p = max(student, SignFlips(sum_C / largest, seed=seed).p) if largest else 1.0
        residual_C = sum_C - float(x_P.mean()) * size_C
        spread = float((residual_C**2).mean()) ** 0.5
        if largest and spread <= _ALIKE * largest:
            self.p = max(self.p, (1 - UNSEEN) ** len(sum_C))
        elif largest and abs(float((residual_C**3).mean())) > MAX_SKEW * spread**3 * math.sqrt(len(sum_C)):
            mean, self._error, self._t_N = studentised_ratios(sum_C, size_C, seed=seed, num_resamples=NUM_PERMUTATIONS)
            t = mean / self._error
            beyond = min(int((self._t_N >= t).sum()), int((self._t_N <= t).sum()))
            self.p = max(self.p, min(1.0, 2 * (beyond + 1) / (NUM_PERMUTATIONS + 1)))

    def interval(self, alpha: float = ALPHA) -> Interval:
        """Returns the mean with its interval at level 1 - α."""
        student = clustered_mean(self.x_P, self._cluster_P, alpha=alpha)
        mean, half, size = student.mean, (student.high - student.low) / 2, abs(student.mean)
        # Unlike max and min, these keep the NaN of a single cluster.
        half = float(np.maximum(half, size) if self.p >= alpha else np.minimum(half, math.nextafter(size, 0.0)))
        low, high = mean - half, mean + half
        if len(self._t_N):
            ends = between_quantiles(mean, self._error, self._t_N, alpha)
            low, high = min(low, ends[0]), max(high, ends[1])
        if self.p < alpha:  # the quantiles of resamples agree with p up to one of them
            low, high = (max(low, _LEAST), high) if mean > 0 else (low, min(high, -_LEAST))
        return Interval(mean, low, high)


class SignFlips:
    """The sign-flip permutation test: `p` is the share of sign vectors s with |Σ s_c·d_c| >= |Σ d_c|, |d_c| <= 1.

    If feasible (up to 20 clusters, or 1,000 with few different |d_c|), all sign vectors are counted and `num_draws` is
    0. Otherwise m = 10,000 are drawn; if b of them reach the observed sum, the share is (b + 1)/(m + 1), which is never
    0 (Phipson & Smyth 2010, Statistical Applications in Genetics and Molecular Biology 9).
    """

    def __init__(self, d_C: Floats, *, seed: int) -> None:
        self.num_draws = 0 if _is_enumerable(d_C) else NUM_PERMUTATIONS
        self._sum_N, self._beyond_N = _drawn_sums(d_C, seed) if self.num_draws else _enumerated_sums(d_C)
        self._largest = float(np.abs(d_C).sum())
        self._rounding = _ROUNDING * max(1, len(d_C))
        self.p = self.share_reaching(abs(float(d_C.sum())))

    def share_reaching(self, size: float) -> float:
        """Returns the share of sign vectors s with |Σ s_c·d_c| >= `size`."""
        size -= self._rounding
        num_reached = int(np.searchsorted(-self._sum_N, -size, side="right"))
        if self.num_draws:
            return (num_reached + 1) / (self.num_draws + 1)
        return min(1.0, float(self._beyond_N[num_reached - 1])) if num_reached else 0.0

    def largest_kept(self, alpha: float) -> float:
        """Returns the largest |Σ s_c·d_c| whose p is not below α."""
        if not self.num_draws:
            return float(self._sum_N[int(np.searchsorted(self._beyond_N, alpha))])
        # p of the k-th largest sum is (k + 1)/(m + 1).
        k = math.ceil(alpha * (self.num_draws + 1) - 1)
        return float(self._sum_N[k - 1]) if k > 0 else self._largest


def _enumerated_sums(d_C: Floats) -> tuple[Floats, Floats]:
    """Returns each size |Σ s_c·d_c|, in falling order, and the probability of a size at least as large."""
    sum_N, chance_N, _ = _all_sums(d_C)
    # Equal sums may differ in their last bits.
    size_N, group_N = np.unique(np.abs(sum_N).round(9), return_inverse=True)
    chance_of_size_N = np.bincount(group_N, chance_N).astype(np.float64)
    return size_N[::-1], np.cumsum(chance_of_size_N[::-1])


def _drawn_sums(d_C: Floats, seed: int) -> tuple[Floats, Floats]:
    """Returns the sizes |Σ s_c·d_c| of random sign vectors, in falling order, and the share of those at least as
    large."""
    generator = np.random.default_rng(seed)
    drawn = []
    for _ in range(0, NUM_PERMUTATIONS, _DRAWS_PER_CHUNK):
        sign_DP = 1.0 - 2.0 * generator.integers(0, 2, size=(_DRAWS_PER_CHUNK, len(d_C)), dtype=np.int8)
        drawn.append(np.abs(sign_DP @ d_C))
    size_N = -np.sort(-np.concatenate(drawn))
    return size_N, np.arange(1, len(size_N) + 1) / len(size_N)


def decided(d_C: Floats) -> Floats:
    """Returns the d_c of the clusters that are not ties."""
    return np.asarray(d_C[np.abs(d_C) > _ROUNDING])


def holm(p_M: Floats) -> Floats:
    """Returns p-values [M] corrected so that the chance of any false rejection stays below the level. Holm 1979.

    The k-th smallest is multiplied by M - k + 1; the result is at least the one before it, and at most 1.
    """
    order = np.argsort(p_M, kind="stable")
    adjusted = np.minimum(1.0, np.maximum.accumulate(p_M[order] * np.arange(len(p_M), 0, -1)))
    corrected = np.empty(len(p_M))
    corrected[order] = adjusted
    return corrected


def holm_levels(p_M: Floats) -> Floats:
    """Returns α [M]: given the others' p-values, Holm's procedure rejects a hypothesis exactly if its p is below α.

    α = 5%/(M - r), if r of the others pass the procedure's first r steps, but not r + 1 of them.
    """
    steps = np.arange(len(p_M), 1, -1)
    passed = [np.cumprod(np.sort(np.delete(p_M, place)) * steps < ALPHA).sum() for place in range(len(p_M))]
    return np.asarray(ALPHA / (len(p_M) - np.array(passed, dtype=np.float64)))


def holm_level(p: float, holm_p: float) -> float:
    """Returns α for the interval of one of several hypotheses, so that it excludes the null exactly if holm_p < 5%.

    α is 5%, unless Holm's correction takes a difference back (p < 5% <= holm_p). Then it is the smaller level at which
    Holm's procedure tested this hypothesis, 5%·p/holm_p.
    """
    return ALPHA if (p < ALPHA) == (holm_p < ALPHA) else ALPHA * p / holm_p


def _exact_detectable(d_C: Floats, kept: float) -> float:
    """Returns the mean difference at which the test of all sign vectors has 80% power, if it rejects above `kept`.

    Each cluster keeps its |d| and prefers one policy with probability q, so the mean difference is (2q - 1)·mean|d|.
    NaN if the power is lower even at q = 1 (five clusters cannot reach p < 5%)."""
    num = len(d_C)
    sum_N, chance_N, num_plus_N = _all_sums(d_C)
    rejects_N = np.abs(sum_N) > kept + _ROUNDING
    # Whether the test rejects, given how many clusters prefer the one policy; that number is binomial.
    chance_K = scipy.stats.binom.pmf(np.arange(num + 1), num, 0.5)
    rejects_K = np.bincount(num_plus_N[rejects_N], chance_N[rejects_N], num + 1) / chance_K

    def power_beyond(q: float) -> float:
        return float(rejects_K @ scipy.stats.binom.pmf(np.arange(num + 1), num, q)) - POWER

    if power_beyond(1.0) < 0:
        return math.nan
    return (2 * float(scipy.optimize.brentq(power_beyond, 0.5, 1.0)) - 1) * float(np.abs(d_C).mean())


def _is_enumerable(d_C: Floats) -> bool:
    _, num_X = np.unique(np.abs(d_C).round(9), return_counts=True)
    return len(d_C) <= MAX_ENUMERATED and float(np.log2(num_X + 1).sum()) <= math.log2(MAX_SUMS)


def _all_sums(d_C: Floats) -> tuple[Floats, Floats, Ints]:
    """Returns [N] each sum Σ s_c·|d_c|, its probability under random signs, and its number of pluses.

    Among k clusters with the same |d_c| only the number of pluses matters, so each such group has k + 1 cases."""
    sum_N, chance_N, num_plus_N = np.zeros(1), np.ones(1), np.zeros(1, dtype=np.int64)
    for size, num in zip(*np.unique(np.abs(d_C).round(9), return_counts=True), strict=True):
        pluses = np.arange(num + 1)
        sum_N = np.add.outer(sum_N, size * (2 * pluses - num)).ravel()
        chance_N = np.multiply.outer(chance_N, scipy.stats.binom.pmf(pluses, num, 0.5)).ravel()
        num_plus_N = np.add.outer(num_plus_N, pluses).ravel()
    return sum_N, chance_N, num_plus_N
