"""One seed's numbers behind the claims: pure functions of curves and counts.

Each returns an estimate with a 95% bootstrap interval over prompts; both sides share the resamples.
Shape letters: K policies, P prompts, S resamples.
"""

import math

import numpy as np

from evaluation.measures.curves import Curve, expanded_level
from evaluation.measures.overoptimisation import gold_tops
from evaluation.statistics.means import bootstrap_mean
from preferences.statistics.estimates import LEVEL, UNKNOWN, Floats, Interval
from preferences.statistics.intervals import bootstrap_ratio, percentiles, resampled_sums

NUM_RESAMPLES = 2_000


def rise_and_fall(curve: Curve, *, seed: int) -> tuple[Interval, Interval]:
    """Returns the gold gain at the curve's maximum, and the gold loss from there to its furthest policy.

    The maximum of noisy points is biased upwards. So one half of the prompts selects the best policy (possibly the
    reference) and the other half scores it, and vice versa; the mean of both is free of that bias.
    Raises: ValueError for fewer than two prompts.
    """
    gains_PK = _gains(curve)
    means, resampled = _halves(gains_PK, seed)
    level = expanded_level(len(gains_PK))
    (rise, fall), (rises_S, falls_S) = _crossed(*means), _crossed(*resampled)
    return (
        Interval(float(rise[0]), *percentiles(rises_S, level)),
        Interval(float(fall[0]), *percentiles(falls_S, level)),
    )


def best_difference(one: Curve, other: Curve, *, seed: int) -> Interval:
    """Returns the gold gain of one curve's best policy minus that of the other's, paired by prompt.

    As in `rise_and_fall`, one half of the prompts selects both policies and the other half scores them, and vice versa.
    Raises: ValueError for fewer than two prompts.
    """
    gains = [_gains(curve) for curve in (one, other)]
    width = gains[0].shape[1]

    def lead(halves: list[Floats]) -> Floats:
        first, second = (
            _crossed(halves[0][:, columns], halves[1][:, columns])[0] for columns in (slice(width), slice(width, None))
        )
        return first - second

    means, resampled = _halves(np.concatenate(gains, axis=1), seed)
    return Interval(float(lead(means)[0]), *percentiles(lead(resampled), expanded_level(len(gains[0]))))


def _gains(curve: Curve) -> Floats:
    """Returns [P, K]: each policy's gold above the reference's, nearest policy first, after the reference itself."""
    gains_PK = (curve.gold_KP - curve.start_gold_P).T[:, np.argsort(curve.d_K, kind="stable")]
    return np.concatenate([np.zeros((len(gains_PK), 1)), gains_PK], axis=1)


def _halves(values_PK: Floats, seed: int) -> tuple[list[Floats], list[Floats]]:
    """Returns the means [1, K] of every second prompt and of the others, and their resampled means [S, K]."""
    if len(values_PK) < 2:
        raise ValueError(f"{len(values_PK)} prompts; at least two were expected, for two halves")
    halves = (values_PK[::2], values_PK[1::2])
    means = [half.mean(axis=0)[None] for half in halves]
    resampled = [
        resampled_sums(half, seed=seed + number, num_resamples=NUM_RESAMPLES) / len(half)
        for number, half in enumerate(halves)
    ]
    return means, resampled


def _crossed(one_SK: Floats, other_SK: Floats) -> tuple[Floats, Floats]:
    """Returns rise and fall [S]: the best policy by one half, scored by the other, averaged over both directions."""
    rows = np.arange(len(one_SK))
    tops = [judging[rows, choosing.argmax(axis=1)] for choosing, judging in ((one_SK, other_SK), (other_SK, one_SK))]
    rise_S = (tops[0] + tops[1]) / 2
    return rise_S, rise_S - (one_SK[:, -1] + other_SK[:, -1]) / 2


def earlier(full: Curve, other: Curve, *, seed: int) -> Interval:
    """Returns how much earlier, in √nats, the fitted curve of `other` has its maximum than that of `full`.

    A maximum beyond the range that both reach counts as lying at its end, since nothing was measured there. Unknown if
    neither maximum lies within it. Raises: ValueError for curves that cannot be fitted.
    """
    furthest = min(float(full.d_K.max()), float(other.d_K.max()))
    tops = [gold_tops(curve, seed=seed) for curve in (full, other)]
    if all(found >= furthest for found, _ in tops):
        return UNKNOWN
    means = [min(found, furthest) for found, _ in tops]
    resampled = [np.minimum(found_S, furthest) for _, found_S in tops]
    ends = percentiles(resampled[0] - resampled[1], expanded_level(len(full.start_gold_P)))
    return Interval(means[0] - means[1], *ends)


def last_difference(what: str, one: Curve, other: Curve, *, seed: int) -> Interval:
    """Returns the last policy's "kl_KP" or "gold_KP" on one curve minus that on the other, paired by prompt."""
    values_P: Floats = getattr(one, what)[-1] - getattr(other, what)[-1]
    return bootstrap_mean(values_P, seed=seed)


def negated(found: Interval) -> Interval:
    return Interval(-found.mean, -found.high, -found.low)


def ratio_difference(one_C: Floats, other_C: Floats, counts_C: Floats, *, seed: int) -> Interval:
    """Returns the difference of two totals over one count, by cluster (a text's bits and bytes, a task's pairs).

    Clusters with a count of 0 are left out; if none remain, the difference is unknown.
    """
    used_C = counts_C > 0
    if not used_C.any():
        return Interval(math.nan, math.nan, math.nan)
    sums_C = (one_C - other_C)[used_C]
    return Interval(*bootstrap_ratio(sums_C, counts_C[used_C], seed=seed, num_resamples=NUM_RESAMPLES, level=LEVEL))
