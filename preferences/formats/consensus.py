"""One ranking per task: what its labelers say together.

Responses are ordered by their mean rank over labelers, ties sharing the mean of their places (Borda's count, which
treats all labelers alike). Equal means are a tie. A lead's adjudication stands in the place of all answers to its task.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from preferences.formats.merging import final_rankings
from preferences.formats.own import ranking_row
from preferences.formats.parts import Report
from preferences.records import Judgment, Ranking, StoredTask, Task

CONSENSUS = "consensus"  # stands as the labeler


def write_consensus(
    stored: Sequence[StoredTask], judgments: Sequence[Judgment], report: Report
) -> Iterator[dict[str, Any]]:
    """Writes rows of the format rankings with `num_labelers`, and `agreement`: the share of the labelers' untied pairs
    of responses that are ordered as in the consensus (null if every pair is tied).
    """
    by_task: dict[str, tuple[Task, list[Ranking]]] = {}
    for task, ranking in final_rankings([one.task for one in stored], judgments, report):
        by_task.setdefault(task.task_id, (task, []))[1].append(ranking)
    for task, rankings in by_task.values():
        ranks = consensus_of([ranking.ranks for ranking in rankings])
        if len(set(ranks)) == 1:
            where = f"task {task.task_id!r}"
            report.add(
                "written as a tie", where, f"all responses share one mean rank of {len(rankings)} labelers", "kept"
            )
        row = ranking_row(replace(rankings[0], ranks=ranks, labeler=CONSENSUS, ratings=_mean_ratings(rankings)))
        yield row | {"num_labelers": len(rankings), "agreement": _agreement(ranks, rankings)}


def consensus_of(rankings: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Ranks, from 1, of the responses by their mean rank. Means are exact, so no tie is a matter of rounding."""
    means = [sum(places) for places in zip(*(_places(ranks) for ranks in rankings), strict=True)]
    return tuple(sorted(set(means)).index(mean) + 1 for mean in means)


def _places(ranks: Sequence[int]) -> list[Fraction]:
    """Ranks with ties sharing the mean of their places: 1, 1, 2 are 1.5, 1.5, 3."""
    return [
        Fraction(2 * sum(other < rank for other in ranks) + sum(other == rank for other in ranks) + 1, 2)
        for rank in ranks
    ]


def _mean_ratings(rankings: Sequence[Ranking]) -> tuple[float, ...]:
    rated = [ranking.ratings for ranking in rankings if ranking.ratings]
    return tuple(sum(ratings) / len(rated) for ratings in zip(*rated, strict=True)) if rated else ()


def _agreement(ranks: Sequence[int], rankings: Sequence[Ranking]) -> float | None:
    pairs = [(i, j) for i in range(len(ranks)) for j in range(i) if ranks[i] != ranks[j]]
    votes = [
        (own.ranks[i] < own.ranks[j]) == (ranks[i] < ranks[j])
        for own in rankings
        for i, j in pairs
        if own.ranks[i] != own.ranks[j]
    ]
    return sum(votes) / len(votes) if votes else None
