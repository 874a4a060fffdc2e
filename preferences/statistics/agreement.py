"""Agreement of labelers with each other, beyond chance, and with a known truth.

pairwise_agreement, accuracy_against    shares of pairs of responses
ranking_alpha, rating_alpha             Krippendorff's alpha, with missing answers and any number of labelers
labeler_reliability                     how often each labeler is right, estimated from the labels alone, for weights

    alpha = 1 - D_o / D_e

D_o is the disagreement within units (what was judged), D_e the disagreement of values drawn from all units. 1 is full
agreement, 0 is chance, below 0 is worse than chance. Krippendorff 2011, Computing Krippendorff's Alpha-Reliability;
Hayes & Krippendorff 2007, Communication Methods and Measures 1(1). A result of 0/0 is NaN with a reason, never 0: with
nothing to disagree on, agreement shows nothing.

Shape letters: T tasks, P pairs of responses, U units, V values in ascending order, C clusters (prompts), R resamples,
S sums, N ratings.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np
import scipy  # loads each subpackage on first use: scipy.stats takes most of a second

from preferences.records import Ranking
from preferences.statistics.estimates import LEVEL, Floats, Ints, Share, Z
from preferences.statistics.intervals import MANY_ERRORS, Tally, clustered_shares, in_blocks, prompt_numbers, wilson
from preferences.statistics.panel import PairCounts, Panel

TrueScores = Mapping[str, Sequence[float]] | Callable[[str], Sequence[float]]

MAX_VALUES = 21  # distinct ratings, such as 0 to 10 in halves; each pair of values takes a column of a table
NO_OVERLAP = "no two labelers judged the same task"
NO_VARIATION = "all answers are alike, so chance would agree as much"


# ---- shares of pairs ----


def pairwise_agreement(rankings: Sequence[Ranking]) -> Share:
    """Returns the share of response pairs that two labelers of the same task order alike.

    It counts each pair of responses once for each pair of labelers, unless one of them ties it. The interval is over
    prompts.

    Raises: ValueError, naming the task, if its rankings are of different responses.
    """
    by_task: dict[str, list[Ranking]] = {}
    for ranking in rankings:
        by_task.setdefault(ranking.task_id, []).append(ranking)
    counts = []
    for task_id, judged in by_task.items():
        if len({ranking.responses for ranking in judged}) > 1:
            raise ValueError(f"task {task_id!r}: responses differ between its rankings")
        # Between two rankings only the signs have to agree, so it does not matter that lower ranks are better.
        pairs = [
            _same_and_compared(first.ranks, second.ranks)
            for first, second in combinations(judged, 2)
            if first.labeler != second.labeler
        ]
        counts.append((sum(same for same, _ in pairs), sum(compared for _, compared in pairs)))
    return _share(rankings, counts)


def accuracy_against(rankings: Sequence[Ranking], scores: TrueScores) -> Share:
    """Returns the share of response pairs that a ranking orders like the true scores.

    `scores` maps a task's id to its true scores, in canonical order; higher is better. Pairs tied in the ranking or in
    the scores are left out. The interval is over prompts.

    Raises: ValueError, naming the task, for scores that are missing, not finite, or not one per response.
    """
    by_task: dict[str, list[tuple[int, int]]] = {}
    for ranking in rankings:
        true_scores = _scores_of(ranking, scores)
        worse_is_higher = [-score for score in true_scores]
        by_task.setdefault(ranking.task_id, []).append(_same_and_compared(ranking.ranks, worse_is_higher))
    counts = [(sum(s for s, _ in pairs), sum(c for _, c in pairs)) for pairs in by_task.values()]
    return _share(rankings, counts)


def _scores_of(ranking: Ranking, scores: TrueScores) -> Sequence[float]:
    where = f"task {ranking.task_id!r}"
    if callable(scores):
        found = scores(ranking.task_id)
    elif ranking.task_id in scores:
        found = scores[ranking.task_id]
    else:
        raise ValueError(f"{where}: scores has no entry for it")
    if len(found) != len(ranking.ranks):
        raise ValueError(f"{where}: scores has {len(found)} entries for {len(ranking.ranks)} responses")
    if not all(math.isfinite(score) for score in found):
        raise ValueError(f"{where}: scores is {list(found)}; finite numbers were expected")
    return found


def _same_and_compared(first: Sequence[float], second: Sequence[float]) -> tuple[int, int]:
    """Returns (same, compared): how many pairs of entries have the same order, out of those untied in both."""
    same = compared = 0
    for i, j in combinations(range(len(first)), 2):
        if first[i] != first[j] and second[i] != second[j]:
            compared += 1
            same += (first[i] < first[j]) == (second[i] < second[j])
    return same, compared


def _share(rankings: Sequence[Ranking], counts: Sequence[tuple[int, int]]) -> Share:
    """Computes the share from each task's (right, compared), with tasks in the order of their first ranking."""
    tasks: dict[str, Ranking] = {}
    for ranking in rankings:
        tasks.setdefault(ranking.task_id, ranking)
    table = np.array(counts, dtype=np.float64).reshape(-1, 2)
    prompt_T = prompt_numbers([ranking.prompt for ranking in tasks.values()])
    responses_T = np.array([len(ranking.responses) for ranking in tasks.values()], dtype=np.int64)
    return share_of_tasks(table[:, 0], table[:, 1], prompt_T, responses_T)


def share_of_tasks(right_T: Floats, compared_T: Floats, prompt_T: Ints, responses_T: Ints) -> Share:
    """Returns the share of right comparisons, from counts by task, with `clustered_shares`'s interval over prompts.

    A comparison is between two of a task's `responses_T` responses. Several labelers may compare the same two.
    """
    num_pairs_T = responses_T * (responses_T - 1) / 2
    tally = Tally(
        group_R=np.zeros(len(right_T), dtype=np.int64),
        task_R=np.arange(len(right_T)),
        prompt_R=prompt_T,
        right_R=right_T,
        compared_R=compared_T,
        pairs_R=np.minimum(compared_T, num_pairs_T),
        responses_R=responses_T,
    )
    (share,) = clustered_shares(tally, 1)
    return share


# ---- Krippendorff's alpha ----


@dataclass(frozen=True)
class Alpha:
    """Alpha with a 95% interval over prompts; higher is better.

    The interval is Wilson's for the share (1 + alpha)/2, which goes from 0 to 1, for as many effective trials as the
    variance over prompts implies. So it has a width even if all labelers agree, and it is asymmetric near 1.

    At least two labelers judged each of `num_units` units, in `num_tasks` tasks. `reason` says why alpha is NaN, and is
    empty if it is known. `low` and `high` are NaN for a single prompt.
    """

    value: float
    low: float
    high: float
    num_units: int
    num_tasks: int
    reason: str


def ordinal_alpha(counts_UV: Floats) -> float:
    """Returns alpha of ordinal values (NaN if unknown). `counts_UV[u, v]` labelers gave unit u the v-th smallest value.

        o_ck = Σ_u (n_uc·n_uk - [c = k]·n_uc) / (m_u - 1),  n_c = Σ_k o_ck,  n = Σ_c n_c
        alpha = 1 - (n - 1) · Σ_ck o_ck·δ²_ck / Σ_ck n_c·n_k·δ²_ck,  δ_ck = Σ_{g=c..k} n_g - (n_c + n_k)/2

    m_u is the number of values of unit u. Units with fewer than two values are left out.
    """
    one_cluster_U = np.zeros(len(counts_UV), dtype=np.int64)
    return float(_alpha_of_coincidences(_coincidences(counts_UV, one_cluster_U, 1))[0])


def ranking_alpha(counts: PairCounts, prompt_T: Ints, responses_T: Ints) -> Alpha:
    """Returns alpha of K-way rankings with ties. A unit is a pair of responses; its value says which one is better.

    Ranks have a meaning only within their task (and ties shift them). So units are pairs, whose values (second, tie,
    first) mean the same in every task and for every K. Which response is called first is arbitrary, so the distribution
    is symmetric, and in Krippendorff's ordinal metric a tie lies halfway between the preferences: δ² is 1 for opposite
    preferences, and ¼ for a tie and a preference. Two values whose pairs are oriented at random disagree by ½ on
    average if neither is a tie, and by ¼ if one is. Let τ be the share of ties among the values of units that several
    labelers judged. Then

        D_o = Σ_u 2/(m_u - 1) · Σ_{pairs of labelers} δ² / Σ_u m_u,    D_e = (1 - τ)/2

    This equals `ordinal_alpha` of the units read in both directions, except for the latter's factor n - 1. Without ties
    and with the same number of labelers for every unit, alpha = 2·(pairwise agreement) - 1, which for two labelers is
    the mean of Kendall's tau. D_o is at most 2·D_e, so (1 + alpha)/2 = Σ (2·D_e - D_o) / Σ 2·D_e is a share over
    prompts, and its interval is that of `clustered_shares`.
    """
    num_TP = counts.num_TP
    judged_TP = num_TP > 1
    preferred_TP = counts.first_TP + counts.second_TP
    squares_TP = counts.first_TP * counts.second_TP + counts.tied_TP * preferred_TP / 4
    observed_T = np.sum(2 * squares_TP / np.where(judged_TP, num_TP - 1, 1), axis=1, where=judged_TP)
    expected_T = np.sum(preferred_TP, axis=1, where=judged_TP) / 2
    overlapping_T = judged_TP.sum(axis=1) > 0
    num_units, num_tasks = int(judged_TP.sum()), int(overlapping_T.sum())
    if num_units == 0 or expected_T.sum() == 0:
        return _unknown(NO_OVERLAP if num_units == 0 else NO_VARIATION, num_units, num_tasks)
    value = 1 - float(observed_T.sum() / expected_T.sum())
    if len(np.unique(prompt_T[overlapping_T])) == 1:
        return Alpha(value, math.nan, math.nan, num_units, num_tasks, "")
    compared_T = 2 * expected_T
    share = share_of_tasks(compared_T - observed_T, compared_T, prompt_T, responses_T)
    return Alpha(value, 2 * share.low - 1, 2 * share.high - 1, num_units, num_tasks, "")


def rating_alpha(panel: Panel) -> Alpha:
    """Returns alpha of ratings as ordinal values. A unit is a response, which each labeler rates once.

    Answers without ratings are left out. The interval's variance v is a jackknife over C prompts, which takes the
    ordinal metric from the remaining ratings each time. The number of effective trials of p = (1 + alpha)/2 is

        n* = min(U·(1 + e/10), p(1 - p)/(v/4) · (z/t)²),   v = (C-1)/C · Σ_c (α_(-c) - mean)²

    where U is the number of units, and e is the number of prompts on which labelers differ, as in `clustered_shares`
    (Efron & Stein 1981, Annals of Statistics 9(3)).
    """
    answers = panel.answers
    rated = [row for row, answer in enumerate(answers) if answer.ratings]
    lengths = np.array([len(answers[row].ratings) for row in rated], dtype=np.int64)
    flat = chain.from_iterable(answers[row].ratings for row in rated)
    values, value_N = np.unique(np.fromiter(flat, np.float64, lengths.sum()), return_inverse=True)
    if len(values) > MAX_VALUES:
        return _unknown(f"ratings take {len(values)} values; at most {MAX_VALUES} were expected", 0, 0)
    task_N = np.repeat(panel.task_J[rated], lengths)
    place_N = np.arange(len(task_N)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    width = int(place_N.max(initial=0)) + 1
    _, unit_N = np.unique(task_N * width + place_N, return_inverse=True)
    num_units, num_values = int(unit_N.max(initial=-1)) + 1, max(len(values), 1)
    counts = np.bincount(unit_N * num_values + value_N, minlength=num_units * num_values)
    counts_UV = counts.reshape(num_units, num_values).astype(np.float64)
    task_U = np.zeros(num_units, dtype=np.int64)
    task_U[unit_N] = task_N
    return alpha_of_units(counts_UV, task_U, panel.prompt_T)


def alpha_of_units(counts_UV: Floats, task_U: Ints, prompt_T: Ints) -> Alpha:
    """Returns `rating_alpha` from the counts of each unit's values; `task_U` is each unit's task."""
    judged_U = counts_UV.sum(axis=1) > 1
    counts_UV = counts_UV[judged_U]
    tasks, task_U = np.unique(task_U[judged_U], return_inverse=True)
    num_units, num_values = counts_UV.shape
    if num_units == 0:
        return _unknown(NO_OVERLAP, 0, 0)
    if (counts_UV.sum(axis=0) > 0).sum() == 1:
        return _unknown(NO_VARIATION, num_units, len(tasks))
    _, cluster_T = np.unique(prompt_T[tasks], return_inverse=True)
    num_clusters = int(cluster_T.max()) + 1
    observed_CVV = _coincidences(counts_UV, cluster_T[task_U], num_clusters)
    total_VV = observed_CVV.sum(axis=0)
    value = float(_alpha_of_coincidences(total_VV[None])[0])
    if num_clusters == 1:
        return Alpha(value, math.nan, math.nan, num_units, len(tasks), "")
    table_BS = in_blocks(observed_CVV.reshape(num_clusters, -1), np.random.default_rng(0))
    num_blocks = len(table_BS)
    without_B = _alpha_of_coincidences(total_VV - table_BS.reshape(num_blocks, num_values, num_values))
    without_B = np.nan_to_num(without_B, nan=0.0)  # 0 = as by chance, if all remaining values are equal
    variance = (num_blocks - 1) / num_blocks * float(((without_B - without_B.mean()) ** 2).sum())
    num_differing = int((np.trace(observed_CVV, axis1=1, axis2=2) < observed_CVV.sum(axis=(1, 2))).sum())
    num = num_units * (1 + num_differing / MANY_ERRORS)
    share = (1 + value) / 2
    if variance > 0:
        t = float(scipy.special.stdtrit(num_blocks - 1, (1 + LEVEL) / 2))
        num = min(num, 4 * max(share * (1 - share), 0.0) / variance * (Z / t) ** 2)
    low, high = wilson(np.array(share), np.array(max(num, 1e-9)))
    return Alpha(value, 2 * float(low) - 1, 2 * float(high) - 1, num_units, len(tasks), "")


def _coincidences(counts_UV: Floats, cluster_U: Ints, num_clusters: int) -> Floats:
    """Returns [clusters, V, V]: ordered pairs of values that two labelers gave unit u, weighted by 1/(m_u - 1)."""
    num_U = counts_UV.sum(axis=1)
    weight_U = np.where(num_U > 1, 1 / np.maximum(num_U - 1, 1), 0.0)
    num_values = counts_UV.shape[1]
    table_CVV = np.empty((num_clusters, num_values, num_values))
    for c in range(num_values):
        for k in range(c, num_values):
            pairs_U = counts_UV[:, c] * (counts_UV[:, k] - (c == k)) * weight_U
            table_CVV[:, c, k] = table_CVV[:, k, c] = np.bincount(cluster_U, pairs_U, num_clusters)
    return table_CVV


def _alpha_of_coincidences(observed_RVV: Floats) -> Floats:
    """Returns [R]: alpha of each of R coincidence tables, NaN where nothing varies."""
    count_RV = observed_RVV.sum(axis=2)
    total_R = count_RV.sum(axis=1)
    # The number of values below c plus half of those at c. δ_ck is the difference of two of these.
    midrank_RV = np.cumsum(count_RV, axis=1) - count_RV / 2
    squares_RVV = (midrank_RV[:, :, None] - midrank_RV[:, None, :]) ** 2
    observed_R = np.einsum("rck,rck->r", observed_RVV, squares_RVV)
    expected_R = np.einsum("rc,rk,rck->r", count_RV, count_RV, squares_RVV)
    alpha_R = np.full(len(total_R), np.nan)
    known_R = expected_R > 0
    alpha_R[known_R] = 1 - (total_R[known_R] - 1) * observed_R[known_R] / expected_R[known_R]
    return alpha_R


def _unknown(reason: str, num_units: int, num_tasks: int) -> Alpha:
    return Alpha(math.nan, math.nan, math.nan, num_units, num_tasks, reason)


# ---- reliability ----

START = 0.7  # any start above ½ converges to the solution in which labelers are more often right than wrong
TOLERANCE, MAX_ROUNDS = 1e-6, 500


@dataclass(frozen=True)
class Reliability:
    """A labeler's probability of ordering a pair correctly, estimated from `num_pairs` pairs that others judged too."""

    accuracy: float
    num_pairs: int

    @property
    def weight(self) -> float:
        """log(a / (1 - a)), at least 0: an answer's weight in the most likely joint verdict (Nitzan & Paroush 1982).

        A labeler at or below chance has weight 0: their answers are left out, not reversed. Below chance, the formula
        would count the opposite of their answers. But a labeler who is wrong on purpose or by a misunderstanding should
        be noticed (agreement with others shows it), and a loss cannot take a negative weight.
        """
        return max(0.0, math.log(self.accuracy / (1 - self.accuracy)))


def labeler_reliability(rankings: Sequence[Ranking]) -> dict[str, Reliability]:
    """Returns each labeler's reliability, by name. If nobody else judged their pairs, it is the mean over all votes.

    The one-coin model of Dawid & Skene (1979): every pair of responses has an unknown true order, and labeler l reports
    it with probability a_l, independently of the others. It is fitted by EM, in which every step raises the likelihood:

        E: P(first is better) = σ(Σ_l ± log(a_l / (1 - a_l))), + for those who put it first, - for the others
        M: a_l = (2 + expected number of pairs of l that are right) / (3 + number of pairs of l)

    A pair counts if at least two labelers order it; ties carry no information about who is right. The 2 and the 3 come
    from a Beta(3, 2) prior, worth a pair or two, which keeps a_l below 1.

    It serves as a weight and has no interval, since its error has a part that no number of labels removes. Pairs that
    are easy for everybody make labelers look alike: if pairs differ much in difficulty, the estimates have the right
    order but are closer together than the true accuracies. With only two labelers, only the product of their accuracies
    above chance can be known, and both get the same. What can be known is `quality.agreement_with_others`.
    """
    labelers = sorted({ranking.labeler for ranking in rankings})
    number = {name: index for index, name in enumerate(labelers)}
    rows = [(pair, number[name], sign) for pair, name, sign in _votes(rankings)]
    pair_V, labeler_V, sign_V = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    num_pairs_L, accuracy_L = np.bincount(labeler_V, minlength=len(labelers)), np.full(len(labelers), START)
    for _ in range(MAX_ROUNDS if rows else 0):
        log_odds_L = np.log(accuracy_L / (1 - accuracy_L))
        evidence_P = np.bincount(pair_V, weights=sign_V * log_odds_L[labeler_V])
        right_V = 1 / (1 + np.exp(-sign_V * evidence_P[pair_V]))
        before, right_L = accuracy_L, np.bincount(labeler_V, weights=right_V, minlength=len(labelers))
        accuracy_L = (2 + right_L) / (3 + num_pairs_L)
        if np.abs(accuracy_L - before).max() < TOLERANCE:
            break
    mean = float((accuracy_L * num_pairs_L).sum() / num_pairs_L.sum()) if rows else START
    return {
        name: Reliability(float(accuracy) if num else mean, int(num))
        for name, accuracy, num in zip(labelers, accuracy_L, num_pairs_L, strict=True)
    }


def labeler_weights(rankings: Sequence[Ranking], reliability: Mapping[str, Reliability]) -> dict[str, float]:
    """Returns each labeler's weight, proportional to `Reliability.weight`, with mean 1 over the rankings.

    Raises: ValueError if no labeler is better than chance.
    """
    total = sum(reliability[ranking.labeler].weight for ranking in rankings)
    if not total:
        raise ValueError("no labeler agrees with the others more than by chance, so reliability gives no weights")
    return {name: found.weight * len(rankings) / total for name, found in reliability.items()}


def _votes(rankings: Sequence[Ranking]) -> Iterable[tuple[int, str, int]]:
    """Yields (pair, labeler, 1 or -1) for every pair that at least two labelers ordered."""
    by_task: dict[str, list[Ranking]] = {}
    for ranking in rankings:
        by_task.setdefault(ranking.task_id, []).append(ranking)
    pair = 0
    for judged in by_task.values():
        for i, j in combinations(range(len(judged[0].ranks)), 2):
            ordered = [(r.labeler, 1 if r.ranks[i] < r.ranks[j] else -1) for r in judged if r.ranks[i] != r.ranks[j]]
            if len({name for name, _ in ordered}) > 1:
                yield from ((pair, name, sign) for name, sign in ordered)
                pair += 1
