"""Win rates of two policies, plain and at equal length, from verdicts grouped by prompt and labeler.

`won_V` below is policy a's. Every prompt weighs the same, whatever the number of its verdicts: x_p is the mean of a
prompt's preferences, and the win rate is the mean of x_p. If the display order is known, both orders weigh the same
(`verdict_weights`). At equal length, it is how much of a difference would remain
if both policies wrote equally long responses. All errors are over clusters of prompts; without clusters, every prompt
is its own.

Shape letters: V verdicts, P prompts (of this pair), C clusters of these prompts, L labelers, O outcomes (a preferred, b
preferred), K coefficients (θ, φ; in a joint fit those of every model).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy

from evaluation.statistics import choice
from evaluation.statistics.results import Counts, LengthControlled, WinRate
from evaluation.statistics.significance import ALPHA, EqualityTest
from evaluation.verdicts import Comparisons
from preferences.statistics.estimates import LEVEL, UNKNOWN, Floats, Interval, Ints

MIN_PROMPTS = 5  # of a fit at equal length: enough for two coefficients and their variances
LEAST_OVERLAP = 0.15  # the share of prompts on which either response is the longer one
TOO_FEW = f"; {LEAST_OVERLAP:.0%} were expected, since a win rate at equal length would be extrapolated"

_MAX_LOG_ODDS = 12.0  # a fit beyond this counts as having no finite maximum
_MAX_STEPS, _MAX_CHANGE, _TOLERANCE = 100, 2.0, 1e-8  # of Newton's method in a joint fit
DIFFICULTY_VARIANCE = 2.0  # of prompts in a joint fit, in log-odds²
EFFECT_VARIANCE = 0.25  # of the effects of length around their mean; those that AlpacaEval publishes have 0.11
_FLAT = 0.01  # precision of the other priors, which only keep estimates finite


def pair_win_rate(pair: Comparisons, test: EqualityTest, *, alpha: float = ALPHA) -> WinRate:
    """Returns the win rate of a over b, from `Comparisons.between(a, b)` and its `pair_test`.

    The intervals have the level 1 - α.
    """
    x_P = test.x_P
    low, high = test.interval(alpha)
    _, labeler_V = np.unique(pair.labeler_V, return_inverse=True)
    num_labelers = int(labeler_V.max()) + 1
    return WinRate(
        mean=test.mean,
        low=low,
        high=high,
        over_labelers=interval_over_labelers(pair, test, alpha=alpha) if num_labelers > 1 else UNKNOWN,
        num_prompts=len(x_P),
        num_clusters=test.num_clusters,
        num_verdicts=len(pair),
        num_labelers=num_labelers,
    )


def verdict_weights(comparisons: Comparisons) -> Floats:
    """Returns the weight [V] of each verdict in the results on its two policies; a pair's add up to its number of
    prompts.

        1/n              for n verdicts on the prompt, if their order is unknown (such as of two equal texts) or the
                         same for all verdicts on the pair
        P/(2·P_o) / n    otherwise, for n verdicts on the prompt in order o, which P_o of the P prompts with a known
                         order were shown in

    So the win rate is the mean of both orders' win rates, in which a preference for a position cancels, however often
    each order was shown.
    """
    turned_V = comparisons.a_V > comparisons.b_V
    low_V, high_V = np.minimum(comparisons.a_V, comparisons.b_V), np.maximum(comparisons.a_V, comparisons.b_V)
    _, pair_V = np.unique(low_V * len(comparisons.policies) + high_V, return_inverse=True)
    first_V = np.where(turned_V, -comparisons.first_V, comparisons.first_V)
    has_first, has_second = (np.bincount(pair_V, first_V == side) > 0 for side in (1, -1))
    by_order_V = (has_first & has_second)[pair_V] & (first_V != 0)
    num_prompts = len(comparisons.prompts)
    stratum_V = 3 * pair_V + by_order_V * np.where(first_V < 0, 2, 1)
    cells, cell_V, num_cell = np.unique(
        stratum_V * num_prompts + comparisons.prompt_V, return_inverse=True, return_counts=True
    )
    of_stratum = np.bincount(cells // num_prompts)
    known = np.unique((pair_V * num_prompts + comparisons.prompt_V)[by_order_V])
    of_pair = np.bincount(known // max(num_prompts, 1), minlength=len(has_first))
    of_prompts_V = np.where(by_order_V, of_pair[pair_V] / (2 * of_stratum[stratum_V]), 1.0)
    return np.asarray(of_prompts_V / num_cell[cell_V], dtype=np.float64)


def prompt_means(pair: Comparisons) -> Floats:
    """Returns the mean preference [P] of each prompt that has verdicts, in the order of `Comparisons.prompts`."""
    return _means_and_weights(pair)[0]


def pair_test(pair: Comparisons, *, seed: int) -> EqualityTest:
    """Returns the test of a pair's prompt means over their clusters."""
    x_P, weight_P = _means_and_weights(pair)
    return EqualityTest(x_P, prompt_clusters(pair), weight_P, seed=seed)


def _means_and_weights(pair: Comparisons) -> tuple[Floats, Floats]:
    """Returns the mean preference [P] of each prompt, and the sum of its verdicts' weights [P]."""
    _, place_V = np.unique(pair.prompt_V, return_inverse=True)
    weight_V = verdict_weights(pair)
    weight_P = np.bincount(place_V, weight_V).astype(np.float64)
    return np.bincount(place_V, weight_V * pair.won_V) / weight_P, weight_P


def prompt_clusters(pair: Comparisons) -> Ints:
    """Returns the cluster [P] of each prompt that has verdicts, numbered from 0 in their order."""
    _, first_P = np.unique(pair.prompt_V, return_index=True)
    return np.unique(pair.cluster_V[first_P], return_inverse=True)[1].astype(np.int64)


def counts_of(preferences: Floats) -> Counts:
    """Counts the preferences above ½, at ½ (up to rounding), and below."""
    tied = np.isclose(preferences, 0.5, rtol=0, atol=1e-9)
    wins = int((~tied & (preferences > 0.5)).sum())
    return Counts(wins, int(tied.sum()), len(preferences) - wins - int(tied.sum()))


def interval_over_labelers(pair: Comparisons, test: EqualityTest, *, alpha: float = ALPHA) -> Interval:
    """Returns the win rate with an interval for other prompts and labelers: a score interval, two-way clustered.

        v = v_C + v_L - v_CL,   v_C = C/(C-1) Σ_c e_c²,  v_L = L/(L-1) Σ_l e_l²,  v_CL = Σ_cl e_cl²

    e_cl is the part of the win rate's residual from one labeler on one cluster; e_c and e_l are its sums (Cameron,
    Gelbach & Miller 2011, Journal of Business & Economic Statistics 29(2)). The variance is inflated by v/v_C, where v
    is at least v_C. If labelers add to it, Student's quantile with min(C, L) - 1 degrees of freedom replaces z, as the
    authors advise, so a few labelers who differ give wide intervals. (Satterthwaite's formula would give too many
    degrees of freedom whenever v_L happens to be small.) The quantile is at least the test's, so this interval
    contains the one over prompts.
    """
    won_PL, num_PL = _table(pair)
    num_prompts, num_labelers = won_PL.shape
    num_P = num_PL.sum(axis=1)
    x_P = won_PL.sum(axis=1) / num_P
    mean = float(x_P.mean())
    cluster_P = prompt_clusters(pair)
    e_CL = np.zeros((test.num_clusters, num_labelers))
    np.add.at(e_CL, cluster_P, (won_PL - mean * num_PL) / num_P[:, None] / num_prompts)
    by_cluster, by_labeler = e_CL.sum(axis=1), e_CL.sum(axis=0)
    v_C = test.num_clusters / max(test.num_clusters - 1, 1) * float((by_cluster**2).sum())
    v_L = num_labelers / (num_labelers - 1) * float((by_labeler**2).sum())
    extra = max(0.0, v_L - float((e_CL**2).sum()))
    if v_C == 0 or test.num_clusters == 1 or extra == 0:  # labelers add nothing
        return Interval(test.mean, *test.interval(alpha))
    students = float(scipy.special.stdtrit(min(test.num_clusters, num_labelers) - 1, 1 - alpha / 2))
    quantile = max(students, test.quantile(alpha))
    return Interval(test.mean, *test.ends(quantile, inflation=1 + extra / v_C))


def _table(pair: Comparisons) -> tuple[Floats, Floats]:
    """Returns [P, L] the sum of each labeler's preferences on each prompt, and their number."""
    prompts, prompt_V = np.unique(pair.prompt_V, return_inverse=True)
    labelers, labeler_V = np.unique(pair.labeler_V, return_inverse=True)
    shape = (len(prompts), len(labelers))
    cell_V = prompt_V * shape[1] + labeler_V
    num = np.bincount(cell_V, minlength=shape[0] * shape[1]).astype(np.float64)
    won = np.bincount(cell_V, pair.won_V, shape[0] * shape[1]).astype(np.float64)
    return won.reshape(shape), num.reshape(shape)


def length_controlled(pair: Comparisons) -> LengthControlled:
    """Returns the win rate of a over b at equal length, from `Comparisons.between(a, b)`; all prompts weigh the same.

        logit P(a is preferred) = θ + φ·tanh(Δ/σ),   Δ = length of a's response - length of b's, σ = √(mean of Δ²)

    This follows AlpacaEval 2 (Dubois et al. 2024, arXiv 2404.04475), but uses only the verdicts on one pair of
    policies. AlpacaEval learns a difficulty per prompt from other models' verdicts, which a single pair's verdicts
    cannot identify; here, what a prompt's verdicts have in common enters the variance, which is over clusters.
    The win rate at Δ = 0, over all prompts, is 1/(1 + exp(-θ)).

    If a is longer, or shorter, on fewer than LEAST_OVERLAP of prompts, there is no such win rate: equal lengths are
    then outside of what was seen. Of 56 models with published AlpacaEval verdicts, the fit is off the published value
    by at most 1.8 points where both are longer that often, and by up to 21 points elsewhere (docs/statistics.md).

    If length separates preferred from rejected responses perfectly (or all verdicts are alike), the fit has no finite
    maximum. Then two prompts with preference ½ are added, one with a much longer and one with a much shorter response
    (Greenland & Mansournia 2015, Statistics in Medicine 34), and the variance is at least that of independent verdicts.
    """
    prompts = np.unique(pair.prompt_V)
    if len(prompts) < MIN_PROMPTS:
        return _without_fit(len(prompts), f"{len(prompts)} prompts; at least {MIN_PROMPTS} were expected")
    clusters, cluster_V = np.unique(pair.cluster_V, return_inverse=True)
    if len(clusters) < MIN_PROMPTS:
        return _without_fit(len(prompts), f"{len(clusters)} clusters; at least {MIN_PROMPTS} were expected")
    spread = math.sqrt(float((pair.longer_V**2).mean()))
    if spread == 0:
        return _without_fit(len(prompts), "no two responses differ in length")
    tanh_V = np.tanh(pair.longer_V / spread)
    if np.ptp(tanh_V) == 0:
        return _without_fit(
            len(prompts), "all differences in length are equal, so the effect of length is not identified"
        )
    weight_V = verdict_weights(pair)
    if (overlap := overlap_of(pair.longer_V, weight_V)) < LEAST_OVERLAP:
        return _without_fit(
            len(prompts), f"one policy's responses are longer on only {overlap:.0%} of prompts{TOO_FEW}"
        )
    y_VO = np.stack([pair.won_V, 1 - pair.won_V], axis=1) * weight_V[:, None]
    F_VOK = _length_features(tanh_V)
    beta_K, prior_VO, prior_F_VOK = _length_fit(y_VO, F_VOK)
    slope_VK, information_VKK = _slope_and_information(y_VO, F_VOK, beta_K)
    _, information_of_prior_VKK = _slope_and_information(prior_VO, prior_F_VOK, beta_K)
    slope_CK = np.zeros((len(clusters), 2))
    np.add.at(slope_CK, cluster_V, slope_VK)
    information_CKK = np.zeros((len(clusters), 2, 2))
    np.add.at(information_CKK, cluster_V, information_VKK)
    bread_KK = information_CKK.sum(axis=0) + information_of_prior_VKK.sum(axis=0)
    covariance_KK = choice.sandwich(slope_CK, information_CKK, bread_KK)
    shrunk = len(prior_VO) > 0
    if shrunk:
        covariance_KK = covariance_KK + np.linalg.inv(bread_KK)
    if covariance_KK[0, 0] < choice.NO_SPREAD:
        return _without_fit(len(prompts), "all prompts came out alike, so the fit's error cannot be estimated")
    half_K = scipy.special.stdtrit(len(clusters) - 1, (1 + LEVEL) / 2) * np.sqrt(np.diag(covariance_KK))
    mean, low, high = scipy.special.expit(beta_K[0] + half_K[0] * np.array([0.0, -1.0, 1.0])).tolist()
    effect, half = float(beta_K[1]), float(half_K[1])
    return LengthControlled(
        mean, low, high, Interval(effect, effect - half, effect + half), len(prompts), shrunk, reason=""
    )


def lengths_controlled(pairs: Sequence[Comparisons]) -> list[LengthControlled]:
    """Returns `length_controlled` of each pair; of several models against one baseline, from one joint fit of all.

    A pair that is too small for a fit of its own, or whose lengths overlap too little, still has no win rate at equal
    length; one whose own fit needs a prior keeps it.
    """
    alone = [length_controlled(pair) for pair in pairs]
    against = [_oriented(pair, baseline) for pair in pairs] if (baseline := _baseline(pairs)) >= 0 else []
    fitted = list(alone)
    for place, (part, pair) in enumerate(zip(joint_fit(against) if against else (), pairs, strict=False)):
        if alone[place].reason or alone[place].shrunk:
            continue
        num, freedom = len(part.error_C), len(np.unique(pair.cluster_V)) - 1
        half = float(scipy.special.stdtrit(freedom, (1 + LEVEL) / 2)) * math.sqrt((num - 1) / num)
        of_mean, of_effect = (half * math.sqrt(float((u_C**2).sum())) for u_C in (part.error_C, part.effect_error_C))
        logit, scale = scipy.special.logit(part.mean), part.mean * (1 - part.mean)
        low, high = scipy.special.expit([logit - of_mean / scale, logit + of_mean / scale]).tolist()
        effect = Interval(part.effect, part.effect - of_effect, part.effect + of_effect)
        found = replace(alone[place], mean=part.mean, low=low, high=high, length_effect=effect)
        fitted[place] = found if pair.b_V[0] == baseline else replace(found.turned, length_effect=effect)
    return fitted


def _baseline(pairs: Sequence[Comparisons]) -> int:
    """Returns the policy that is in all of several pairs; -1 if none is."""
    shared = set.intersection(*({int(pair.a_V[0]), int(pair.b_V[0])} for pair in pairs)) if len(pairs) > 1 else set()
    return min(shared, default=-1)


def _oriented(pair: Comparisons, baseline: int) -> Comparisons:
    return pair if pair.b_V[0] == baseline else pair.between(int(pair.b_V[0]), baseline)


@dataclass(frozen=True)
class JointLength:
    """A model's win rate at equal length and effect of length in a joint fit, with each cluster's part of their errors
    [C], over the clusters of all models in the order of their numbers.
    """

    mean: float
    effect: float
    error_C: Floats
    effect_error_C: Floats


def joint_fit(models: Sequence[Comparisons]) -> list[JointLength]:
    """Fits all models' verdicts against one baseline, which is `b`, at once, with a difficulty per prompt.

        logit P(m is preferred on prompt p) = θ_m + φ_m·tanh(Δ/σ_m) + γ_p,   γ_p ~ N(0, 2),   φ_m ~ N(their mean, ¼)

    The win rate at equal length is the mean of 1/(1 + exp(-θ_m - γ_p)) over the model's prompts. As in AlpacaEval 2
    (arXiv 2404.04475, section 3.3), difficulty is what the models' verdicts on a prompt have in common. It fits γ first
    and then a factor ψ_m for it; here ψ_m is 1, and φ_m is drawn to the mean, where AlpacaEval adds verdicts on
    baselines that were asked to be brief or verbose. Errors are over clusters, with γ profiled out:

        s_p = Σ_v F_v·r_v,   A_p = Σ_v w_v·F_v·F_vᵀ - c_p·c_pᵀ/d_p,   dγ_p/dβ = -c_p/d_p
        c_p = Σ_v w_v·F_v,   d_p = Σ_v w_v + ½,   r_v and w_v residual and variance of a verdict
    """
    F_VK, columns = _joint_features(models), range(0, 2 * len(models), 2)
    won_V, weight_V = np.concatenate([[model.won_V, verdict_weights(model)] for model in models], axis=1)
    prompts, prompt_V = np.unique(np.concatenate([model.prompt_V for model in models]), return_inverse=True)
    clusters, cluster_V = np.unique(np.concatenate([model.cluster_V for model in models]), return_inverse=True)
    cluster_P = cluster_V[np.unique(prompt_V, return_index=True)[1]]
    beta_K, gamma_P, (bread_KK, c_PK, d_P), residual_V, variance_V = _joint_newton(F_VK, won_V, weight_V, prompt_V)
    of_cluster_CV, num_K = _indicators(cluster_V), F_VK.shape[1]
    information_CKK = np.zeros((len(clusters), num_K, num_K))
    for k, other in [(k + i, k + j) for k in columns for i in (0, 1) for j in (0, 1)]:
        information_CKK[:, k, other] = of_cluster_CV @ (variance_V * F_VK[:, k] * F_VK[:, other])
    np.add.at(information_CKK, cluster_P, -c_PK[:, :, None] * (c_PK / d_P[:, None])[:, None, :])
    slope_CK = of_cluster_CV @ (residual_V[:, None] * F_VK)
    u_CK = np.linalg.solve(bread_KK - information_CKK, slope_CK[:, :, None])[:, :, 0]  # CR3, as in `choice.sandwich`
    found = []
    for k, model in zip(columns, models, strict=True):
        own_P = np.isin(prompts, model.prompt_V)
        share_P = scipy.special.expit(beta_K[k] + gamma_P)[own_P]
        mean, rises_P = float(share_P.mean()), share_P * (1 - share_P) / len(share_P)
        gradient_K = -(c_PK / d_P[:, None])[own_P].T @ rises_P
        gradient_K[k] += rises_P.sum()
        error_C = u_CK @ gradient_K + np.bincount(cluster_P[own_P], (share_P - mean) / len(share_P), len(clusters))
        found.append(JointLength(mean, float(beta_K[k + 1]), error_C, u_CK[:, k + 1]))
    return found


def _joint_newton(
    F_VK: Floats, won_V: Floats, weight_V: Floats, prompt_V: Ints
) -> tuple[Floats, Floats, tuple[Floats, Floats, Floats], Floats, Floats]:
    """Returns β, γ, (A, c, d), and the verdicts' residuals and variances at the maximum of the posterior."""
    num_K, of_prompt_PV = F_VK.shape[1], _indicators(prompt_V)
    prior_KK = np.diag(np.tile([_FLAT, _FLAT + 1 / EFFECT_VARIANCE], num_K // 2))
    prior_KK[1::2, 1::2] -= 2 / (num_K * EFFECT_VARIANCE)
    beta_K, gamma_P = np.zeros(num_K), np.zeros(of_prompt_PV.shape[0])
    for _ in range(_MAX_STEPS):
        p_V = scipy.special.expit(F_VK @ beta_K + gamma_P[prompt_V])
        residual_V, variance_V = weight_V * (won_V - p_V), weight_V * p_V * (1 - p_V)
        weighted_VK, d_P = variance_V[:, None] * F_VK, of_prompt_PV @ variance_V + 1 / DIFFICULTY_VARIANCE
        c_PK = of_prompt_PV @ weighted_VK
        bread_KK = weighted_VK.T @ F_VK + prior_KK - c_PK.T @ (c_PK / d_P[:, None])
        slope_P = of_prompt_PV @ residual_V - gamma_P / DIFFICULTY_VARIANCE
        slope_K = F_VK.T @ residual_V - prior_KK @ beta_K
        step_K = np.linalg.solve(bread_KK, slope_K - c_PK.T @ (slope_P / d_P))
        step_P = (slope_P - c_PK @ step_K) / d_P
        largest = max(float(np.abs(step_K).max()), float(np.abs(step_P).max()))
        if largest < _TOLERANCE:
            break
        scale = min(1.0, _MAX_CHANGE / largest)
        beta_K, gamma_P = beta_K + scale * step_K, gamma_P + scale * step_P
    return beta_K, gamma_P, (bread_KK, c_PK, d_P), residual_V, variance_V


def _indicators(place_V: Ints) -> scipy.sparse.csr_array:
    """Returns a sparse matrix that sums the verdicts of each place."""
    return scipy.sparse.csr_array((np.ones(len(place_V)), (place_V, np.arange(len(place_V)))))


def _joint_features(models: Sequence[Comparisons]) -> Floats:
    """Returns [V, 2M]: 1 and tanh(Δ/σ) in the two columns of a verdict's model, 0 in others."""
    blocks = []
    for place, model in enumerate(models):
        spread = math.sqrt(float((model.longer_V**2).mean()))
        block_VK = np.zeros((len(model), 2 * len(models)))
        block_VK[:, 2 * place] = 1.0
        block_VK[:, 2 * place + 1] = np.tanh(model.longer_V / spread) if spread else 0.0
        blocks.append(block_VK)
    return np.concatenate(blocks)


def overlap_of(longer_V: Floats, weight_V: Floats) -> float:
    """Returns the weighted share of verdicts in which the side that is seldom longer is at least as long."""
    return float(min(weight_V[longer_V >= 0].sum(), weight_V[longer_V <= 0].sum()) / weight_V.sum())


def has_overlap(won_V: Floats, longer_V: Floats, least: float = LEAST_OVERLAP) -> bool:
    """Returns whether one verdict per prompt allows a win rate at equal length."""
    varies = len(won_V) >= MIN_PROMPTS and np.ptp(longer_V) > 0 and np.ptp(won_V) > 0
    return bool(varies and overlap_of(longer_V, np.ones_like(won_V)) >= least)


def win_rate_at_equal_length(won_V: Floats, longer_V: Floats, least: float = LEAST_OVERLAP) -> float:
    """Returns the mean of `length_controlled` for one verdict per prompt, or NaN if it is not identified.

    It leaves out the interval, which takes 20 times as long as the fit, for callers that leave out prompts in turn. If
    all verdicts are alike, the spread would be that of the prior only, so the mean is then NaN.
    """
    if not has_overlap(won_V, longer_V, least):
        return math.nan
    tanh_V = np.tanh(longer_V / math.sqrt(float((longer_V**2).mean())))
    beta_K, _, _ = _length_fit(np.stack([won_V, 1 - won_V], axis=1), _length_features(tanh_V))
    return float(scipy.special.expit(beta_K[0]))


def _length_fit(y_VO: Floats, F_VOK: Floats) -> tuple[Floats, Floats, Floats]:
    """Returns (β, the prior's outcomes and features). The prior is empty if the fit needs none."""
    try:
        return choice.fit(y_VO, F_VOK, _MAX_LOG_ODDS), y_VO[:0], F_VOK[:0]
    except ValueError:  # the maximum is infinite; only the fit can tell
        pass
    prior_VO, prior_F_VOK = np.full((2, 2), 0.5), _length_features(np.array([1.0, -1.0]))
    beta_K = choice.fit(np.concatenate([y_VO, prior_VO]), np.concatenate([F_VOK, prior_F_VOK]))
    return beta_K, prior_VO, prior_F_VOK


def _length_features(tanh_V: Floats) -> Floats:
    won_VK = np.stack([np.ones_like(tanh_V), tanh_V], axis=1)
    return np.stack([won_VK, np.zeros_like(won_VK)], axis=1)


def _slope_and_information(y_VO: Floats, F_VOK: Floats, beta_K: Floats) -> tuple[Floats, Floats]:
    """Returns each verdict's gradient [V, K] and information [V, K, K]."""
    p_VO = choice.probabilities(beta_K, F_VOK)
    n_V = y_VO.sum(axis=1)
    slope_VK = np.einsum("vo,vok->vk", y_VO - n_V[:, None] * p_VO, F_VOK)
    return slope_VK, n_V[:, None, None] * choice.covariances(p_VO, F_VOK)


def _without_fit(num_prompts: int, reason: str) -> LengthControlled:
    return LengthControlled(math.nan, math.nan, math.nan, UNKNOWN, num_prompts, False, reason)
