"""The numbers of one seed that claims rest on: pure functions of curves and counts.

Each gives an estimate with a 95% bootstrap interval over prompts, which are resampled alike for both sides.
Shape letters: K policies, P prompts, S resamples.
"""

import math

import numpy as np

from evaluation.measures.curves import Curve, expanded_level
from evaluation.measures.overoptimisation import gold_tops
from evaluation.statistics.means import bootstrap_mean
from intervals.bootstrap import bootstrap_ratio, percentiles, resampled_sums
from intervals.estimates import LEVEL, UNKNOWN, Floats, Interval

NUM_RESAMPLES = 2_000


def rise_and_fall(curve: Curve, *, seed: int) -> tuple[Interval, Interval]:
    """Gold gained where the curve is highest, and gold lost from there to its furthest policy.

    The highest of noisy points is too high. So one half of the prompts says which policy is best (the reference may
    be) and the other half what it scores, and the other way round; the mean of both is free of that bias.
    Errors: ValueError for fewer than two prompts.
    """
    gains_PK = (curve.gold_KP - curve.start_gold_P).T[:, np.argsort(curve.d_K, kind="stable")]
    gains_PK = np.concatenate([np.zeros((len(gains_PK), 1)), gains_PK], axis=1)  # the reference itself first
    if len(gains_PK) < 2:
        raise ValueError(f"{len(gains_PK)} prompts; two at least were expected, for two halves")
    halves = (gains_PK[::2], gains_PK[1::2])
    means = [half.mean(axis=0)[None] for half in halves]
    resampled = [
        resampled_sums(half, seed=seed + number, num_resamples=NUM_RESAMPLES) / len(half)
        for number, half in enumerate(halves)
    ]
    level = expanded_level(len(gains_PK))
    (rise, fall), (rises_S, falls_S) = _crossed(*means), _crossed(*resampled)
    return (
        Interval(float(rise[0]), *percentiles(rises_S, level)),
        Interval(float(fall[0]), *percentiles(falls_S, level)),
    )


def _crossed(one_SK: Floats, other_SK: Floats) -> tuple[Floats, Floats]:
    """Rise and fall [S]: the best policy by one half, scored by the other, both ways."""
    rows = np.arange(len(one_SK))
    tops = [judging[rows, choosing.argmax(axis=1)] for choosing, judging in ((one_SK, other_SK), (other_SK, one_SK))]
    rise_S = (tops[0] + tops[1]) / 2
    return rise_S, rise_S - (one_SK[:, -1] + other_SK[:, -1]) / 2


def earlier(full: Curve, other: Curve, *, seed: int) -> Interval:
    """How much sooner, in √nats, the fitted curve of `other` is highest than that of `full`.

    A top beyond the range that both reach counts as at its end, since what lies there was not seen. Unknown where
    neither has its top within it. Errors: ValueError for curves that no form can be fitted to.
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
    """What the last policy of one has above the last of the other, prompt by prompt: "kl_KP" or "gold_KP"."""
    values_P: Floats = getattr(one, what)[-1] - getattr(other, what)[-1]
    return bootstrap_mean(values_P, seed=seed)


def negated(found: Interval) -> Interval:
    return Interval(-found.mean, -found.high, -found.low)


def ratio_difference(one_C: Floats, other_C: Floats, counts_C: Floats, *, seed: int) -> Interval:
    """The difference of two totals over one count, by cluster (a text's bits and bytes, a task's pairs).

    Clusters without a count say nothing and are left out; without any the difference is unknown.
    """
    used_C = counts_C > 0
    if not used_C.any():
        return Interval(math.nan, math.nan, math.nan)
    sums_C = (one_C - other_C)[used_C]
    return Interval(*bootstrap_ratio(sums_C, counts_C[used_C], seed=seed, num_resamples=NUM_RESAMPLES, level=LEVEL))
