"""How far labelers agree with each other, and with a known truth, over pairs of responses."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

import numpy as np

from preferences.intervals import LEVEL, Ints, Share
from preferences.records import Message, Ranking
from preferences.resampling import Floats, bootstrap_ratio
from preferences.statistics.panel import prompt_numbers

NUM_RESAMPLES = 2_000

TrueScores = Mapping[str, Sequence[float]] | Callable[[str], Sequence[float]]


def pairwise_agreement(rankings: Sequence[Ranking], *, seed: int = 0) -> Share:
    """Between labelers: the share of response pairs that two labelers of one task order the same.

    Counts each pair of responses for each pair of labelers, where neither labeler ties it. The interval resamples
    prompts. Rankings of the same task must be of the same responses: ValueError otherwise, naming the task.
    """
    by_task: dict[str, list[Ranking]] = {}
    for ranking in rankings:
        by_task.setdefault(ranking.task_id, []).append(ranking)
    counts = []
    for task_id, judged in by_task.items():
        if len({ranking.responses for ranking in judged}) > 1:
            raise ValueError(f"task {task_id!r}: responses differ between its rankings")
        # A lower rank is better, a higher score is better; between two rankings only sameness of sign matters.
        pairs = [
            _same_and_compared(first.ranks, second.ranks)
            for first, second in combinations(judged, 2)
            if first.labeler != second.labeler
        ]
        counts.append((sum(same for same, _ in pairs), sum(compared for _, compared in pairs)))
    return bootstrapped_share(*_columns(counts), _prompts_of(rankings), seed=seed)


def accuracy_against(rankings: Sequence[Ranking], scores: TrueScores, *, seed: int = 0) -> Share:
    """Against the truth: the share of response pairs that a ranking orders as the true scores do.

    `scores` gives a task's true scores by its id, in canonical order, higher is better. Pairs tied in the ranking or
    in the scores are left out. The interval resamples prompts. Raises ValueError, naming the task, for scores that are
    missing, not finite, or not one per response.
    """
    by_task: dict[str, list[tuple[int, int]]] = {}
    for ranking in rankings:
        true_scores = _scores_of(ranking, scores)
        worse_is_higher = [-score for score in true_scores]
        by_task.setdefault(ranking.task_id, []).append(_same_and_compared(ranking.ranks, worse_is_higher))
    counts = [(sum(s for s, _ in pairs), sum(c for _, c in pairs)) for pairs in by_task.values()]
    return bootstrapped_share(*_columns(counts), _prompts_of(rankings), seed=seed)


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
    """Of the pairs of entries untied in both: (how many have the same order, how many there are)."""
    same = compared = 0
    for i, j in combinations(range(len(first)), 2):
        if first[i] != first[j] and second[i] != second[j]:
            compared += 1
            same += (first[i] < first[j]) == (second[i] < second[j])
    return same, compared


def _prompts_of(rankings: Sequence[Ranking]) -> Ints:
    """The number of each task's prompt, tasks in the order of their first ranking."""
    prompts: dict[str, tuple[Message, ...]] = {}
    for ranking in rankings:
        prompts.setdefault(ranking.task_id, ranking.prompt)
    return prompt_numbers(list(prompts.values()))


def _columns(counts: Sequence[tuple[int, int]]) -> tuple[Floats, Floats]:
    table = np.array(counts, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def bootstrapped_share(right_T: Floats, compared_T: Floats, prompt_T: Ints, *, seed: int) -> Share:
    """The share right of all compared, given by task, with an interval that resamples prompts (`prompt_numbers`)."""
    # Tasks without a comparable pair say nothing, and would make empty resamples possible.
    used_T = compared_T > 0
    if not used_T.any():
        return Share(math.nan, math.nan, math.nan, num_pairs=0, num_tasks=0)
    _, cluster_T = np.unique(prompt_T[used_T], return_inverse=True)
    right_C = np.bincount(cluster_T, right_T[used_T]).astype(np.float64)
    compared_C = np.bincount(cluster_T, compared_T[used_T]).astype(np.float64)
    mean, low, high = bootstrap_ratio(right_C, compared_C, seed=seed, num_resamples=NUM_RESAMPLES, level=LEVEL)
    return Share(mean, low, high, num_pairs=int(compared_T.sum()), num_tasks=int(used_T.sum()))
