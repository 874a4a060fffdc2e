"""The win rate at equal length: how much of a difference would remain if both policies wrote equally long responses.

    logit P(a is preferred) = θ + φ·tanh(Δ/σ),   Δ = length of a's response - length of b's, σ = √(mean of Δ²)

This follows AlpacaEval 2 (Dubois et al. 2024, arXiv 2404.04475), but uses only the verdicts on one pair of policies.
AlpacaEval learns a difficulty per prompt from other models' verdicts, which a single pair's verdicts cannot identify;
here, what a prompt's verdicts have in common enters the variance, which is clustered by prompt. The win rate at Δ = 0,
over all prompts, is 1/(1 + exp(-θ)).

Shape letters: V verdicts, O outcomes (a preferred, b preferred), K coefficients (θ, φ), C prompts.
"""

import math

import numpy as np
import scipy

from evaluation.statistics import choice
from evaluation.statistics.results import LengthControlled
from evaluation.verdicts import Comparisons
from preferences.statistics.estimates import LEVEL, UNKNOWN, Floats, Interval

MIN_PROMPTS = 5  # enough for two coefficients and their variances
_MAX_LOG_ODDS = 12.0  # a fit beyond this counts as having no finite maximum


def length_controlled(pair: Comparisons) -> LengthControlled:
    """Returns the win rate of a over b at equal length, from `Comparisons.between(a, b)`; all prompts weigh the same.

    If length separates preferred from rejected responses perfectly (or all verdicts are alike), the fit has no finite
    maximum. Then two prompts with preference ½ are added, one with a much longer and one with a much shorter response
    (Greenland & Mansournia 2015, Statistics in Medicine 34), and the variance is at least that of independent verdicts.
    """
    prompts, prompt_V = np.unique(pair.prompt_V, return_inverse=True)
    if len(prompts) < MIN_PROMPTS:
        return _unknown(len(prompts), f"{len(prompts)} prompts; at least {MIN_PROMPTS} were expected")
    spread = math.sqrt(float((pair.longer_V**2).mean()))
    if spread == 0:
        return _unknown(len(prompts), "no two responses differ in length")
    tanh_V = np.tanh(pair.longer_V / spread)
    if np.ptp(tanh_V) == 0:
        return _unknown(len(prompts), "all differences in length are equal, so the effect of length is not identified")
    weight_V = 1 / np.bincount(prompt_V)[prompt_V]
    y_VO = np.stack([pair.won_V, 1 - pair.won_V], axis=1) * weight_V[:, None]
    F_VOK = _features(tanh_V)
    beta_K, prior_VO, prior_F_VOK = _fit(y_VO, F_VOK)
    slope_VK, information_VKK = _parts(y_VO, F_VOK, beta_K)
    _, information_of_prior_VKK = _parts(prior_VO, prior_F_VOK, beta_K)
    slope_CK = np.zeros((len(prompts), 2))
    np.add.at(slope_CK, prompt_V, slope_VK)
    information_CKK = np.zeros((len(prompts), 2, 2))
    np.add.at(information_CKK, prompt_V, information_VKK)
    bread_KK = information_CKK.sum(axis=0) + information_of_prior_VKK.sum(axis=0)
    covariance_KK = choice.sandwich(slope_CK, information_CKK, bread_KK)
    shrunk = len(prior_VO) > 0
    if shrunk:
        covariance_KK = covariance_KK + np.linalg.inv(bread_KK)
    if covariance_KK[0, 0] < choice.NO_SPREAD:
        return _unknown(len(prompts), "all prompts came out alike, so the fit's error cannot be estimated")
    half_K = scipy.special.stdtrit(len(prompts) - 1, (1 + LEVEL) / 2) * np.sqrt(np.diag(covariance_KK))
    mean, low, high = scipy.special.expit(beta_K[0] + half_K[0] * np.array([0.0, -1.0, 1.0])).tolist()
    effect, half = float(beta_K[1]), float(half_K[1])
    return LengthControlled(
        mean, low, high, Interval(effect, effect - half, effect + half), len(prompts), shrunk, reason=""
    )


def _fit(y_VO: Floats, F_VOK: Floats) -> tuple[Floats, Floats, Floats]:
    """Returns (β, the prior's outcomes and features). The prior is empty if the fit needs none."""
    try:
        beta_BK = choice.fit(y_VO[None], F_VOK)
    except ValueError:
        beta_BK = np.full((1, 2), np.inf)
    if np.abs(beta_BK).max() <= _MAX_LOG_ODDS:
        return beta_BK[0], y_VO[:0], F_VOK[:0]
    prior_VO, prior_F_VOK = np.full((2, 2), 0.5), _features(np.array([1.0, -1.0]))
    beta_BK = choice.fit(np.concatenate([y_VO, prior_VO])[None], np.concatenate([F_VOK, prior_F_VOK]))
    return beta_BK[0], prior_VO, prior_F_VOK


def _features(tanh_V: Floats) -> Floats:
    won_VK = np.stack([np.ones_like(tanh_V), tanh_V], axis=1)
    return np.stack([won_VK, np.zeros_like(won_VK)], axis=1)


def _parts(y_VO: Floats, F_VOK: Floats, beta_K: Floats) -> tuple[Floats, Floats]:
    """Returns each verdict's gradient [V, K] and information [V, K, K]."""
    p_VO = choice.probabilities(beta_K[None], F_VOK)[0]
    n_V = y_VO.sum(axis=1)
    slope_VK = np.einsum("vo,vok->vk", y_VO - n_V[:, None] * p_VO, F_VOK)
    return slope_VK, n_V[:, None, None] * choice.covariances(p_VO, F_VOK)


def _unknown(num_prompts: int, reason: str) -> LengthControlled:
    return LengthControlled(math.nan, math.nan, math.nan, UNKNOWN, num_prompts, False, reason)
