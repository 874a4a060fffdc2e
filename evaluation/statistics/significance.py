"""Is a difference real, and which difference could have been shown? All tests are over prompts.

d_p = x_p - ½ is a prompt's mean preference for policy a, minus ½. The null hypothesis is that d_p is as likely as -d_p.

Shape letters: P prompts, M pairs (hypotheses), D draws, N sums, K pluses, X distinct |d_p|.
"""

import math
from statistics import NormalDist

import numpy as np
import scipy

from evaluation.statistics.results import Power
from evaluation.statistics.win_rates import counts_of
from intervals.estimates import Floats, Ints

ALPHA = 0.05
POWER = 0.8
NUM_PERMUTATIONS = 10_000
MAX_SUMS = 2**20  # to enumerate: those of 20 prompts, or of many more if preferences take few values
MAX_ENUMERATED = 1_000  # prompts: 2^-1000 can still be represented

_Z_ALPHA, _Z_BETA = NormalDist().inv_cdf(1 - ALPHA / 2), NormalDist().inv_cdf(POWER)
_DRAWS_PER_CHUNK = 1_000
_ROUNDING = 1e-9


def sign_test(x_P: Floats) -> float:
    """Returns the two-sided p of the exact sign test: prompts won (x_p > ½) against prompts lost, without ties.

    If all prompts are ties, p is 1. If a judge passes or fails each policy's response, the won and lost prompts are the
    discordant ones, and this is the exact form of McNemar 1947.
    """
    counts = counts_of(x_P)
    decided = counts.wins + counts.losses
    return float(scipy.stats.binomtest(counts.wins, decided).pvalue) if decided else 1.0


def sign_flip_test(x_P: Floats, *, seed: int) -> tuple[float, int]:
    """Tests the mean preference by swapping the policies of prompts; returns (two-sided p, number of random draws).

    p is the share of sign vectors s with |Σ s_p·d_p| >= |Σ d_p|. If feasible (up to 20 prompts that are not ties, or
    1,000 with few different |d_p|), all vectors are counted and the number of draws is 0. Otherwise m = 10,000 are
    drawn; if b of them reach the observed sum, p = (b + 1)/(m + 1), which is never 0 (Phipson & Smyth 2010, Statistical
    Applications in Genetics and Molecular Biology 9).
    """
    d_P = decided(x_P)
    reached = abs(float(d_P.sum())) - _ROUNDING * max(1, len(d_P))
    if _is_enumerable(d_P):
        sum_N, chance_N, _ = _all_sums(d_P)
        return min(1.0, float(chance_N[np.abs(sum_N) >= reached].sum())), 0
    generator = np.random.default_rng(seed)
    num_reached = 0
    for _ in range(0, NUM_PERMUTATIONS, _DRAWS_PER_CHUNK):
        sign_DP = 1.0 - 2.0 * generator.integers(0, 2, size=(_DRAWS_PER_CHUNK, len(d_P)), dtype=np.int8)
        num_reached += int((np.abs(sign_DP @ d_P) >= reached).sum())
    return (num_reached + 1) / (NUM_PERMUTATIONS + 1), NUM_PERMUTATIONS


def decided(x_P: Floats) -> Floats:
    """Returns d_p of the prompts that are not ties."""
    d_P = x_P - 0.5
    return np.asarray(d_P[np.abs(d_P) > _ROUNDING])


def holm(p_M: Floats) -> Floats:
    """Returns p-values [M] corrected so that the chance of any false rejection stays below the level. Holm 1979.

    The k-th smallest is multiplied by M - k + 1; the result is at least the one before it, and at most 1.
    """
    order = np.argsort(p_M, kind="stable")
    adjusted = np.minimum(1.0, np.maximum.accumulate(p_M[order] * np.arange(len(p_M), 0, -1)))
    corrected = np.empty(len(p_M))
    corrected[order] = adjusted
    return corrected


def power_of(x_P: Floats) -> Power:
    """Returns the smallest distance of the win rate from ½ that P prompts show with 80% power, and the number of
    prompts needed to show d̄.

        P = (z_α·√m + z_β·√(m - δ²))² / δ²,   m = Σ_p d_p² / P

    m is the variance of d if there is no difference, m - δ² if there is. With one verdict per prompt, 4m is the share
    of prompts that are not ties, and this is McNemar's sample size (Miettinen 1968; Connor 1987, Biometrics 43). In δ
    it is a quadratic equation. If `sign_flip_test` counts all sign vectors, δ is exact: see `_exact_detectable`.
    """
    d_P = x_P - 0.5
    m, observed = float((d_P**2).mean()), float(d_P.mean())
    decided_P = decided(x_P)
    if _is_enumerable(decided_P):
        detectable = _exact_detectable(decided_P) * len(decided_P) / len(d_P)
    else:
        root = _Z_ALPHA * math.sqrt(len(d_P)) + _Z_BETA * math.sqrt(len(d_P) - _Z_ALPHA**2 + _Z_BETA**2)
        detectable = math.sqrt(m) * root / (len(d_P) + _Z_BETA**2)
    if abs(observed) <= _ROUNDING:
        return Power(detectable, None)
    spread = math.sqrt(max(0.0, m - observed**2))
    return Power(detectable, math.ceil(((_Z_ALPHA * math.sqrt(m) + _Z_BETA * spread) / observed) ** 2))


def _exact_detectable(d_P: Floats) -> float:
    """Returns the mean difference at which the test of all sign vectors has 80% power.

    Each prompt keeps its |d| and prefers one policy with probability q, so the mean difference is (2q - 1)·mean|d|. NaN
    if the power is lower even at q = 1 (five prompts cannot reach p < 5%)."""
    num = len(d_P)
    sum_N, chance_N, num_plus_N = _all_sums(d_P)
    order = np.argsort(-np.abs(sum_N), kind="stable")
    beyond_N = np.cumsum(chance_N[order])
    first_kept = int(np.searchsorted(beyond_N, ALPHA * (1 + _ROUNDING), side="right"))
    # The largest set of extreme sums with a probability of at most 5%; equal sums at its edge are left out together.
    edge = np.abs(sum_N)[order[min(first_kept, len(order) - 1)]]
    rejects_N = np.abs(sum_N) > edge + _ROUNDING
    # Whether the test rejects, given how many prompts prefer the one policy; that number is binomial.
    chance_K = scipy.stats.binom.pmf(np.arange(num + 1), num, 0.5)
    rejects_K = np.bincount(num_plus_N[rejects_N], chance_N[rejects_N], num + 1) / chance_K

    def power_beyond(q: float) -> float:
        return float(rejects_K @ scipy.stats.binom.pmf(np.arange(num + 1), num, q)) - POWER

    if power_beyond(1.0) < 0:
        return math.nan
    return (2 * float(scipy.optimize.brentq(power_beyond, 0.5, 1.0)) - 1) * float(np.abs(d_P).mean())


def _is_enumerable(d_P: Floats) -> bool:
    _, num_X = np.unique(np.abs(d_P).round(9), return_counts=True)
    return len(d_P) <= MAX_ENUMERATED and float(np.log2(num_X + 1).sum()) <= math.log2(MAX_SUMS)


def _all_sums(d_P: Floats) -> tuple[Floats, Floats, Ints]:
    """Returns [N] each sum Σ s_p·|d_p|, its probability under random signs, and its number of pluses.

    Among k prompts with the same |d_p| only the number of pluses matters, so each such group has k + 1 cases."""
    sum_N, chance_N, num_plus_N = np.zeros(1), np.ones(1), np.zeros(1, dtype=np.int64)
    for size, num in zip(*np.unique(np.abs(d_P).round(9), return_counts=True), strict=True):
        pluses = np.arange(num + 1)
        sum_N = np.add.outer(sum_N, size * (2 * pluses - num)).ravel()
        chance_N = np.multiply.outer(chance_N, scipy.stats.binom.pmf(pluses, num, 0.5)).ravel()
        num_plus_N = np.add.outer(num_plus_N, pluses).ravel()
    return sum_N, chance_N, num_plus_N
