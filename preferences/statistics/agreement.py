"""Agreement of labelers with each other, beyond chance, and with a known truth; and where they disagree.

pairwise_agreement, accuracy_against    shares of pairs of responses
ranking_alpha, rating_alpha             Krippendorff's alpha, with missing answers and any number of labelers
disagreements                           the tasks on which labelers disagree most, for a lead to review
labeler_reliability                     how often each labeler is right, estimated from the labels alone

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
import numpy.typing as npt

from preferences.records import Judgment, Ranking
from preferences.statistics.estimates import LEVEL, Floats, Ints, Share
from preferences.statistics.intervals import NUM_RESAMPLES, Tally, clustered_shares, percentiles, resampled_sums
from preferences.statistics.panel import PairCounts, Panel, count_pairs, pair_signs, prompt_numbers

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
    """Alpha with a 95% interval by bootstrap over prompts; higher is better.

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


def ranking_alpha(counts: PairCounts, prompt_T: Ints, *, seed: int) -> Alpha:
    """Returns alpha of K-way rankings with ties. A unit is a pair of responses; its value says which one is better.

    Ranks have a meaning only within their task (and ties shift them). So units are pairs, whose values (second, tie,
    first) mean the same in every task and for every K. Which response is called first is arbitrary, so the distribution
    is symmetric, and in Krippendorff's ordinal metric a tie lies halfway between the preferences: δ² = 1 for opposite
    preferences, ¼ for a tie and a preference. Two values whose pairs are oriented at random disagree by ½ if neither is
    a tie, and by ¼ if one is. With τ the share of ties among values of units that several labelers judged,

        D_o = Σ_u 2/(m_u - 1) · Σ_{pairs of labelers} δ² / Σ_u m_u,    D_e = (1 - τ)/2

    It equals `ordinal_alpha` of the units read in both directions, except for the latter's factor n - 1. Without ties,
    and with equally many labelers per unit, alpha = 2·(pairwise agreement) - 1, which for two labelers is the mean of
    Kendall's tau.
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
    table_CS = _by_prompt(np.stack([observed_T, expected_T], axis=1), prompt_T, overlapping_T)
    if len(table_CS) == 1:
        return Alpha(value, math.nan, math.nan, num_units, num_tasks, "")
    sums_RS = resampled_sums(table_CS, seed=seed, num_resamples=NUM_RESAMPLES)
    sums_RS = sums_RS[sums_RS[:, 1] > 0]  # a resample with nothing but ties has no alpha
    return Alpha(value, *percentiles(1 - sums_RS[:, 0] / sums_RS[:, 1], LEVEL), num_units, num_tasks, "")


def rating_alpha(panel: Panel, *, seed: int) -> Alpha:
    """Returns alpha of ratings as ordinal values. A unit is a response, which each labeler rates once.

    Answers without ratings are left out. Each resample has its own metric, because the metric depends on the ratings.
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
    return _alpha_of_units(counts_UV, task_U, panel.prompt_T, seed)


def _alpha_of_units(counts_UV: Floats, task_U: Ints, prompt_T: Ints, seed: int) -> Alpha:
    judged_U = counts_UV.sum(axis=1) > 1
    counts_UV = counts_UV[judged_U]
    tasks, task_U = np.unique(task_U[judged_U], return_inverse=True)
    num_units, num_values = counts_UV.shape
    if num_units == 0:
        return _unknown(NO_OVERLAP, 0, 0)
    if (counts_UV.sum(axis=0) > 0).sum() == 1:
        return _unknown(NO_VARIATION, num_units, len(tasks))
    observed_TVV = _coincidences(counts_UV, task_U, len(tasks))
    value = float(_alpha_of_coincidences(observed_TVV.sum(axis=0, keepdims=True))[0])
    table_CS = _by_prompt(observed_TVV.reshape(len(tasks), -1), prompt_T[tasks], np.ones(len(tasks), dtype=bool))
    if len(table_CS) == 1:
        return Alpha(value, math.nan, math.nan, num_units, len(tasks), "")
    sums_RS = resampled_sums(table_CS, seed=seed, num_resamples=NUM_RESAMPLES)
    alphas_R = _alpha_of_coincidences(sums_RS.reshape(-1, num_values, num_values))
    return Alpha(value, *percentiles(alphas_R[~np.isnan(alphas_R)], LEVEL), num_units, len(tasks), "")


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


def _by_prompt(table_TS: Floats, prompt_T: Ints, used_T: npt.NDArray[np.bool_]) -> Floats:
    """Returns [prompts, S]: the sums of the used tasks' rows, by prompt."""
    _, cluster_T = np.unique(prompt_T[used_T], return_inverse=True)
    return np.stack([np.bincount(cluster_T, column) for column in table_TS[used_T].T], axis=1).astype(np.float64)


def _unknown(reason: str, num_units: int, num_tasks: int) -> Alpha:
    return Alpha(math.nan, math.nan, math.nan, num_units, num_tasks, reason)


# ---- disagreements ----


@dataclass(frozen=True)
class Disagreement:
    """A task that labelers order differently, with their rankings.

    `disagreement` is the mean of `ranking_alpha`'s δ² over pairs of responses and pairs of labelers: 0 if all
    agree, 1 if two labelers order every pair in opposite ways; a tie against a preference counts ¼.
    """

    task_id: str
    disagreement: float
    ranks: tuple[tuple[str, tuple[int, ...]], ...]  # (labeler, ranks in canonical order), by name


def disagreements(panel: Panel, adjudications: Sequence[Judgment], *, limit: int) -> tuple[Disagreement, ...]:
    """Returns the `limit` tasks with the most disagreement, most first, without adjudicated ones.

    On equal disagreement the task with more labelers comes first, then the one earlier in `panel.tasks`.
    """
    counts = count_pairs(panel, pair_signs(panel.ranks_JK))
    num_TP = counts.num_TP
    squares_TP = counts.first_TP * counts.second_TP + counts.tied_TP * (counts.first_TP + counts.second_TP) / 4
    compared_T = (num_TP * (num_TP - 1) / 2).sum(axis=1)
    mean_T = squares_TP.sum(axis=1) / np.maximum(compared_T, 1)
    adjudicated = {judgment.task_id for judgment in adjudications}
    open_T = np.array([task.task_id not in adjudicated for task in panel.tasks], dtype=bool)
    candidates = np.flatnonzero((mean_T > 0) & open_T)
    order = np.lexsort((candidates, -num_TP[candidates].max(axis=1, initial=0), -mean_T[candidates]))[:limit]
    rankings: dict[int, list[tuple[str, tuple[int, ...]]]] = {int(task): [] for task in candidates[order]}
    for row in np.flatnonzero(np.isin(panel.task_J, candidates[order])):
        answer = panel.answers[row]
        rankings[int(panel.task_J[row])].append((answer.labeler, answer.ranks))
    return tuple(
        Disagreement(panel.tasks[task].task_id, float(mean_T[task]), tuple(sorted(ranks)))
        for task, ranks in rankings.items()
    )


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

        A labeler at chance has weight 0.
        """
        return max(0.0, math.log(self.accuracy / (1 - self.accuracy)))


def labeler_reliability(rankings: Sequence[Ranking]) -> dict[str, Reliability]:
    """Returns each labeler's reliability, by name: the mean over all votes if nobody else judged their pairs.

    The one-coin model of Dawid & Skene (1979): every pair of responses has an unknown true order, and labeler l reports
    it with probability a_l, independently of the others. It is fitted by EM, in which every step raises the likelihood:

        E: P(first is better) = σ(Σ_l ± log(a_l / (1 - a_l))), + for those who put it first, - for the others
        M: a_l = (2 + expected number of pairs of l that are right) / (3 + number of pairs of l)

    A pair counts if at least two labelers order it; ties carry no information about who is right. The 2 and the 3 come
    from a Beta(3, 2) prior, worth a pair or two, which keeps a_l below 1. Pairs of one ranking are correlated, so an
    estimate is less certain than its number of pairs suggests. Pairs that are easy for everybody make labelers look
    alike, so if pairs differ much in difficulty, the accuracies come out closer together than they are, in the right
    order. With only two labelers, only the product of their accuracies above chance can be known, and both get the same
    accuracy.
    """
    labelers = sorted({ranking.labeler for ranking in rankings})
    number = {name: index for index, name in enumerate(labelers)}
    votes = list(_votes(rankings))
    pair_V = np.array([pair for pair, _, _ in votes], dtype=np.int64)
    labeler_V = np.array([number[name] for _, name, _ in votes], dtype=np.int64)
    sign_V = np.array([sign for _, _, sign in votes], dtype=np.float64)  # 1 = the first is better, -1 = the second
    num_pairs_L = np.bincount(labeler_V, minlength=len(labelers))
    accuracy_L = np.full(len(labelers), START)
    for _ in range(MAX_ROUNDS):
        log_odds_L = np.log(accuracy_L / (1 - accuracy_L))
        evidence_P = np.bincount(pair_V, weights=sign_V * log_odds_L[labeler_V])
        right_V = 1 / (1 + np.exp(-sign_V * evidence_P[pair_V]))
        before, right_L = accuracy_L, np.bincount(labeler_V, weights=right_V, minlength=len(labelers))
        accuracy_L = (2 + right_L) / (3 + num_pairs_L)
        if np.abs(accuracy_L - before).max() < TOLERANCE:
            break
    total = num_pairs_L.sum()
    mean = float((accuracy_L * num_pairs_L).sum() / total) if total else START
    known = zip(labelers, accuracy_L.tolist(), num_pairs_L.tolist(), strict=True)
    return {name: Reliability(found if count else mean, count) for name, found, count in known}


def labeler_weights(rankings: Sequence[Ranking], reliability: Mapping[str, Reliability]) -> dict[str, float]:
    """Returns each labeler's weight, proportional to `Reliability.weight`, with mean 1 over the rankings.

    Raises: ValueError if no labeler is better than chance.
    """
    total = sum(reliability[ranking.labeler].weight for ranking in rankings)
    if not total:
        raise ValueError("no labeler agrees with the others more than by chance, so reliability gives no weights")
    return {name: found.weight * len(rankings) / total for name, found in reliability.items()}


def _votes(rankings: Sequence[Ranking]) -> Iterable[tuple[int, str, int]]:
    """Yields (pair, labeler, 1 or -1) for every pair that at least two labelers ordered. Pairs are numbered from 0."""
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
