"""Agreement of labelers with each other, and with a known truth, over pairs of responses."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

import numpy as np

from preferences.records import Ranking
from preferences.statistics.clustered import Tally, clustered_shares
from preferences.statistics.estimates import Floats, Ints, Share
from preferences.statistics.panel import prompt_numbers

TrueScores = Mapping[str, Sequence[float]] | Callable[[str], Sequence[float]]


def pairwise_agreement(rankings: Sequence[Ranking]) -> Share:
    """The share of response pairs that two labelers of the same task order alike.

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
    """The share of response pairs that a ranking orders like the true scores.

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
    """Computes the share from each task's (right, compared), tasks in the order of their first ranking."""
    tasks: dict[str, Ranking] = {}
    for ranking in rankings:
        tasks.setdefault(ranking.task_id, ranking)
    table = np.array(counts, dtype=np.float64).reshape(-1, 2)
    prompt_T = prompt_numbers([ranking.prompt for ranking in tasks.values()])
    responses_T = np.array([len(ranking.responses) for ranking in tasks.values()], dtype=np.int64)
    return share_of_tasks(table[:, 0], table[:, 1], prompt_T, responses_T)


def share_of_tasks(right_T: Floats, compared_T: Floats, prompt_T: Ints, responses_T: Ints) -> Share:
    """The share right among all comparisons, from counts by task, with the interval of `clustered_shares` over prompts.

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
