"""The score interval of a mean of values between 0 and 1: Wilson's, generalised to values that are not all 0 or 1.

For each candidate mean μ, the prompts get the weights q that are most likely if μ is true,

    maximise Σ log q_i  subject to  Σ q_i·x_i = μ,  where 0 and 1 may get weight even if no prompt had them,

and μ is in the interval if n·(x̄ - μ)² <= z²·Σ q_i·(x_i - μ)². The variance is the one under μ, not the observed one.
So the interval has a width even if all prompts came out alike, and it keeps its coverage for few prompts with a mean
far from ½, where mean ± t·s does not. For values 0 and 1 it is Wilson's interval (Wilson 1927); with ties at ½ it is
Tango's for two paired proportions (Tango 1998, Statistics in Medicine 17); in general the weights are those of
empirical likelihood (Owen 2001, 2.9).

Shape letters: C clusters (prompts), X distinct values.
"""

import math
from collections.abc import Callable

import numpy as np
import scipy

from preferences.statistics.estimates import Floats, Interval, Ints, Z


def wilson(mean: Floats, num: Floats) -> tuple[Floats, Floats]:
    """Wilson's score interval for shares `mean` of `num` independent trials. `num` need not be a whole number.

    Unlike mean ± z·s it stays within 0 to 1 and has a width even if all trials came out alike. Wilson 1927; Brown, Cai
    & DasGupta 2001, Statistical Science 16(2), who recommend it for few trials.
    """
    centre = (mean + Z**2 / (2 * num)) / (1 + Z**2 / num)
    half = Z / (1 + Z**2 / num) * np.sqrt(mean * (1 - mean) / num + Z**2 / (4 * num**2))
    # The interval always contains the mean; clipping undoes rounding.
    return np.clip(centre - half, 0.0, mean), np.clip(centre + half, mean, 1.0)


def score_interval(value_C: Floats, *, quantile: float = Z, inflation: float = 1.0) -> tuple[float, float]:
    """Returns (low, high) for the mean of independent prompts' values, each from 0 to 1.

    `quantile` replaces z (Student's quantile, if the variance is poorly known; a test's critical value). `inflation`
    >= 1 multiplies the variance (labelers who differ).

    Raises: ValueError if there are no prompts.
    """
    if len(value_C) == 0:
        raise ValueError("no prompts; an interval needs at least one")
    value_X, times_X = np.unique(np.clip(value_C, 0.0, 1.0), return_counts=True)
    mean = float(np.average(value_X, weights=times_X))

    def excess(mu: float) -> float:
        variance = variance_under(mu, value_X, times_X)
        return len(value_C) * (mean - mu) ** 2 - quantile**2 * inflation * variance

    return _end(excess, 0.0, mean), _end(excess, 1.0, mean)


def decided_interval(won_C: Floats, lost_C: Floats, *, quantile: float = Z) -> tuple[float, float]:
    """Returns (low, high) for Σ won / Σ (won + lost), the share won among decided verdicts, over independent prompts.

    `won_C` and `lost_C` are shares of each prompt's verdicts; the rest are ties. ρ is in the interval if it is in the
    score interval of the mean of won + ρ·tied, which equals ρ if the share is ρ. With one verdict per prompt this is
    Wilson's interval over the prompts that are not tied; without ties it is `score_interval(won_C)`; if every verdict
    is a tie, any share may be true: (0, 1).

    Raises: ValueError if there are no prompts.
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
        return len(won_C) * (mean - share) ** 2 - quantile**2 * variance_under(share, value_X, times_X)

    return _end(excess, 0.0, won / decided), _end(excess, 1.0, won / decided)


def variance_under(mu: float, value_X: Floats, times_X: Ints) -> float:
    """Returns Σ q·(x - μ)² for the most likely weights with mean μ, 0 < μ < 1. `times_X` counts the distinct values.

    The weights are q_i = 1/(n·(1 + λ·(x_i - μ))), where λ, between -1/(1 - μ) and 1/μ, is the root of
    Σ q_i·(x_i - μ) = 0. At either end of that range, the weight missing from Σ q = 1 lies on 1 or on 0.
    """
    from_mu_X = value_X - mu

    def slope(tilt: float) -> float:
        return float((times_X * from_mu_X / (1 + tilt * from_mu_X)).sum())

    # The slope falls with λ and is finite just inside the ends of the range.
    low, high = -(1 - 1e-12) / (1 - mu), (1 - 1e-12) / mu
    if slope(low) <= 0:
        tilt = low
    elif slope(high) >= 0:
        tilt = high
    else:
        tilt = float(scipy.optimize.brentq(slope, low, high, xtol=1e-10))
    weight_X = times_X / (times_X.sum() * (1 + tilt * from_mu_X))
    missing = max(0.0, 1 - float(weight_X.sum()))
    unseen = 1.0 if tilt < 0 else 0.0
    return float((weight_X * from_mu_X**2).sum()) + missing * (unseen - mu) ** 2


def share_interval(value_C: Floats) -> Interval:
    """Returns the mean of prompts' values, each from 0 to 1, with its 95% score interval.

    Unlike a bootstrap interval it has a width even if all prompts came out alike: 0 of 6 gives 0 (0 to .39), not
    0 (0 to 0).

    Raises: ValueError if there are no prompts.
    """
    return Interval(float(value_C.mean()) if len(value_C) else math.nan, *score_interval(value_C))


def _end(excess: Callable[[float], float], limit: float, mean: float) -> float:
    """Returns where `excess` crosses 0 between `limit` (0 or 1) and the mean."""
    if math.isclose(mean, limit, abs_tol=1e-12):
        return limit
    nearly = abs(limit - 1e-9)
    if excess(nearly) <= 0:
        return limit
    inside = mean + (limit - mean) * 1e-9
    return float(scipy.optimize.brentq(excess, nearly, inside, xtol=1e-10)) if excess(inside) < 0 else mean
