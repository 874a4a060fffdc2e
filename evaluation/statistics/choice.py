"""Log-linear models of a choice among outcomes: maximum likelihood, with a sandwich covariance over clusters.

    P(outcome o of question v) = exp(F_vo·β) / Σ_o' exp(F_vo'·β)

Bradley-Terry and logistic regression differ only in the features F. Weights y may be fractions (a preference
of 0.7 is 0.7 of a win). The fit is then a quasi-likelihood: its mean is right, and the sandwich gives its variance.

Shape letters: C clusters (prompts), V questions, O outcomes, K coefficients.
"""

import math

import numpy as np

from preferences.statistics.estimates import Floats

NO_SPREAD = 1e-12  # a smaller variance is only rounding error
_MAX_STEPS = 200
_MAX_CHANGE = 2.0  # per step, in log-odds; Newton's method overshoots far from the maximum
_TOLERANCE = 1e-10


def fit(y_VO: Floats, F_VOK: Floats, bound: float = math.inf) -> Floats:
    """Returns the coefficients [K] that maximise Σ_v Σ_o y_vo·log P_vo, by Newton's method.

    Raises: ValueError if it does not converge: the maximum is infinite, or coefficients cannot be told apart. A
    coefficient beyond ±`bound` counts as an infinite one, without further steps.
    """
    beta_K, n_V = np.zeros(F_VOK.shape[2]), y_VO.sum(axis=1)
    for _ in range(_MAX_STEPS):
        p_VO = probabilities(beta_K, F_VOK)
        slope_K = np.einsum("vo,vok->k", y_VO - n_V[:, None] * p_VO, F_VOK, optimize=True)
        information_KK = np.einsum("v,vkl->kl", n_V, covariances(p_VO, F_VOK), optimize=True)
        try:
            step_K = np.linalg.solve(information_KK, slope_K)
        except np.linalg.LinAlgError:
            break
        largest = float(np.abs(step_K).max(initial=0.0))
        beta_K += step_K * min(1.0, _MAX_CHANGE / max(largest, _TOLERANCE))
        if np.abs(beta_K).max(initial=0.0) > bound:
            break
        if largest < _TOLERANCE:
            return beta_K
    raise ValueError("the fit has no finite maximum, or its coefficients cannot be told apart")


def probabilities(beta_K: Floats, F_VOK: Floats) -> Floats:
    """Returns the probability of each outcome [V, O]."""
    eta_VO = F_VOK @ beta_K
    odds_VO = np.exp(eta_VO - eta_VO.max(axis=1, keepdims=True))
    return np.asarray(odds_VO / odds_VO.sum(axis=1, keepdims=True))


def covariances(p_VO: Floats, F_VOK: Floats) -> Floats:
    """Returns the features' covariance under each question's probabilities [V, K, K]: the information per verdict."""
    mean_VK = np.einsum("vo,vok->vk", p_VO, F_VOK)
    squares_VKK = np.einsum("vo,vok,vol->vkl", p_VO, F_VOK, F_VOK)
    return np.asarray(squares_VKK - mean_VK[:, :, None] * mean_VK[:, None, :])


def sandwich(slope_CK: Floats, information_CKK: Floats, bread_KK: Floats) -> Floats:
    """Returns the clustered covariance of the coefficients [K, K]: CR3, close to leaving out one cluster at a time.

        (C-1)/C · A⁻¹ (Σ_c u_c u_cᵀ) A⁻¹,   u_c = (1 - A_c·A⁻¹)⁻¹ g_c

    g_c is the gradient of a cluster's log-likelihood at the fit, A_c its information, and A (`bread_KK`) the
    information of all clusters. The fit pulls g_c towards 0, so using g_c itself makes intervals too narrow with few
    prompts (Bell & McCaffrey 2002; Pustejovsky & Tipton 2018). (1 - A_c·A⁻¹)⁻¹ is a pseudo-inverse, because a single
    cluster may determine a coefficient.
    """
    inverse_KK = np.linalg.inv(bread_KK)
    left_CKK = np.linalg.pinv(np.eye(len(bread_KK)) - information_CKK @ inverse_KK)
    u_CK = np.einsum("ckl,cl->ck", left_CKK, slope_CK) @ inverse_KK
    return np.asarray((len(u_CK) - 1) / len(u_CK) * u_CK.T @ u_CK)
