"""Policies at growing distance from a reference: curves of scores against KL, and the lead of one curve over another.

Comparing RL with best-of-n at equal KL is not fair to either (Gao et al. 2022, arXiv 2210.10760): RL spends KL that
changes no score, and the KL of best-of-n is an upper bound, so its curve lies too far to the right.

Shape letters: K policies of a curve, P prompts, N samples of a pool, S resamples, G places on the axis.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy

from evaluation.measures.best_of_n import best_of_n_expected, best_of_n_kl
from preferences.statistics.estimates import LEVEL, UNKNOWN, Floats, Interval
from preferences.statistics.intervals import clustered_mean, percentiles, resampled_sums

NUM_PLACES = 8
NUM_RESAMPLES = 2_000

Kind = Literal["rl", "best_of_n"]


@dataclass(frozen=True)
class Curve:
    """Mean KL, gold and proxy score per policy (K) and prompt (P); higher scores are better.

    `start_gold_P` and `start_proxy_P` are the reference's own scores: a policy's gain is its score minus these, on the
    same prompts. The KL of best-of-n is its upper bound, the same for every prompt.
    """

    kind: Kind
    names: tuple[str, ...]
    kl_KP: Floats
    gold_KP: Floats
    proxy_KP: Floats
    start_gold_P: Floats
    start_proxy_P: Floats

    def __post_init__(self) -> None:
        expected = (len(self.names), len(self.start_gold_P))
        for name in ("kl_KP", "gold_KP", "proxy_KP"):
            values = getattr(self, name)
            if values.shape != expected:
                raise ValueError(f"{name} has shape {values.shape}; [policies, prompts] {expected} was expected")
            if not np.isfinite(values).all():
                policy, prompt = np.argwhere(~np.isfinite(values))[0]
                raise ValueError(
                    f"{name} of policy {self.names[policy]!r} on prompt {prompt} is {values[policy, prompt]};"
                    " a finite number was expected"
                )

    @property
    def d_K(self) -> Floats:
        """√KL; an estimate below 0 counts as 0."""
        return np.asarray(np.sqrt(np.maximum(self.kl_KP.mean(axis=1), 0.0)))


@dataclass(frozen=True)
class Point:
    """One policy of a curve; `gold` and `proxy` are gains over the reference. 95% intervals over prompts."""

    name: str
    d: float
    kl_nats: Interval
    gold: Interval
    proxy: Interval


def points(curve: Curve) -> tuple[Point, ...]:
    """Returns the plot's points, in order. The KL of best-of-n is not an estimate, so its interval has no width."""
    prompt_P = np.arange(len(curve.start_gold_P))
    rows = zip(curve.names, curve.d_K, curve.kl_KP, curve.gold_KP, curve.proxy_KP, strict=True)
    return tuple(
        Point(
            name,
            float(d),
            clustered_mean(kl_P, prompt_P),
            clustered_mean(gold_P - curve.start_gold_P, prompt_P),
            clustered_mean(proxy_P - curve.start_proxy_P, prompt_P),
        )
        for name, d, kl_P, gold_P, proxy_P in rows
    )


def best_of_n_curve(gold_PN: Floats, proxy_PN: Floats) -> Curve:
    """Returns the curve of best-of-n by the proxy, from one pool of N samples per prompt (`best_of_n_expected`).

    n is 2, 4, 8, ... up to N; the curve starts at the pool's own mean. Raises: as `best_of_n_expected` does.
    """
    N = gold_PN.shape[1]
    chosen = [2**power for power in range(1, N.bit_length())]
    gold_PK = best_of_n_expected(gold_PN, proxy_PN)[:, [n - 1 for n in chosen]]
    proxy_PK = best_of_n_expected(proxy_PN, proxy_PN)[:, [n - 1 for n in chosen]]
    kl_K = np.array([best_of_n_kl(n) for n in chosen])
    return Curve(
        kind="best_of_n",
        names=tuple(f"best of {n}" for n in chosen),
        kl_KP=np.tile(kl_K[:, None], (1, len(gold_PN))),
        gold_KP=gold_PK.T,
        proxy_KP=proxy_PK.T,
        start_gold_P=gold_PN.mean(axis=1),
        start_proxy_P=proxy_PN.mean(axis=1),
    )


def expanded_level(num_prompts: int) -> float:
    """Returns the level of the bootstrap percentiles that gives a 95% interval with this many prompts.

    Resampling P prompts underestimates the spread by √((P - 1)/P) and uses normal instead of Student quantiles; wider
    percentiles correct both (Hesterberg 2015, The American Statistician 69(4), "expanded percentile").
    """
    tail = scipy.special.ndtr(
        math.sqrt(num_prompts / (num_prompts - 1)) * scipy.special.stdtrit(num_prompts - 1, (1 - LEVEL) / 2)
    )
    return 1 - 2 * float(tail)


def mean_lead(one: Curve, other: Curve, *, seed: int) -> Interval:
    """Returns the first curve's lead in gold score over the second at equal KL, with a 95% interval over prompts.

    It is the mean over evenly spaced places of the range of √KL in which both curves have policies, and unknown if
    there is no such range. Between the policies of a curve, ordered by KL, the gold score is interpolated along √KL, in
    which it is close to straight, separately for each resample of prompts. The range from the reference to a curve's
    first policy is left out, since the curve's shape there would be a guess.

    Raises: ValueError for curves with different numbers of prompts.
    """
    P = len(one.start_gold_P)
    if len(other.start_gold_P) != P:
        raise ValueError(f"{P} and {len(other.start_gold_P)} prompts; the same prompts were expected for both curves")
    tables = [np.concatenate([curve.kl_KP, curve.gold_KP - curve.start_gold_P]).T for curve in (one, other)]
    means = [table.mean(axis=0)[None] for table in tables]
    ahead = [places[places > 0] for places in (_split(mean)[0][0] for mean in means)]
    first, last = (choose(pick(places, default=0.0) for places in ahead) for choose, pick in ((max, min), (min, max)))
    if not 0 < first <= last:
        return UNKNOWN
    places_G = np.linspace(first, last, NUM_PLACES)
    gold = [_interpolated(*_split(mean), places_G)[0] for mean in means]
    # Both curves use the same resamples of prompts, so the comparison stays paired.
    sums = resampled_sums(np.concatenate(tables, axis=1), seed=seed, num_resamples=NUM_RESAMPLES) / P
    halves = np.split(sums, [tables[0].shape[1]], axis=1)
    resampled = [_interpolated(*_split(half), places_G) for half in halves]
    leads_S = (resampled[0] - resampled[1]).mean(axis=1)
    return Interval(float((gold[0] - gold[1]).mean()), *percentiles(leads_S, expanded_level(P)))


def _split(rows: Floats) -> tuple[Floats, Floats]:
    """Splits rows into places √KL [S, K], of which those below 0 are 0, and gold scores [S, K]."""
    kl, gold = np.split(rows, 2, axis=1)
    return np.sqrt(np.maximum(kl, 0.0)), gold


def _interpolated(places_SK: Floats, gold_SK: Floats, wanted_G: Floats) -> Floats:
    """Returns [S, G]: the gold score at the wanted places, one curve per row, each starting at (0, 0)."""
    order_SK = np.argsort(places_SK, axis=1, kind="stable")
    x_SK, y_SK = (np.take_along_axis(values, order_SK, axis=1) for values in (places_SK, gold_SK))
    y_SG = np.empty((len(x_SK), len(wanted_G)))
    for row, (x, y) in enumerate(zip(x_SK, y_SK, strict=True)):
        ahead = x > 0  # policies with an estimated KL below 0 are left out
        y_SG[row] = np.interp(wanted_G, np.append(0.0, x[ahead]), np.append(0.0, y[ahead]))
    return y_SG
