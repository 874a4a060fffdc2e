"""Policies at growing distance from a reference: the curve of scores against KL.

Shape letters: K policies of a curve, P prompts, N samples of a pool.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy

from preferences.statistics.estimates import LEVEL, Floats, Interval
from preferences.statistics.intervals import clustered_mean
from reward.best_of_n import best_of_n_expected, best_of_n_kl

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


def best_of_n_curve(gold_PN: Floats, proxy_PN: Floats, sizes: Sequence[int] = ()) -> Curve:
    """Returns the curve of best-of-n by the proxy, for every n from one pool of N samples per prompt
    (`reward.best_of_n`).

    `sizes` are the values of n, by default 2, 4, 8, ... up to N; the curve starts at the pool's own mean.
    Raises: ValueError for an n outside 2 to N, and as `best_of_n_expected` does.
    """
    N = gold_PN.shape[1]
    chosen = list(sizes) or [2**power for power in range(1, N.bit_length()) if 2**power <= N]
    for n in chosen:
        if not 2 <= n <= N:
            raise ValueError(f"best of {n} from a pool of {N} samples per prompt; 2 to {N} was expected")
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


@dataclass(frozen=True)
class BestOfN:
    """Mean scores of best-of-n by the proxy, with 95% intervals over prompts; its KL is at most `kl_bound_nats`."""

    n: int
    kl_bound_nats: float
    gold_score: Interval
    proxy_score: Interval


def best_of_n_scores(gold_PN: Floats, proxy_PN: Floats) -> tuple[BestOfN, ...]:
    """Returns the scores of best-of-n for n = 1, 2, 4, ... up to N. Raises: as `best_of_n_curve` does."""
    prompt_P = np.arange(len(gold_PN))
    curve = best_of_n_curve(gold_PN, proxy_PN)
    rows = [
        (1, 0.0, curve.start_gold_P, curve.start_proxy_P),
        *(
            (2 ** (k + 1), float(curve.kl_KP[k, 0]), curve.gold_KP[k], curve.proxy_KP[k])
            for k in range(len(curve.names))
        ),
    ]
    return tuple(
        BestOfN(n, kl, clustered_mean(gold_P, prompt_P), clustered_mean(proxy_P, prompt_P))
        for n, kl, gold_P, proxy_P in rows
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
