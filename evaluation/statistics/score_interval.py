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

from preferences.intervals import Ints, Z
from preferences.resampling import Floats


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


def _end(excess: Callable[[float], float], limit: float, mean: float) -> float:
    """Where `excess` crosses 0 between `limit` (0 or 1) and the mean."""
    if math.isclose(mean, limit, abs_tol=1e-12):
        return limit
    nearly = abs(limit - 1e-9)
    if excess(nearly) <= 0:
        return limit
    inside = mean + (limit - mean) * 1e-9
    return float(optimize.brentq(excess, nearly, inside, xtol=1e-10)) if excess(inside) < 0 else mean
