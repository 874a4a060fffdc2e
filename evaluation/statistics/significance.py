"""Is a difference real, and what difference could have been shown? All of it over prompts.

d_p = x_p - ½ is a prompt's mean preference for policy a less ½. The null hypothesis is that d_p is as likely as -d_p.

Shape letters: P prompts, M pairs (hypotheses), D draws.
"""

import math

import numpy as np
from scipy import optimize, stats

from evaluation.statistics.results import Power
from evaluation.statistics.win_rates import counts_of
from preferences.resampling import Floats

ALPHA = 0.05
POWER = 0.8
MAX_ENUMERATED = 20  # prompts that are no tie: 2^20 signs
NUM_PERMUTATIONS = 10_000

_Z_ALPHA, _Z_BETA = float(stats.norm.ppf(1 - ALPHA / 2)), float(stats.norm.ppf(POWER))
_DRAWS_PER_CHUNK = 1_000
_ROUNDING = 1e-9


def sign_test(x_P: Floats) -> float:
    """Two-sided p of the exact sign test: prompts won (x_p > ½) against prompts lost, ties left out; 1 without any.

    Where a judge passes or fails each policy's response, won and lost prompts are the discordant ones, and this is the
    exact form of McNemar 1947.
    """
    counts = counts_of(x_P)
    decided = counts.wins + counts.losses
    return float(stats.binomtest(counts.wins, decided).pvalue) if decided else 1.0


def sign_flip_test(x_P: Floats, *, seed: int) -> tuple[float, int]:
    """(two-sided p, number of random permutations) of the mean preference, turning the policies of each prompt around.

    p is the share of sign vectors s with |Σ s_p·d_p| >= |Σ d_p|. Up to 20 prompts that are no tie all are enumerated,
    and the number is 0; else b of m = 10,000 random ones give (b + 1)/(m + 1), never 0 (Phipson & Smyth 2010).
    """
    d_P = x_P - 0.5
    d_P = d_P[np.abs(d_P) > _ROUNDING]
    reached = abs(float(d_P.sum())) - _ROUNDING * max(1, len(d_P))
    if len(d_P) <= MAX_ENUMERATED:
        return float((np.abs(_all_sums(d_P)) >= reached).mean()), 0
    generator = np.random.default_rng(seed)
    num_reached = 0
    for _ in range(0, NUM_PERMUTATIONS, _DRAWS_PER_CHUNK):
        sign_DP = 1.0 - 2.0 * generator.integers(0, 2, size=(_DRAWS_PER_CHUNK, len(d_P)), dtype=np.int8)
        num_reached += int((np.abs(sign_DP @ d_P) >= reached).sum())
    return (num_reached + 1) / (NUM_PERMUTATIONS + 1), NUM_PERMUTATIONS


def holm(p_M: Floats) -> Floats:
    """[M] p-values corrected for all of them: the chance of any false rejection stays below the level. Holm 1979.

    The k-th smallest is multiplied by M - k + 1, at least the one before it and at most 1.
    """
    order = np.argsort(p_M, kind="stable")
    adjusted = np.minimum(1.0, np.maximum.accumulate(p_M[order] * np.arange(len(p_M), 0, -1)))
    corrected = np.empty(len(p_M))
    corrected[order] = adjusted
    return corrected


def power_of(x_P: Floats) -> Power:
    """The smallest distance of the win rate from ½ that P prompts show with 80% power, and the prompts that d̄ needs.

        P = (z_α·√m + z_β·√(m - δ²))² / δ²,   m = Σ_p d_p² / P

    m is the variance of d if there is no difference, m - δ² if there is; with one verdict a prompt 4m is the share of
    prompts that are no tie, and this is McNemar's sample size (Miettinen 1968; Connor 1987, Biometrics 43). Solved for
    δ it is a quadratic equation. Up to 20 prompts that are no tie δ is exact for `sign_flip_test`: see
    `_exact_detectable`.
    """
    d_P = x_P - 0.5
    m, observed = float((d_P**2).mean()), float(d_P.mean())
    decided_P = d_P[np.abs(d_P) > _ROUNDING]
    if len(decided_P) <= MAX_ENUMERATED:
        detectable = _exact_detectable(decided_P) * len(decided_P) / len(d_P)
    else:
        root = _Z_ALPHA * math.sqrt(len(d_P)) + _Z_BETA * math.sqrt(len(d_P) - _Z_ALPHA**2 + _Z_BETA**2)
        detectable = math.sqrt(m) * root / (len(d_P) + _Z_BETA**2)
    if abs(observed) <= _ROUNDING:
        return Power(detectable, None)
    spread = math.sqrt(max(0.0, m - observed**2))
    return Power(detectable, math.ceil(((_Z_ALPHA * math.sqrt(m) + _Z_BETA * spread) / observed) ** 2))


def _exact_detectable(d_P: Floats) -> float:
    """Mean difference at which the enumerated test has 80% power, if each prompt, as decided as it is, goes to one
    policy with probability q: (2q - 1)·mean|d|. NaN where not even q = 1 has it: five prompts or fewer cannot reach
    5%."""
    sums = np.abs(_all_sums(np.abs(d_P)))
    last = len(sums) - 1 - int(ALPHA * len(sums))
    # The largest set of extreme sums of at most 5%: ties at its edge stay out, whole.
    rejected = sums > np.partition(sums, last)[last] + _ROUNDING
    # Of the sums that reject, how many have 0, 1, ... prompts that went to the one policy.
    pluses = np.rint(_all_sums(np.ones(len(d_P))) / 2 + len(d_P) / 2).astype(np.int64)
    num_K = np.bincount(pluses[rejected], minlength=len(d_P) + 1)

    def power_beyond(q: float) -> float:
        k = np.arange(len(d_P) + 1)
        return float((num_K * q**k * (1 - q) ** (len(d_P) - k)).sum()) - POWER

    if power_beyond(1.0) < 0:
        return math.nan
    return (2 * float(optimize.brentq(power_beyond, 0.5, 1.0)) - 1) * float(np.abs(d_P).mean())


def _all_sums(d_P: Floats) -> Floats:
    """[2^P] Σ s_p·d_p for every vector of signs."""
    sums = np.zeros(1)
    for d in d_P:
        sums = np.concatenate([sums + d, sums - d])
    return sums
