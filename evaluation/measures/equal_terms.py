"""RL beside best-of-n on equal terms: the same KL, and the same proxy score.

The same KL is no fair ground (Gao et al. 2022, arXiv 2210.10760): RL spends KL that moves no score, and the KL of
best-of-n is an upper bound, so its curve lies too far to the right. What a proxy score is worth in gold score is fair
to both.
Shape letters: K policies, P prompts, S resamples, G places on the axis.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from evaluation.measures.curves import Curve, expanded_level
from intervals.interval import UNKNOWN, Interval
from intervals.resampling import Floats, percentiles, resampled_sums

Axis = Literal["kl", "proxy"]

NUM_PLACES = 8
NUM_RESAMPLES = 2_000


@dataclass(frozen=True)
class AtEqual:
    """Gold score of both at one place of the axis, above the reference's, and RL's lead with a 95% interval over
    prompts. `place` is a KL in nats, or a proxy score above the reference's.
    """

    place: float
    rl: float
    best_of_n: float
    lead: Interval


def at_equal(axis: Axis, rl: Curve, best_of_n: Curve, *, seed: int) -> tuple[AtEqual, ...]:
    """RL's lead at places spread evenly over the range that both reach; empty where there is none.

    Between policies of a curve, in the order of the axis and from the reference on, the gold score is interpolated.
    Each resample of prompts is interpolated anew. Errors: ValueError for curves over different numbers of prompts.
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
    """The first curve's lead over the second, of any kinds, as the mean over the places of `at_equal`.

    Unknown where they have no range in common. Errors: as for `at_equal`.
    """
    _, gold, leads_SG = _leads(axis, one, other, seed)
    if not leads_SG.size:
        return UNKNOWN
    ends = percentiles(leads_SG.mean(axis=1), expanded_level(len(one.start_gold_P)))
    return Interval(float((gold[0] - gold[1]).mean()), *ends)


def _leads(axis: Axis, rl: Curve, best_of_n: Curve, seed: int) -> tuple[Floats, list[Floats], Floats]:
    """Places [G], the gold score of both there, and the resampled leads [S, G]; of no places where none is shared."""
    P = len(rl.start_gold_P)
    if len(best_of_n.start_gold_P) != P:
        raise ValueError(
            f"RL has {P} prompts and best-of-n {len(best_of_n.start_gold_P)}; both on the same prompts were expected"
        )
    curves = (rl, best_of_n)
    tables = [np.concatenate([_along(axis, curve), curve.gold_KP - curve.start_gold_P]).T for curve in curves]
    means = [table.mean(axis=0)[None] for table in tables]
    furthest = min(float(_split(mean)[0].max()) for mean in means)
    if not furthest > 0:
        return np.empty(0), [np.empty(0), np.empty(0)], np.empty((0, 0))
    places_G = furthest * np.arange(1, NUM_PLACES + 1) / NUM_PLACES
    gold = [_interpolated(*_split(mean), places_G)[0] for mean in means]
    # One draw of prompts for both, so that the comparison stays paired.
    sums = resampled_sums(np.concatenate(tables, axis=1), seed=seed, num_resamples=NUM_RESAMPLES) / P
    halves = np.split(sums, [tables[0].shape[1]], axis=1)
    resampled = [_interpolated(*_split(half), places_G) for half in halves]
    return places_G, gold, resampled[0] - resampled[1]


def _along(axis: Axis, curve: Curve) -> Floats:
    """[K, P]: where on the axis each policy lies, on each prompt."""
    return curve.kl_KP if axis == "kl" else curve.proxy_KP - curve.start_proxy_P


def _split(rows: Floats) -> tuple[Floats, Floats]:
    """[S, K] places and [S, K] gold scores, of rows that hold one after the other."""
    places, gold = np.split(rows, 2, axis=1)
    return places, gold


def _interpolated(places_SK: Floats, gold_SK: Floats, wanted_G: Floats) -> Floats:
    """[S, G]: the gold score at the wanted places, a curve a row, each from (0, 0) on."""
    order_SK = np.argsort(places_SK, axis=1, kind="stable")
    x_SK, y_SK = (np.take_along_axis(values, order_SK, axis=1) for values in (places_SK, gold_SK))
    found = np.empty((len(x_SK), len(wanted_G)))
    for row, (x, y) in enumerate(zip(x_SK, y_SK, strict=True)):
        ahead = x > 0  # what fell behind the reference says nothing of the way from it
        found[row] = np.interp(wanted_G, np.append(0.0, x[ahead]), np.append(0.0, y[ahead]))
    return found
