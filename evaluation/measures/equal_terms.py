"""Compares RL with best-of-n on equal terms: at the same KL, and at the same proxy score.

Equal KL is not a fair comparison (Gao et al. 2022, arXiv 2210.10760): RL spends KL that changes no score, and the KL of
best-of-n is an upper bound, so its curve lies too far to the right. Gold score at equal proxy score is fair to both.
Shape letters: K policies, P prompts, S resamples, G places on the axis.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from evaluation.measures.curves import Curve, expanded_level
from preferences.statistics.estimates import UNKNOWN, Floats, Interval
from preferences.statistics.intervals import percentiles, resampled_sums

Axis = Literal["kl", "proxy"]

NUM_PLACES = 8
NUM_RESAMPLES = 2_000


@dataclass(frozen=True)
class AtEqual:
    """Both gold scores at one place of the axis, above the reference's, and RL's lead with a 95% interval over prompts.
    `place` is a KL in nats, or a proxy score above the reference's.
    """

    place: float
    rl: float
    best_of_n: float
    lead: Interval


def at_equal(axis: Axis, rl: Curve, best_of_n: Curve, *, seed: int) -> tuple[AtEqual, ...]:
    """Returns RL's lead at evenly spaced places over the range that both curves reach; empty if there is none.

    Between the policies of a curve, ordered along the axis and starting at the reference, the gold score is
    interpolated, separately for each resample of prompts. Raises: ValueError for curves with different numbers of
    prompts.
    """
    places_G, gold, leads_SG = _leads(axis, rl, best_of_n, seed)
    P = len(rl.start_gold_P)
    return tuple(
        AtEqual(
            float(place),
            float(gold[0][g]),
            float(gold[1][g]),
            Interval(float(gold[0][g] - gold[1][g]), *percentiles(leads_SG[:, g], expanded_level(P))),
        )
        for g, place in enumerate(places_G)
    )


def mean_lead(axis: Axis, one: Curve, other: Curve, *, seed: int) -> Interval:
    """Returns the first curve's mean lead over the second, of any kinds, over the places of `at_equal`.

    Unknown if they share no range. Raises: as `at_equal` does.
    """
    _, gold, leads_SG = _leads(axis, one, other, seed)
    if not leads_SG.size:
        return UNKNOWN
    ends = percentiles(leads_SG.mean(axis=1), expanded_level(len(one.start_gold_P)))
    return Interval(float((gold[0] - gold[1]).mean()), *ends)


def _leads(axis: Axis, rl: Curve, best_of_n: Curve, seed: int) -> tuple[Floats, list[Floats], Floats]:
    """Returns places [G], both gold scores there, and resampled leads [S, G]; all empty if no range is shared."""
    P = len(rl.start_gold_P)
    if len(best_of_n.start_gold_P) != P:
        raise ValueError(
            f"RL has {P} prompts and best-of-n {len(best_of_n.start_gold_P)}; the same prompts were expected for both"
        )
    curves = (rl, best_of_n)
    tables = [np.concatenate([_along(axis, curve), curve.gold_KP - curve.start_gold_P]).T for curve in curves]
    means = [table.mean(axis=0)[None] for table in tables]
    furthest = min(float(_split(mean)[0].max()) for mean in means)
    if not furthest > 0:
        return np.empty(0), [np.empty(0), np.empty(0)], np.empty((0, 0))
    places_G = furthest * np.arange(1, NUM_PLACES + 1) / NUM_PLACES
    gold = [_interpolated(*_split(mean), places_G)[0] for mean in means]
    # Both curves use the same resamples of prompts, so the comparison stays paired.
    sums = resampled_sums(np.concatenate(tables, axis=1), seed=seed, num_resamples=NUM_RESAMPLES) / P
    halves = np.split(sums, [tables[0].shape[1]], axis=1)
    resampled = [_interpolated(*_split(half), places_G) for half in halves]
    return places_G, gold, resampled[0] - resampled[1]


def _along(axis: Axis, curve: Curve) -> Floats:
    """Returns [K, P]: each policy's position on the axis, per prompt."""
    return curve.kl_KP if axis == "kl" else curve.proxy_KP - curve.start_proxy_P


def _split(rows: Floats) -> tuple[Floats, Floats]:
    """Splits rows into places [S, K] and gold scores [S, K]."""
    places, gold = np.split(rows, 2, axis=1)
    return places, gold


def _interpolated(places_SK: Floats, gold_SK: Floats, wanted_G: Floats) -> Floats:
    """Returns [S, G]: the gold score at the wanted places, one curve per row, each starting at (0, 0)."""
    order_SK = np.argsort(places_SK, axis=1, kind="stable")
    x_SK, y_SK = (np.take_along_axis(values, order_SK, axis=1) for values in (places_SK, gold_SK))
    found = np.empty((len(x_SK), len(wanted_G)))
    for row, (x, y) in enumerate(zip(x_SK, y_SK, strict=True)):
        ahead = x > 0  # policies below the reference on this axis are left out
        found[row] = np.interp(wanted_G, np.append(0.0, x[ahead]), np.append(0.0, y[ahead]))
    return found
