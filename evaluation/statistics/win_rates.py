"""Win rates of two policies, plain and at equal length, from verdicts grouped by prompt and labeler.

`won_V` below is policy a's. Every prompt weighs the same, whatever the number of its verdicts: x_p is the mean of a
prompt's preferences, and the win rate is the mean of x_p. If the display order is known, both orders weigh the same
(`verdict_weights`). At equal length, it is how much of a difference would remain
if both policies wrote equally long responses. All errors are over clusters of prompts; without clusters, every prompt
is its own.

Shape letters: V verdicts, P prompts (of this pair), C clusters of these prompts, L labelers, O outcomes (a preferred, b
preferred), K coefficients (θ, φ).
"""

import math

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


def overlap_of(longer_V: Floats, weight_V: Floats) -> float:
    """Returns the weighted share of verdicts in which the side that is seldom longer is at least as long."""
    return float(min(weight_V[longer_V >= 0].sum(), weight_V[longer_V <= 0].sum()) / weight_V.sum())


def win_rate_at_equal_length(won_V: Floats, longer_V: Floats) -> float:
    """Returns the mean of `length_controlled` for one verdict per prompt, or NaN if it is not identified.

    It leaves out the interval, which takes 20 times as long as the fit, for callers that leave out prompts in turn. If
    all verdicts are alike, the spread would be that of the prior only, so the mean is then NaN.
    """
    if len(won_V) < MIN_PROMPTS or np.ptp(longer_V) == 0 or np.ptp(won_V) == 0:
        return math.nan
    if overlap_of(longer_V, np.ones_like(won_V)) < LEAST_OVERLAP:
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
