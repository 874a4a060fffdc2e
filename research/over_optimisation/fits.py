"""Over-optimisation: gold score against distance, in the functional forms of Gao et al. 2022 (arXiv 2210.10760).

With d = √KL(π || π_ref) and R the gold score minus the reference's:

    best-of-n  R(d) = d (α - β d)       highest at d = α / 2β
    RL         R(d) = d (α - β log d)   highest at d = e^(α/β - 1)

Both are linear in α and β, so they are fitted by weighted least squares; there is no optimum unless β > 0.
Shape letters: K policies, P prompts, S resamples.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from preferences.statistics.estimates import Floats, Interval
from preferences.statistics.intervals import percentiles, resampled_sums
from research.over_optimisation.curves import Curve, Kind, expanded_level

NUM_RESAMPLES = 4_000
MIN_POLICIES = 3  # at distinct distances: two points fit some α and β exactly
BAD_MISFIT = 4.0  # standard errors
ROUNDING = 1e-9  # relative to the largest gain: noise below that is rounding


@dataclass(frozen=True)
class Fit:
    """α and β with 95% bootstrap intervals over prompts; each resample is fitted separately.

    `misfit` is the largest distance of a point from the curve in its own standard errors, including noise in the KL;
    above about 4 the form does not describe the data.
    """

    alpha: Interval
    beta: Interval
    misfit: float


@dataclass(frozen=True)
class Optimum:
    """The maximum of the fitted curve. A number without a finite value or upper end is NaN.

    `gain` is the gold score there, above the reference's. `share_without` is the share of resamples without an optimum.
    `largest_d` is the distance of the furthest policy measured; beyond it the curve is extrapolated.
    """

    d: Interval
    kl_nats: Interval
    gain: Interval
    share_without: float
    largest_d: float


@dataclass(frozen=True)
class Overoptimised:
    """The gold score's fit, its optimum, the proxy score's fit, and advice in words on where to stop."""

    gold: Fit
    proxy: Fit
    optimum: Optimum
    advice: str


def fit_curve(curve: Curve, *, seed: int) -> Overoptimised:
    """Raises: ValueError for fewer than three policies at distinct distances above 0, or fewer than two prompts."""
    used_K = _fittable(curve)
    kl_KP = curve.kl_KP[used_K]
    gold, alphas_S, betas_S = _fit(curve.kind, kl_KP, curve.gold_KP[used_K] - curve.start_gold_P, seed)
    proxy, _, _ = _fit(curve.kind, kl_KP, curve.proxy_KP[used_K] - curve.start_proxy_P, seed)
    optimum = _optimum(curve.kind, gold, alphas_S, betas_S, float(curve.d_K.max()), len(curve.start_gold_P))
    return Overoptimised(gold, proxy, optimum, advice(curve, gold, optimum))


def gold_tops(curve: Curve, *, seed: int) -> tuple[float, Floats]:
    """Returns the d of the fitted gold curve's maximum, and those of its resamples; infinite where there is none.

    Curves over the same prompts with the same seed share resamples, so their maxima compare in pairs.
    Raises: as `fit_curve` does.
    """
    used_K = _fittable(curve)
    fit, alphas_S, betas_S = _fit(curve.kind, curve.kl_KP[used_K], curve.gold_KP[used_K] - curve.start_gold_P, seed)
    tops = top(curve.kind, np.array([fit.alpha.mean]), np.array([fit.beta.mean]))
    return float(tops[0]), top(curve.kind, alphas_S, betas_S)


def _fittable(curve: Curve) -> npt.NDArray[np.bool_]:
    """Returns [K]: which policies a fit can use. Raises: ValueError for too few."""
    used_K = curve.d_K > 0
    num_distances = len(np.unique(curve.d_K[used_K]))
    if num_distances < MIN_POLICIES or len(curve.start_gold_P) < 2:
        raise ValueError(
            f"{num_distances} distances above 0 and {len(curve.start_gold_P)} prompts; a fit needs at least"
            f" {MIN_POLICIES} and 2"
        )
    return used_K


def gain_at(kind: Kind, alpha: float, beta: float, d: Floats) -> Floats:
    """Returns R(d)."""
    return np.asarray(alpha * d - beta * _second(kind, d))


def _second(kind: Kind, d: Floats) -> Floats:
    """Returns the coefficient of -β: d² or d log d, which is 0 at 0."""
    return d**2 if kind == "best_of_n" else d * np.log(np.where(d > 0, d, 1.0))


def _slope(kind: Kind, alpha: float, beta: float, d: Floats) -> Floats:
    """Returns dR/dd."""
    return np.asarray(alpha - beta * (2 * d if kind == "best_of_n" else np.log(d) + 1))


def _fit(kind: Kind, kl_KP: Floats, gain_KP: Floats, seed: int) -> tuple[Fit, Floats, Floats]:
    """Returns the fit, and α and β per resample [S]. Weights are inverse variances, the same in all resamples."""
    K, P = gain_KP.shape
    variance_K = gain_KP.var(axis=1, ddof=1) / P
    d_K, gain_K = np.sqrt(kl_KP.mean(axis=1)), gain_KP.mean(axis=1)
    # A point without noise may weigh a million times as much as the noisiest one, but no more.
    least = max(1e-6 * float(variance_K.max()), (ROUNDING * float(np.abs(gain_K).max())) ** 2)
    weights_K = 1 / np.maximum(variance_K, least) if least > 0 else np.ones(K)
    alpha, beta = (float(solution[0]) for solution in _solve(kind, d_K[None], gain_K[None], weights_K))
    noise_K = _standard_errors(kind, alpha, beta, kl_KP, gain_KP)
    residual_K = gain_K - gain_at(kind, alpha, beta, d_K)
    noisy_K = noise_K > ROUNDING * np.abs(gain_K).max()
    off_K = np.abs(residual_K[noisy_K]) / noise_K[noisy_K]
    sums_S = resampled_sums(np.concatenate([kl_KP, gain_KP]).T, seed=seed, num_resamples=NUM_RESAMPLES) / P
    resampled_d = np.sqrt(np.maximum(sums_S[:, :K], 0.0))
    alphas_S, betas_S = _solve(kind, resampled_d, sums_S[:, K:], weights_K)
    fit = Fit(
        alpha=Interval(alpha, *percentiles(alphas_S, expanded_level(P))),
        beta=Interval(beta, *percentiles(betas_S, expanded_level(P))),
        misfit=float(off_K.max(initial=0.0)),
    )
    return fit, alphas_S, betas_S


def _solve(kind: Kind, d_SK: Floats, gain_SK: Floats, weights_K: Floats) -> tuple[Floats, Floats]:
    """Solves weighted least squares for α and β [S]: gain = α x - β z with x = d and z = d² or d log d."""
    x_SK, z_SK = d_SK, -_second(kind, d_SK)
    xx, xz, zz = ((weights_K * a * b).sum(axis=1) for a, b in ((x_SK, x_SK), (x_SK, z_SK), (z_SK, z_SK)))
    xy, zy = ((weights_K * a * gain_SK).sum(axis=1) for a in (x_SK, z_SK))
    determinant = xx * zz - xz**2
    return (zz * xy - xz * zy) / determinant, (xx * zy - xz * xy) / determinant


def _standard_errors(kind: Kind, alpha: float, beta: float, kl_KP: Floats, gain_KP: Floats) -> Floats:
    """Returns each point's standard error about the curve [K], by the delta method.

    Prompt p adds e = (gain - mean gain) - R'(d) (KL - mean KL) / 2d to a point's distance from the curve.
    """
    P = gain_KP.shape[1]
    kl_K, d_K = kl_KP.mean(axis=1), np.sqrt(kl_KP.mean(axis=1))
    by_kl_K = _slope(kind, alpha, beta, d_K) / (2 * d_K)
    e_KP = gain_KP - gain_KP.mean(axis=1, keepdims=True) - by_kl_K[:, None] * (kl_KP - kl_K[:, None])
    return np.asarray(np.sqrt((e_KP**2).sum(axis=1) / (P * (P - 1))))


def top(kind: Kind, alpha: Floats, beta: Floats) -> Floats:
    """Returns the d of the curve's maximum; infinite unless β > 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        d = np.maximum(alpha / (2 * beta), 0.0) if kind == "best_of_n" else np.exp(alpha / beta - 1)
    return np.where(beta > 0, d, np.inf)


def _optimum(kind: Kind, fit: Fit, alphas_S: Floats, betas_S: Floats, largest_d: float, num_prompts: int) -> Optimum:
    alpha, beta = np.array([fit.alpha.mean]), np.array([fit.beta.mean])
    d, d_S = top(kind, alpha, beta), top(kind, alphas_S, betas_S)
    level = expanded_level(num_prompts)
    return Optimum(
        d=_open_interval(d, d_S, level),
        kl_nats=_open_interval(d**2, d_S**2, level),
        gain=_open_interval(_height(kind, beta, d), _height(kind, betas_S, d_S), level),
        share_without=float(np.isinf(d_S).mean()),
        largest_d=largest_d,
    )


def _height(kind: Kind, beta: Floats, d: Floats) -> Floats:
    """Returns R at the maximum: β d² for best-of-n, β d for RL; infinite if there is none."""
    with np.errstate(invalid="ignore", over="ignore"):
        height = beta * d**2 if kind == "best_of_n" else beta * d
    return np.where(np.isinf(d), np.inf, height)


def _open_interval(value: Floats, values_S: Floats, level: float) -> Interval:
    """Takes percentiles without interpolation, since some values may be infinite; those become NaN."""
    low, high = np.quantile(values_S, [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf")
    mean, low, high = (float(end) if np.isfinite(end) else math.nan for end in (value[0], low, high))
    return Interval(mean, low, high)


def advice(curve: Curve, fit: Fit, optimum: Optimum) -> str:
    """Says where to stop, in words; anything beyond the furthest policy is marked as extrapolation."""
    d, largest = optimum.d, optimum.largest_d
    furthest = f"the furthest policy measured (d = {largest:.2f}, KL = {largest**2:.2f} nats)"
    rises = float(_slope(curve.kind, fit.alpha.mean, fit.beta.mean, np.array(largest))) > 0
    if d.mean == 0 or (math.isnan(d.mean) and not rises):
        text = "The gold score does not rise along these policies: keep the reference, or improve the proxy."
    elif math.isnan(d.mean) or d.mean > largest:
        where = (
            "has no optimum" if math.isnan(d.mean) else f"has its optimum at d = {d.mean:.2f}, which is extrapolation"
        )
        text = f"No over-optimisation seen: the fitted curve still rises at {furthest} and {where}."
        if d.low <= largest:
            text += f" The optimum may lie before that, though, from d = {d.low:.2f}: measure again with more prompts."
        else:
            shorter = "to take a smaller n" if curve.kind == "best_of_n" else "to stop training earlier"
            text += f" These data give no reason {shorter}, nor to continue beyond what was measured."
    elif math.isnan(d.high) or d.high > largest:
        text = (
            f"The fitted optimum is at d = {d.mean:.2f} (KL = {d.mean**2:.2f} nats), but its interval, from"
            f" {d.low:.2f}, reaches beyond {furthest}: a fall is likely, but not shown. Stop no earlier than"
            f" d = {d.low:.2f}; measure again with more prompts or with policies further away."
        )
    else:
        nearest = curve.names[int(np.argmin(np.abs(curve.d_K - d.mean)))]
        text = (
            f"Stop at d = {d.mean:.2f} ({d.low:.2f} to {d.high:.2f}), a KL of {d.mean**2:.2f} nats; {nearest} is"
            f" nearest. Beyond it the gold score falls, whatever the proxy score does."
        )
    if fit.misfit > BAD_MISFIT:
        text += (
            f" The functional form does not describe these data (a point lies {fit.misfit:.1f} standard errors off the"
            " curve), so trust the points rather than the fit."
        )
    return text
