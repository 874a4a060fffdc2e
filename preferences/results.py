"""What is read from the label store. SQL over all tables, within a caller's transaction."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, Subquery, and_, case, func, select, true

from preferences.records import Judgment, Message, Ranking, Task
from preferences.rows import Values, as_judgment, as_task, messages
from preferences.schema import judgments, places, tasks
from preferences.standing import held_back, ranking_of, standing


@dataclass(frozen=True)
class Progress:
    """How far a batch is. An open task has fewer judgments than labelers asked for."""

    num_tasks: int
    num_judgments: int
    num_open: int


@dataclass(frozen=True)
class Coverage:
    """Who has judged a task, by name in sorted order, and how many distinct labelers were asked for."""

    task_id: str
    num_labelers: int
    judged_by: tuple[str, ...]


@dataclass(frozen=True)
class StoredTask:
    """A task with the batch that it came in and how many labelers it wants."""

    task: Task
    batch: str
    num_labelers: int
    handle: str = field(default="", compare=False)  # what labelers are shown instead of its id; each store has its own


@dataclass(frozen=True)
class PastAct:
    """An act of a labeler, with what they may know of its task: the handle and the prompt."""

    judgment: Judgment
    handle: str
    prompt: tuple[Message, ...]


@dataclass(frozen=True)
class BatchCounts:
    """How far a batch is, place by place, and who has judged how much of it."""

    name: str
    num_tasks: int
    num_open: int  # tasks with fewer judgments than wanted
    num_wanted: int  # judgments
    num_judgments: int
    num_held: int  # with labelers just now
    by_labeler: dict[str, int]


def batches(connection: Connection) -> list[str]:
    """Names, in order of arrival. Asked with every page: from name to name along the index, not over all tasks."""
    first: dict[str, int] = {}
    name = connection.scalar(select(func.min(tasks.c.batch)))
    while name is not None:
        first[name] = connection.scalar(select(func.min(tasks.c.position)).where(tasks.c.batch == name)) or 0
        name = connection.scalar(select(func.min(tasks.c.batch)).where(tasks.c.batch > name))
    return sorted(first, key=first.__getitem__)


def task_rows(connection: Connection, batch: str) -> dict[str, Values]:
    """By id, in order of arrival."""
    statement = select(tasks).where(tasks.c.batch == batch).order_by(tasks.c.position)
    return {row["task_id"]: dict(row) for row in connection.execute(statement).mappings()}


def stored_tasks(connection: Connection, batch: str) -> list[StoredTask]:
    """In order of arrival."""
    return [
        StoredTask(as_task(row), batch, row["num_labelers"], row["handle"])
        for row in task_rows(connection, batch).values()
    ]


def judgments_of(connection: Connection, batch: str) -> list[Judgment]:
    """Every act on the batch's tasks, in the order in which they were stored."""
    statement = _acts().where(tasks.c.batch == batch).order_by(judgments.c.judgment_id)
    return _as_judgments(connection.execute(statement).mappings())


def history(connection: Connection, labeler: str, limit: int) -> list[PastAct]:
    """The labeler's last acts, the newest first."""
    statement = _acts(tasks.c.handle, tasks.c.prompt).where(judgments.c.labeler == labeler)
    rows = connection.execute(statement.order_by(judgments.c.judgment_id.desc()).limit(limit)).mappings()
    return [PastAct(as_judgment(dict(row)), row["handle"], messages(row["prompt"])) for row in rows]


def num_standing(connection: Connection, labeler: str) -> int:
    """How many of the labeler's answers stand."""
    done = select(func.count()).where(places.c.labeler == labeler, places.c.is_done)
    return connection.scalar(done) or 0


def rankings(connection: Connection, batch: str) -> list[Ranking]:
    """What settles each task (`preferences.standing`), in the tasks' order of arrival, then by labeler name.

    Gold tasks and hidden repeats are left out: they measure labelers.
    """
    settled: dict[str, list[Judgment]] = {}
    for act in standing(judgments_of(connection, batch)).settled:
        settled.setdefault(act.task_id, []).append(act)
    return [
        ranking_of(stored.task, act)
        for stored in stored_tasks(connection, batch)
        if not held_back(stored.task)
        for act in sorted(settled.get(stored.task.task_id, []), key=lambda act: act.labeler)
    ]


def coverage(connection: Connection, batch: str) -> list[Coverage]:
    """Who has judged each task of the batch, in order of arrival."""
    done = and_(places.c.task == tasks.c.position, places.c.is_done)
    statement = (
        select(tasks.c.task_id, tasks.c.num_labelers, places.c.labeler)
        .outerjoin(places, done)
        .where(tasks.c.batch == batch)
        .order_by(tasks.c.position, places.c.labeler)
    )
    quotas: dict[str, int] = {}
    judged_by: dict[str, list[str]] = {}
    for task_id, num_labelers, labeler in connection.execute(statement):
        quotas[task_id] = num_labelers
        judged_by.setdefault(task_id, []).extend([] if labeler is None else [labeler])
    return [Coverage(task_id, quota, tuple(judged_by[task_id])) for task_id, quota in quotas.items()]


def progress(connection: Connection, batch: str) -> Progress:
    """Counts over one batch; all 0 for a batch without tasks."""
    by_task = _by_task(places.c.batch == batch, now=0.0)
    sums = [func.coalesce(column, 0) for column in (_num_open(by_task), func.sum(by_task.c.done))]
    num_tasks, num_open, num_judgments = connection.execute(select(func.count(by_task.c.task), *sums)).one()
    return Progress(num_tasks=num_tasks, num_judgments=num_judgments, num_open=num_open)


def batch_counts(connection: Connection, now: float) -> list[BatchCounts]:
    """Of all batches, in order of arrival; from the places alone, so that it is quick."""
    by_task = _by_task(true(), now)
    sums = [_num_open(by_task), *(func.sum(column) for column in (by_task.c.wanted, by_task.c.done, by_task.c.held))]
    found = connection.execute(select(by_task.c.batch, func.count(), *sums).group_by(by_task.c.batch))
    numbers = {row[0]: (row[1], row[2], row[3], row[4], row[5]) for row in found}
    who = select(places.c.batch, places.c.labeler, func.count()).where(places.c.is_done)
    by_labeler: dict[str, dict[str, int]] = {}
    for batch, labeler, number in connection.execute(who.group_by(places.c.batch, places.c.labeler)):
        by_labeler.setdefault(batch, {})[labeler] = number
    return [
        BatchCounts(name, *numbers[name], by_labeler=dict(sorted(by_labeler.get(name, {}).items())))
        for name in batches(connection)
    ]


def _by_task(which: ColumnElement[bool], now: float) -> Subquery:
    """Of each task, how many of its places are done, held just now, and wanted."""
    done = func.sum(case((places.c.is_done, 1), else_=0))
    held = func.sum(
        case((and_(~places.c.is_done, places.c.labeler.is_not(None), places.c.expires_at > now), 1), else_=0)
    )
    columns = (places.c.batch, places.c.task, done.label("done"), held.label("held"), func.count().label("wanted"))
    return select(*columns).where(which).group_by(places.c.batch, places.c.task).subquery()


def _num_open(by_task: Subquery) -> ColumnElement[int]:
    return func.sum(case((by_task.c.done < by_task.c.wanted, 1), else_=0))


def newest_judgment(connection: Connection, batch: str) -> int:
    """Number of the batch's newest judgment; 0 = none."""
    newest = select(func.max(judgments.c.judgment_id)).join(tasks, judgments.c.task == tasks.c.position)
    return connection.scalar(newest.where(tasks.c.batch == batch)) or 0


def content_hash(connection: Connection, batch: str) -> str:
    """SHA-256 over what was judged and how, sorted by (task_id, labeler); for lineage.

    Covers each judged task's prompt, responses, sources and objective, and of each judgment that stands the ranks,
    ratings, flags, note, order shown, labeler and instructions version. Leaves out how it came in: times, milliseconds,
    client, order of arrival, what was taken back.
    """
    stands = standing(judgments_of(connection, batch))
    known = task_rows(connection, batch)
    digest = hashlib.sha256()
    for act in sorted((*stands.answers, *stands.adjudications), key=lambda act: (act.task_id, act.labeler)):
        task = known[act.task_id]
        what = [task[name] for name in ("task_id", "prompt", "responses", "sources", "objective")]
        how = [act.labeler, act.kind, act.ranks, act.ratings, act.flags, act.note, act.shown_order]
        digest.update(json.dumps([*what, *how, act.instructions_version]).encode() + b"\n")
    return digest.hexdigest()


def _acts(*more: ColumnElement[Any]) -> Select[Any]:
    return select(tasks.c.task_id, judgments, *more).join(tasks, judgments.c.task == tasks.c.position)


def _as_judgments(rows: Iterable[RowMapping]) -> list[Judgment]:
    return [as_judgment(dict(row)) for row in rows]
