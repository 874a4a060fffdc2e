"""How far the answers to each task agree, and the adjudication queue: the tasks whose answers agree too little.

`task_summaries` stores this agreement, so that leads can list and search tasks by it. `disagreement` is the mean over
pairs of labelers and pairs of responses of 1 for opposite orders, ¼ for a tie against a preference, else 0; for a
single response, that of its ratings and marks (`preferences.rankings`). `num_agreeing` counts the labelers who gave
the most frequent ranking, or said the same about a single response. Both describe current answers only.

The queue has fully answered tasks, most disagreement first. Gold tasks, hidden repeats, archived and adjudicated tasks
are not in it, and neither are tasks that still wait for an answer, which may settle them. All functions run within the
caller's transaction.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, String, and_, cast, delete, exists, func, insert, or_, select

from preferences.annotations import Annotations
from preferences.rankings import Said, disagreement, disagreement_alone, said_alone
from preferences.rows import parts
from preferences.schema import assignments, judgments, task_summaries, tasks

# ---- how far answers agree ----


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
        alone = _said_alone(connection, [task for task, given in rankings.items() if len(given[0]) == 1])
        rows = [
            {
                "task": task,
                "batch": batches[task],
                "num_answers": len(given := rankings.get(task, [])),
                "num_agreeing": max(Counter(frozenset(said.items()) for said in alone[task]).values())
                if task in alone
                else max(Counter(given).values(), default=0),
                "disagreement": disagreement_alone(alone[task]) if task in alone else disagreement(given),
                "is_adjudicated": task in adjudicated,
            }
            for task in sorted({*rankings, *adjudicated})
        ]
        if rows:
            connection.execute(insert(task_summaries), rows)


def _said_alone(connection: Connection, positions: Sequence[int]) -> dict[int, list[Said]]:
    """Returns what the current answers say about each of these tasks, which have a single response."""
    if not positions:
        return {}
    columns = (judgments.c.task, judgments.c.labeler, judgments.c.kind)
    said = (judgments.c.ratings, judgments.c.flags, judgments.c.annotations)
    found = select(*columns, *said).where(judgments.c.task.in_(positions)).order_by(judgments.c.revision)
    last = {(row.task, row.labeler): row for row in connection.execute(found)}
    alone: dict[int, list[Said]] = {}
    for row in last.values():
        if row.kind == "answer":
            answer = said_alone(row.ratings, row.flags, Annotations.of(row.annotations))
            alone.setdefault(row.task, []).append(answer)
    return alone


# ---- the queue ----


MAX_COUNTED = 1_000  # counting a long queue to its end would take as long as reading it


@dataclass(frozen=True)
class Threshold:
    """Which tasks are in the queue: those with at least this disagreement, or with fewer labelers who agree.

    `fewer_than` counts the labelers who gave the most frequent ranking; 0 = do not ask for that. `batch` is "" for all.
    """

    batch: str = ""
    min_disagreement: float = 0.25
    fewer_than: int = 0


@dataclass(frozen=True)
class Queued:
    """A task in the queue. `disagreement` is 0 to 1; `num_agreeing` of `num_answers` gave the most frequent ranking."""

    task_id: str
    batch: str
    disagreement: float
    num_agreeing: int
    num_answers: int


def queued(connection: Connection, threshold: Threshold, *, start: int, limit: int) -> list[Queued]:
    """Returns up to `limit` tasks of the queue, beginning at index `start`."""
    summary = task_summaries.c
    columns = (tasks.c.task_id, summary.batch, summary.disagreement, summary.num_agreeing, summary.num_answers)
    statement = _queue(threshold, select(*columns)).order_by(summary.disagreement.desc(), summary.task)
    return [Queued(*row) for row in connection.execute(statement.offset(start).limit(limit))]


def num_queued(connection: Connection, threshold: Threshold) -> int:
    """Counts the queue's tasks, up to MAX_COUNTED."""
    some = _queue(threshold, select(task_summaries.c.task)).limit(MAX_COUNTED).subquery()
    return connection.scalar(select(func.count()).select_from(some)) or 0


def has_overlap(connection: Connection, batch: str) -> bool:
    """Whether any task of a batch ("" = of all) has answers of two labelers. Without one, no disagreement is known."""
    is_of_batch = (task_summaries.c.batch == batch,) if batch else ()
    return connection.scalar(select(exists().where(task_summaries.c.num_answers > 1, *is_of_batch))) or False


def neighbour(connection: Connection, threshold: Threshold, task_id: str, *, is_next: bool) -> str:
    """Returns the id of the queue's task after or before this one, which may have left the queue; "" if there is none.

    With an unknown or unanswered task, the next one is the first.
    """
    summary = task_summaries.c
    here = connection.execute(
        select(summary.disagreement, summary.task)
        .join(tasks, tasks.c.position == summary.task)
        .where(tasks.c.task_id == task_id)
    ).one_or_none()
    statement = _queue(threshold, select(tasks.c.task_id))
    if here is None and not is_next:
        return ""
    if here is not None and is_next:
        is_lower = summary.disagreement < here.disagreement
        is_after = or_(is_lower, and_(summary.disagreement == here.disagreement, summary.task > here.task))
        statement = statement.where(summary.disagreement <= here.disagreement, is_after)  # the first bounds the index
    elif here is not None:
        is_higher = summary.disagreement > here.disagreement
        is_before = or_(is_higher, and_(summary.disagreement == here.disagreement, summary.task < here.task))
        statement = statement.where(summary.disagreement >= here.disagreement, is_before)
    if is_next:
        ordered = statement.order_by(summary.disagreement.desc(), summary.task)
    else:
        ordered = statement.order_by(summary.disagreement, summary.task.desc())
    return connection.scalar(ordered.limit(1)) or ""


def _queue(threshold: Threshold, statement: Select[Any]) -> Select[Any]:
    summary = task_summaries.c
    own = assignments.c.task == summary.task
    is_waiting = exists().where(own, ~assignments.c.is_done, ~assignments.c.is_surplus)
    is_archived = exists().where(own, assignments.c.is_archived)
    agrees_little: ColumnElement[bool] = and_(
        summary.disagreement > 0, summary.disagreement >= threshold.min_disagreement
    )
    if threshold.fewer_than:
        agrees_little = or_(agrees_little, summary.num_agreeing < threshold.fewer_than)
    conditions = [agrees_little, ~summary.is_adjudicated, summary.num_answers > 0, ~is_waiting, ~is_archived]
    if threshold.batch:
        conditions.append(summary.batch == threshold.batch)
    is_ordinary = and_(cast(tasks.c.gold_ranks, String) == "[]", tasks.c.repeat_of == "")
    joined = statement.select_from(task_summaries).join(tasks, tasks.c.position == summary.task)
    return joined.where(*conditions, is_ordinary)
