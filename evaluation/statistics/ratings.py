"""Ratings of any number of policies: Bradley-Terry, with a tie as half a win.

    P(i beats j) = π_i / (π_i + π_j)

Ratings are θ = log π. Bradley & Terry 1952, Biometrika 39. As for win rates, all prompts of a pair weigh the same,
whatever the number of their verdicts: for two policies, the rating is the logit of the win rate. All errors are over
clusters of prompts; without clusters, every prompt is its own.

Shape letters: V pairs of policies that were compared, O outcomes (win, loss), P policies, N prompts, C clusters, K
coefficients (θ of all policies but the first).
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import scipy

from evaluation.statistics import choice
from evaluation.statistics.results import Rating, Ratings
from evaluation.statistics.significance import EqualityTest
from evaluation.statistics.win_rates import verdict_weights
from evaluation.verdicts import Comparisons
from preferences.statistics.estimates import LEVEL, Floats, Ints

ALL_TIED = "every verdict is a tie; ties alone say nothing about strengths, except that no policy is shown to be ahead"

Truths = npt.NDArray[np.bool_]


def rate(comparisons: Comparisons, *, anchor: str, seed: int) -> Ratings:
    """Returns ratings of all policies in `comparisons`, as differences from `anchor`, or from their mean if it is "".

    If no chain of verdicts connects two policies, there are no ratings, and `islands` names the groups. If policies are
    connected but some never lost to the others (or never won), the maximum is infinite. Then each compared pair gets
    one more prompt, shared equally between the outcomes (½ win, ½ loss); the unbounded ends of intervals are infinite;
    and variances are at least those of independent verdicts, because residuals close to 0 say little. If every verdict
    is a tie, there are no ratings either, and `reason` says so.

    For two policies, the interval is that of the win rate, in log-odds. An interval
    around the rating itself would be too wide: a logit's error grows without bound as the share approaches 1, so if
    the share is too high by chance, the interval hardly ever misses the truth. For more policies, intervals come
    from the sandwich.

    Raises: ValueError for an unknown anchor, and if there are no verdicts.
    """
    names = comparisons.policies
    if anchor and anchor not in names:
        raise ValueError(f"anchor is {anchor!r}; one of {', '.join(names)} was expected")
    if len(comparisons) == 0:
        raise ValueError("no verdicts; ratings need at least one")
    islands = islands_of(len(names), comparisons.a_V, comparisons.b_V)
    if len(islands) > 1:
        named = tuple(tuple(names[place] for place in island) for island in islands)
        groups = "; ".join(", ".join(island) for island in named)
        return Ratings(anchor, (), named, False, f"no verdict connects these groups of policies: {groups}")
    if np.isclose(comparisons.won_V, 0.5, rtol=0, atol=1e-9).all():
        return Ratings(anchor, (), (names,), False, ALL_TIED)
    return _rate(names, *outcomes(comparisons), anchor, seed)


def outcomes(comparisons: Comparisons) -> tuple[Ints, Floats, Ints]:
    """Returns the compared pairs [V, 2], lower index first, each prompt's outcomes per pair [N, V, O], which add up to
    its weight (`verdict_weights`), and its cluster [N]."""
    low_V, high_V = np.minimum(comparisons.a_V, comparisons.b_V), np.maximum(comparisons.a_V, comparisons.b_V)
    won_V = np.where(comparisons.a_V < comparisons.b_V, comparisons.won_V, 1 - comparisons.won_V)
    pairs, pair_V = np.unique(np.stack([low_V, high_V], axis=1), axis=0, return_inverse=True)
    prompts, first_N, prompt_V = np.unique(comparisons.prompt_V, return_index=True, return_inverse=True)
    _, cluster_N = np.unique(comparisons.cluster_V[first_N], return_inverse=True)
    cell_V, num_cells = prompt_V * len(pairs) + pair_V.ravel(), len(prompts) * len(pairs)
    weight_V = verdict_weights(comparisons)
    sums = [np.bincount(cell_V, weight_V * s_V, num_cells).astype(np.float64) for s_V in (won_V, 1 - won_V)]
    return pairs, np.stack(sums, axis=1).reshape(len(prompts), len(pairs), 2), cluster_N.astype(np.int64)


def _rate(names: Sequence[str], pairs: Ints, y_NVO: Floats, cluster_N: Ints, anchor: str, seed: int) -> Ratings:
    num_clusters, num_policies = int(cluster_N.max()) + 1, len(names)
    y_CVO = np.zeros((num_clusters, *y_NVO.shape[1:]))
    np.add.at(y_CVO, cluster_N, y_NVO)
    theta_PK = np.eye(num_policies)[:, 1:]
    F_VOK = np.stack([theta_PK[pairs[:, 0]], theta_PK[pairs[:, 1]]], axis=1)  # an outcome has its winner's θ
    total_VO = y_CVO.sum(axis=0)
    # Whether a chain of wins leads from i to j. If none leads from j to i, θ_i - θ_j has no upper bound (Ford 1957).
    reached_PP = reaches(_beats(total_VO, pairs, num_policies))
    shrunk = not bool(reached_PP.all())
    beta_K = choice.fit(total_VO + shrunk / 2, F_VOK)
    theta_P = np.concatenate([[0.0], beta_K])
    anchors_P = np.eye(num_policies)[names.index(anchor)] if anchor else np.full(num_policies, 1 / num_policies)
    from_anchor_PP = np.eye(num_policies) - anchors_P
    value_P = from_anchor_PP @ theta_P
    above_P = np.asarray((~reached_PP.T)[:, anchors_P > 0].any(axis=1))
    below_P = np.asarray((~reached_PP)[:, anchors_P > 0].any(axis=1))
    if num_policies == 2:
        low_P, high_P, better_PP = _of_two(y_NVO, cluster_N, anchors_P, seed)
    else:
        covariance_PP = _covariance(y_CVO, beta_K, F_VOK, shrunk)
        half_P = _halves(covariance_PP, from_anchor_PP, num_clusters)
        low_P, high_P = np.where(below_P, -math.inf, value_P - half_P), np.where(above_P, math.inf, value_P + half_P)
        better_PP = _surely_better(theta_P, covariance_PP, reached_PP, max(num_clusters - 1, 1))
    ratings = [
        Rating(
            policy=name,
            value=float(value_P[i]),
            low=float(low_P[i]),
            high=float(high_P[i]),
            best_rank=1 + int(better_PP[:, i].sum()),
            worst_rank=num_policies - int(better_PP[i].sum()),
            unbounded=_side(bool(above_P[i]), bool(below_P[i])),
        )
        for i, name in enumerate(names)
    ]
    return Ratings(anchor, tuple(ratings), (tuple(names),), shrunk, "")


def _covariance(y_CVO: Floats, beta_K: Floats, F_VOK: Floats, shrunk: bool) -> Floats:
    """Returns the covariance of θ [P, P]: the sandwich over clusters, with a first row and column of zeros.

    For a fit with the prior, whose residuals are too small, the variance of independent verdicts is added."""
    p_VO, n_CV = choice.probabilities(beta_K, F_VOK), y_CVO.sum(axis=2)
    slope_CK = np.einsum("cvo,vok->ck", y_CVO - n_CV[:, :, None] * p_VO, F_VOK, optimize=True)
    each_VKK = choice.covariances(p_VO, F_VOK)
    information_CKK = np.einsum("cv,vkl->ckl", n_CV, each_VKK, optimize=True)
    prior_KK = each_VKK.sum(axis=0) if shrunk else np.zeros(each_VKK.shape[1:])
    bread_KK = information_CKK.sum(axis=0) + prior_KK
    covariance_KK = choice.sandwich(slope_CK, information_CKK, bread_KK)
    if shrunk:
        covariance_KK = covariance_KK + np.linalg.inv(bread_KK)
    return np.pad(covariance_KK, ((1, 0), (1, 0)))


def _beats(y_VO: Floats, pairs: Ints, num_policies: int) -> Truths:
    """Returns [P, P] whether i won anything against j; a tie is half a win, so it counts for both."""
    beats_PP = np.zeros((num_policies, num_policies), dtype=bool)
    beats_PP[pairs[:, 0], pairs[:, 1]] = y_VO[:, 0] > 0
    beats_PP[pairs[:, 1], pairs[:, 0]] = y_VO[:, 1] > 0
    return beats_PP


def _of_two(y_NVO: Floats, cluster_N: Ints, anchors_P: Floats, seed: int) -> tuple[Floats, Floats, Truths]:
    """Returns the ends of both ratings [P] and whether either policy is surely better [P, P], from the interval of the
    share of wins. Equal ratings are a win rate of one half, so the pair's test decides here too."""
    weight_N = y_NVO[:, 0].sum(axis=1)
    test = EqualityTest(y_NVO[:, 0, 0] / weight_N, cluster_N, weight_N, seed=seed)
    low, high = scipy.special.logit(test.interval()).tolist()
    own_first, own_second = float(anchors_P[1]), float(anchors_P[0])  # shares of θ_0 - θ_1; 0 for the anchor itself
    low_P = np.array([own_first * low if own_first else 0.0, -own_second * high if own_second else 0.0])
    high_P = np.array([own_first * high if own_first else 0.0, -own_second * low if own_second else 0.0])
    return low_P, high_P, np.array([[False, low > 0], [high < 0, False]])


def _halves(covariance_PP: Floats, from_anchor_PP: Floats, num_clusters: int) -> Floats:
    """Returns half the width of Student's intervals [P]. It is NaN (unknown) for one cluster, and if all came out
    alike, because then there is no spread."""
    variance_P = np.diag(from_anchor_PP @ covariance_PP @ from_anchor_PP.T)
    is_anchor_P = np.abs(from_anchor_PP).max(axis=1) == 0
    if num_clusters == 1:
        return np.full(len(variance_P), math.nan)
    half_P = scipy.special.stdtrit(num_clusters - 1, (1 + LEVEL) / 2) * np.sqrt(variance_P.clip(0))
    return np.where((variance_P > choice.NO_SPREAD) | is_anchor_P, half_P, math.nan)


def _surely_better(theta_P: Floats, covariance_PP: Floats, reached_PP: Truths, freedom: int) -> Truths:
    """Returns [P, P] whether i is above j by simultaneous 95% intervals of all differences (Tukey-Kramer)."""
    if freedom == 1:
        return np.zeros_like(reached_PP)
    variance_P = np.diag(covariance_PP)
    error_PP = np.sqrt((variance_P[:, None] + variance_P[None, :] - 2 * covariance_PP).clip(0))
    low_PP = theta_P[:, None] - theta_P[None, :] - _tukey(len(theta_P), freedom) * error_PP
    return np.asarray((low_PP > 0) & (error_PP**2 > choice.NO_SPREAD) & reached_PP & ~np.eye(len(theta_P), dtype=bool))


@lru_cache
def _tukey(num_policies: int, freedom: int) -> float:
    """The quantile of the largest standardised difference. Cached, because scipy integrates it at every call."""
    return float(scipy.stats.studentized_range.ppf(LEVEL, num_policies, freedom)) / math.sqrt(2)


def _side(above: bool, below: bool) -> Literal["", "above", "below", "both"]:
    if above and below:
        return "both"
    return "above" if above else "below" if below else ""


def islands_of(num_policies: int, a_V: Ints, b_V: Ints) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of connected policies, each in ascending order, sorted by their first policy."""
    graph = scipy.sparse.coo_matrix((np.ones(len(a_V)), (a_V, b_V)), shape=(num_policies, num_policies))
    _, island_P = scipy.sparse.csgraph.connected_components(graph, directed=False)
    _, first = np.unique(island_P, return_index=True)
    return tuple(tuple(np.flatnonzero(island_P == island_P[place]).tolist()) for place in sorted(first))


def reaches(beats_PP: Truths) -> Truths:
    """Returns [P, P] whether a chain of wins leads from i to j; every policy reaches itself."""
    num_policies = len(beats_PP)
    reached_PP = beats_PP | np.eye(num_policies, dtype=bool)
    for _ in range(max(1, int(np.ceil(np.log2(max(num_policies, 2)))))):
        reached_PP = (reached_PP.astype(np.float32) @ reached_PP.astype(np.float32)) > 0
    return np.asarray(reached_PP)
