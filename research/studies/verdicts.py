"""The rules by which a study decides, fixed before anything is measured: contrasts of arms, claims, verdicts.

A contrast is a pure function of one seed's curves or counts, with a 95% bootstrap interval over its held-out prompts
(or texts, or tasks); both sides share the resamples. It shows how precisely the seed was measured and decides nothing.

A claim is a contrast with one number per seed. Its interval is Student's over seeds, so it includes everything that
seeds draw (data, weights, labelers, samples) and is wide for few seeds: with three, it is the mean ± 2.48 standard
deviations.

Shape letters: C clusters (texts, or tasks), K policies, P prompts, S resamples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from preferences.statistics.estimates import LEVEL, UNKNOWN, Floats, Interval
from preferences.statistics.intervals import bootstrap_ratio, clustered_mean, percentiles, resampled_sums
from research.over_optimisation.curves import Curve, expanded_level
from research.over_optimisation.fits import gold_tops

Verdict = Literal["replicates", "does not replicate", "undecided"]
Overall = Literal["replicates", "does not replicate", "undecided", "replicates in part"]
NUM_RESAMPLES = 2_000
NUM_MEAN_RESAMPLES = 10_000


@dataclass(frozen=True)
class Rule:
    """The expected value of a contrast, and the smallest effect that matters, in its unit.

    "above": expected above 0. It replicates if the interval lies above 0, and does not if the interval lies below
    `size`, where any effect is too small to matter. If both hold, it does not replicate.
    "within": expected closer to 0 than `size`. It replicates if the interval lies within ± size, and does not if the
    interval lies entirely outside.
    "below": expected below `size`. It replicates if the interval lies below, and does not if the interval lies above.
    Everything else, including an unknown interval, is undecided.
    """

    kind: Literal["above", "within", "below"]
    size: float
    unit: str

    def verdict(self, interval: Interval) -> Verdict:
        if not math.isfinite(interval.low) or not math.isfinite(interval.high):
            return "undecided"
        if self.kind == "above":
            does, does_not = interval.low > 0, interval.high < self.size
        elif self.kind == "within":
            does = -self.size < interval.low and interval.high < self.size
            does_not = interval.low >= self.size or interval.high <= -self.size
        else:
            does, does_not = interval.high < self.size, interval.low >= self.size
        if does_not:
            return "does not replicate"
        return "replicates" if does else "undecided"

    @property
    def text(self) -> str:
        if self.kind == "above":
            return f"above 0; too small to matter below {self.size:g} {self.unit}"
        bound = f"±{self.size:g}" if self.kind == "within" else f"{self.size:g}"
        return f"{self.kind} {bound} {self.unit}"


@dataclass(frozen=True)
class Contrast:
    """One seed's value for a claim, with its bootstrap interval."""

    claim: str
    rule: Rule
    value: Interval


@dataclass(frozen=True)
class Claim:
    """A claim over all seeds."""

    text: str
    rule: Rule
    by_seed: tuple[Interval, ...]
    over_seeds: Interval
    verdict: Verdict


def decide(contrasts: Sequence[Contrast]) -> Claim:
    """Combines one contrast over all seeds. A seed without a number leaves the claim undecided."""
    first = contrasts[0]
    assert all((other.claim, other.rule) == (first.claim, first.rule) for other in contrasts), "contrasts of one claim"
    values = np.array([contrast.value.mean for contrast in contrasts])
    over_seeds = clustered_mean(values, np.arange(len(values)))
    by_seed = tuple(contrast.value for contrast in contrasts)
    return Claim(first.claim, first.rule, by_seed, over_seeds, first.rule.verdict(over_seeds))


def overall(claims: Sequence[Claim]) -> Overall:
    """Returns the claims' common verdict; "in part" if some replicate and others do not or are undecided."""
    verdicts = {claim.verdict for claim in claims}
    if len(verdicts) == 1:
        return next(iter(verdicts))
    return "replicates in part" if "replicates" in verdicts else "undecided"


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
    if all(top >= furthest for top, _ in tops):
        return UNKNOWN
    means = [min(top, furthest) for top, _ in tops]
    resampled = [np.minimum(found_S, furthest) for _, found_S in tops]
    ends = percentiles(resampled[0] - resampled[1], expanded_level(len(full.start_gold_P)))
    return Interval(means[0] - means[1], *ends)


def last_difference(what: str, one: Curve, other: Curve, *, seed: int) -> Interval:
    """Returns the last policy's "kl_KP" or "gold_KP" on one curve minus that on the other, paired by prompt."""
    values_P: Floats = getattr(one, what)[-1] - getattr(other, what)[-1]
    return bootstrap_mean(values_P, seed=seed)


def furthest_rise(curve: Curve, seed: int) -> Interval:
    """Returns the proxy score of the policy with the largest KL, minus the reference's, paired by prompt."""
    return bootstrap_mean(curve.proxy_KP[int(curve.d_K.argmax())] - curve.start_proxy_P, seed=seed)


def bootstrap_mean(values_P: Floats, *, seed: int) -> Interval:
    """Returns the mean with a percentile bootstrap interval over prompts."""
    ends = bootstrap_ratio(values_P, np.ones_like(values_P), seed=seed, num_resamples=NUM_MEAN_RESAMPLES, level=LEVEL)
    return Interval(*ends)


def ratio_difference(one_C: Floats, other_C: Floats, counts_C: Floats, *, seed: int) -> Interval:
    """Returns the difference of two totals over one count, by cluster (a text's bits and bytes, a task's pairs).

    Clusters with a count of 0 are left out; if none remain, the difference is unknown.
    """
    used_C = counts_C > 0
    if not used_C.any():
        return Interval(math.nan, math.nan, math.nan)
    sums_C = (one_C - other_C)[used_C]
    return Interval(*bootstrap_ratio(sums_C, counts_C[used_C], seed=seed, num_resamples=NUM_RESAMPLES, level=LEVEL))
