"""The score interval of a mean of prompts' values between 0 and 1: Wilson's, for values that are not all 0 or 1.

For each mean μ that might be true, the prompts are given the weights q that are most likely if it is,

    maximise Σ log q_i  subject to  Σ q_i·x_i = μ,  where 0 and 1 may get weight though no prompt had them,

and μ is in the interval where n·(x̄ - μ)² <= z²·Σ q_i·(x_i - μ)². The variance is that under μ, not that which was
seen; so there is width where all prompts came out alike, and few prompts far from ½ are covered, where mean ± t·s is
not. With values 0 and 1 this is Wilson's interval (Wilson 1927), with ties at ½ Tango's of two paired proportions
(Tango 1998, Statistics in Medicine 17); in general the weights are those of empirical likelihood (Owen 2001, 2.9).

Shape letters: C clusters (prompts), X distinct values.
"""

import math
from collections.abc import Callable

import numpy as np
from scipy import optimize

from intervals.interval import Interval, Ints, Z
from intervals.resampling import Floats


def score_interval(value_C: Floats, *, quantile: float = Z, inflation: float = 1.0) -> tuple[float, float]:
    """(low, high) of the mean of independent prompts' values, each from 0 to 1.

    `quantile` takes z's place (Student's, where the variance is known badly); `inflation` >= 1 multiplies the variance
    (labelers who differ). Errors: ValueError for no prompts.
    """
    if len(value_C) == 0:
        raise ValueError("no prompts; an interval needs at least one")
    value_X, times_X = np.unique(np.clip(value_C, 0.0, 1.0), return_counts=True)
    mean = float(np.average(value_X, weights=times_X))

    def excess(mu: float) -> float:
        variance = variance_under(mu, value_X, times_X)
        return len(value_C) * (mean - mu) ** 2 - quantile**2 * inflation * variance

    return _end(excess, 0.0, mean), _end(excess, 1.0, mean)


def decided_interval(won_C: Floats, lost_C: Floats) -> tuple[float, float]:
    """(low, high) of Σ won / Σ (won + lost), the share won of what was decided, over independent prompts.

    `won_C` and `lost_C` are shares of a prompt's verdicts, the rest of them ties. ρ is in the interval where it is in
    the score interval of the mean of won + ρ·tied, which is ρ if the share is ρ. With one verdict a prompt this is
    Wilson's interval of the prompts that are no tie; without ties it is `score_interval(won_C)`; where all are ties
    any share may be true, (0, 1). Errors: ValueError for no prompts.
    """
    if len(won_C) == 0:
        raise ValueError("no prompts; an interval needs at least one")
    rows_XO, times_X = np.unique(np.stack([won_C, lost_C], axis=1), axis=0, return_counts=True)
    won_X, tied_X = rows_XO[:, 0], 1 - rows_XO.sum(axis=1)
    won, decided = float(times_X @ won_X), float(times_X @ rows_XO.sum(axis=1))
    if decided < 1e-9:
        return 0.0, 1.0

    def excess(share: float) -> float:
        value_X = np.clip(won_X + share * tied_X, 0.0, 1.0)
        mean = float(np.average(value_X, weights=times_X))
        return len(won_C) * (mean - share) ** 2 - Z**2 * variance_under(share, value_X, times_X)

    return _end(excess, 0.0, won / decided), _end(excess, 1.0, won / decided)


def variance_under(mu: float, value_X: Floats, times_X: Ints) -> float:
    """Σ q·(x - μ)² for the most likely weights with mean μ, 0 < μ < 1; `times_X` counts the distinct values.

    The weights are q_i = 1/(n·(1 + λ·(x_i - μ))), λ between -1/(1 - μ) and 1/μ the root of Σ q_i·(x_i - μ) = 0; at
    either end of that range, what is missing to Σ q = 1 lies on 1 or on 0.
    """
    from_mu_X = value_X - mu

    def slope(tilt: float) -> float:
        return float((times_X * from_mu_X / (1 + tilt * from_mu_X)).sum())

    # The slope falls with λ; just inside the range's ends it is finite.
    low, high = -(1 - 1e-12) / (1 - mu), (1 - 1e-12) / mu
    if slope(low) <= 0:
        tilt = low
    elif slope(high) >= 0:
        tilt = high
    else:
        tilt = float(optimize.brentq(slope, low, high, xtol=1e-10))
    weight_X = times_X / (times_X.sum() * (1 + tilt * from_mu_X))
    missing = max(0.0, 1 - float(weight_X.sum()))
    unseen = 1.0 if tilt < 0 else 0.0
    return float((weight_X * from_mu_X**2).sum()) + missing * (unseen - mu) ** 2


def share_interval(value_C: Floats) -> Interval:
    """The mean of prompts' values, each from 0 to 1, with its 95% score interval. Raises: ValueError for no prompts.

    Unlike a bootstrap's it has a width where all prompts came out alike: 0 of 6 is 0 (0 to .39), not 0 (0 to 0).
    """
    return Interval(float(value_C.mean()) if len(value_C) else math.nan, *score_interval(value_C))


def _end(excess: Callable[[float], float], limit: float, mean: float) -> float:
    """Where `excess` crosses 0 between `limit` (0 or 1) and the mean."""
    if math.isclose(mean, limit, abs_tol=1e-12):
        return limit
    nearly = abs(limit - 1e-9)
    if excess(nearly) <= 0:
        return limit
    inside = mean + (limit - mean) * 1e-9
    return float(optimize.brentq(excess, nearly, inside, xtol=1e-10)) if excess(inside) < 0 else mean
