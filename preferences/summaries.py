"""How far the answers to each task agree, stored so that leads can list and search tasks by it.

`disagreement` is that of `statistics.agreement.Disagreement`: the mean over pairs of labelers and pairs of responses of
1 for opposite orders, ¼ for a tie against a preference, else 0. `num_agreeing` counts the labelers who gave the most
frequent ranking. Both describe current answers only.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

from sqlalchemy import Connection, delete, insert, select

from preferences.rows import parts
from preferences.schema import judgments, task_summaries, tasks


def refresh(connection: Connection, positions: Sequence[int]) -> None:
    """Computes the summaries of these tasks again, within the caller's transaction."""
    for part in parts(positions):
        connection.execute(delete(task_summaries).where(task_summaries.c.task.in_(part)))
        columns = (judgments.c.task, judgments.c.labeler, judgments.c.kind, judgments.c.ranks, tasks.c.batch)
        found = select(*columns).join(tasks, judgments.c.task == tasks.c.position).where(judgments.c.task.in_(part))
        last: dict[tuple[int, str], tuple[str, tuple[int, ...]]] = {}
        batches: dict[int, str] = {}
        for row in connection.execute(found.order_by(judgments.c.task, judgments.c.revision)):
            last[row.task, row.labeler] = (row.kind, tuple(row.ranks))
            batches[row.task] = row.batch
        rankings: dict[int, list[tuple[int, ...]]] = {}
        adjudicated = {task for (task, _), (kind, _) in last.items() if kind == "adjudication"}
        for (task, _), (kind, ranks) in last.items():
            if kind == "answer":
                rankings.setdefault(task, []).append(ranks)
        rows = [
            {
                "task": task,
                "batch": batches[task],
                "num_answers": len(given := rankings.get(task, [])),
                "num_agreeing": max(Counter(given).values(), default=0),
                "disagreement": disagreement(given),
                "is_adjudicated": task in adjudicated,
            }
            for task in sorted({*rankings, *adjudicated})
        ]
        if rows:
            connection.execute(insert(task_summaries), rows)


def disagreement(rankings: Sequence[Sequence[int]]) -> float:
    """Returns the disagreement of several labelers' rankings of one task: 0 if all agree, 1 if all pairs are opposite.

    0 for fewer than two rankings.
    """
    num_pairs, total = 0, 0.0
    for one, other in combinations(rankings, 2):
        for first, second in combinations(range(len(one)), 2):
            difference = _sign(one, first, second) - _sign(other, first, second)
            total += (difference / 2) ** 2
            num_pairs += 1
    return total / num_pairs if num_pairs else 0.0


def _sign(ranks: Sequence[int], first: int, second: int) -> int:
    return (ranks[first] > ranks[second]) - (ranks[first] < ranks[second])
