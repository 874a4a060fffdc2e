"""The label store: tasks go in, labelers lease and answer them, rankings come out.

Promises: an answer that `submit` returned from is on disk; no (task, labeler) is stored twice; no task gets more
labelers than asked for. Any number of processes may use one store at a time; each call is one transaction.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlalchemy import ColumnElement, Connection, Row, and_, delete, func, insert, or_, select, true

from preferences.leasing import Lease, LeaseLostError, display_order
from preferences.records import Answer, Ranking, ShownTask, Task
from preferences.rows import answer_row, messages, parts, refuse_different, task_row
from preferences.schema import judgments, leases, open_engines, tasks


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


class LabelStore:
    """Tasks, leases and judgments in one SQLite file (a path, or a `sqlite:///` URL). `clock` gives epoch seconds."""

    def __init__(self, url_or_path: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._reader, self._writer = open_engines(url_or_path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._reader.dispose()

    # ---- tasks in ----

    def add_tasks(self, new_tasks: Sequence[Task], *, batch: str, num_labelers: int | Sequence[int]) -> None:
        """Add tasks, each to be judged by `num_labelers` distinct labelers (one number, or one per task).

        All or none are added. A task that is already there with the same content is left alone, so a killed caller
        can repeat the call.

        Raises ValueError, naming the task, if its id is taken by other content or a field is malformed.
        """
        quotas = [num_labelers] * len(new_tasks) if isinstance(num_labelers, int) else list(num_labelers)
        if len(quotas) != len(new_tasks):
            raise ValueError(f"num_labelers has {len(quotas)} entries for {len(new_tasks)} tasks")
        wanted = [task_row(task, batch, quota) for task, quota in zip(new_tasks, quotas, strict=True)]
        with self._writer.begin() as connection:
            known: dict[str, dict[str, Any]] = {}
            for part in parts([row["task_id"] for row in wanted]):
                for found in connection.execute(select(tasks).where(tasks.c.task_id.in_(part))).mappings():
                    known[found["task_id"]] = dict(found)
            missing = []
            for row in wanted:
                if row["task_id"] in known:
                    refuse_different(row, known[row["task_id"]])
                else:
                    known[row["task_id"]] = row
                    missing.append(row)
            if missing:
                connection.execute(insert(tasks), missing)

    # ---- leases ----

    def lease(self, labeler: str, *, seconds: float, batch: str | None = None) -> Lease | None:
        """The task `labeler` should judge next, reserved for `seconds`; None when none is open for them.

        A lease that the labeler still holds is renewed and returned again, responses in the same order.
        """
        granted = self.lease_many(labeler, 1, seconds=seconds, batch=batch)
        return granted[0] if granted else None

    def lease_many(self, labeler: str, num_tasks: int, *, seconds: float, batch: str | None = None) -> list[Lease]:
        """Up to `num_tasks` leases: first those the labeler still holds, then new ones in order of arrival.

        A task is open for a labeler who has not judged it while its judgments and the live leases of others are
        fewer than the labelers asked for. Without `batch`, tasks of all batches are offered.
        """
        _check_lease(labeler, seconds)
        if num_tasks < 1:
            raise ValueError(f"num_tasks is {num_tasks}; at least 1 was expected")
        in_batch = true() if batch is None else tasks.c.batch == batch
        with self._writer.begin() as connection:
            now = self._clock()
            is_held = _is_held_by(labeler, now)
            held_positions = select(leases.c.task).where(leases.c.labeler == labeler, leases.c.expires_at > now)
            held = select(tasks).where(tasks.c.position.in_(held_positions), in_batch)
            rows = list(connection.execute(held.order_by(tasks.c.position).limit(num_tasks)))
            if len(rows) < num_tasks:
                fresh = select(tasks).where(in_batch, ~is_held, _is_open_for(labeler, now))
                rows += connection.execute(fresh.order_by(tasks.c.position).limit(num_tasks - len(rows)))
            return _grant(connection, rows, labeler, now, now + seconds)

    def lease_these(self, labeler: str, task_ids: Sequence[str], *, seconds: float) -> list[Lease]:
        """Leases on those of `task_ids` that are open for the labeler, in order of arrival."""
        _check_lease(labeler, seconds)
        with self._writer.begin() as connection:
            now = self._clock()
            rows: list[Row[Any]] = []
            for part in parts(task_ids):
                rows += connection.execute(
                    select(tasks).where(tasks.c.task_id.in_(part), _is_open_for(labeler, now))
                ).all()
            rows.sort(key=lambda row: row.position)
            return _grant(connection, rows, labeler, now, now + seconds)

    # ---- answers ----

    def submit(self, lease: Lease, answer: Answer, *, client: str, instructions_version: str) -> None:
        """Store one answer; on return it is on disk. See `submit_many`."""
        self.submit_many([lease], [answer], client=client, instructions_version=instructions_version)

    def submit_many(
        self, held: Sequence[Lease], answers: Sequence[Answer], *, client: str, instructions_version: str
    ) -> None:
        """Store one labeler's answers, all or none; `answers[i].ranks` follow the order in which `held[i]` was shown.

        An answer that is already stored (same task, labeler, ranks and flags) is accepted and not stored again. An
        answer whose lease ran out is still taken while the task has a place for it.

        Raises ValueError for a malformed answer, an unknown task, or one that contradicts the labeler's stored
        answer; LeaseLostError if the lease ran out and the task's places went to others.
        """
        if len(held) != len(answers):
            raise ValueError(f"answers has {len(answers)} entries for {len(held)} leases")
        if not held:
            return
        labeler = held[0].labeler
        for lease in held:
            if lease.labeler != labeler:
                raise ValueError(f"leases of {labeler!r} and {lease.labeler!r} in one call; one labeler was expected")
        shared = {"labeler": labeler, "client": client, "instructions_version": instructions_version}
        # Everything that can be refused without the database is refused before the write lock is taken.
        rows = [shared | answer_row(lease, answer) for lease, answer in zip(held, answers, strict=True)]
        with self._writer.begin() as connection:
            now = self._clock()
            for part in parts(rows):
                _record(connection, part, labeler, now)

    # ---- results out ----

    def rankings(self, batch: str | None = None) -> list[Ranking]:
        """All judgments, in the tasks' order of arrival, then by labeler name."""
        in_batch = true() if batch is None else tasks.c.batch == batch
        statement = (
            select(tasks, judgments.c.labeler, judgments.c.ranks)
            .join(judgments, judgments.c.task == tasks.c.position)
            .where(in_batch)
            .order_by(tasks.c.position, judgments.c.labeler)
        )
        with self._reader.begin() as connection:
            return [
                Ranking(row.task_id, messages(row.prompt), tuple(row.responses), tuple(row.ranks), row.labeler)
                for row in connection.execute(statement)
            ]

    def coverage(self, batch: str) -> list[Coverage]:
        """Who has judged each task of the batch, in order of arrival."""
        statement = (
            select(tasks.c.task_id, tasks.c.num_labelers, judgments.c.labeler)
            .outerjoin(judgments, judgments.c.task == tasks.c.position)
            .where(tasks.c.batch == batch)
            .order_by(tasks.c.position, judgments.c.labeler)
        )
        quotas: dict[str, int] = {}
        judged_by: dict[str, list[str]] = {}
        with self._reader.begin() as connection:
            for task_id, num_labelers, labeler in connection.execute(statement):
                quotas[task_id] = num_labelers
                judged_by.setdefault(task_id, []).extend([] if labeler is None else [labeler])
        return [Coverage(task_id, quota, tuple(judged_by[task_id])) for task_id, quota in quotas.items()]

    def progress(self, batch: str) -> Progress:
        """Counts over one batch; all 0 for a batch without tasks."""
        num_judged = _num_judgments()
        statement = select(
            func.count(),
            func.coalesce(func.sum(num_judged), 0),
            func.count().filter(num_judged < tasks.c.num_labelers),
        ).where(tasks.c.batch == batch)
        with self._reader.begin() as connection:
            num_tasks, num_judgments, num_open = connection.execute(statement).one()
        return Progress(num_tasks=num_tasks, num_judgments=num_judgments, num_open=num_open)

    def content_hash(self, batch: str) -> str:
        """SHA-256 over what was judged and how, sorted by (task_id, labeler); for lineage.

        Covers each judged task's prompt, responses and sources, and each judgment's ranks, order shown, flags,
        labeler and instructions version. Leaves out how it came in: times, milliseconds, client, order of arrival.
        """
        judged = (judgments.c.ranks, judgments.c.shown_order, judgments.c.flags, judgments.c.instructions_version)
        statement = (
            select(tasks.c.task_id, judgments.c.labeler, tasks.c.prompt, tasks.c.responses, tasks.c.sources, *judged)
            .join(judgments, judgments.c.task == tasks.c.position)
            .where(tasks.c.batch == batch)
            .order_by(tasks.c.task_id, judgments.c.labeler)
        )
        digest = hashlib.sha256()
        with self._reader.begin() as connection:
            for row in connection.execute(statement):
                digest.update(json.dumps(list(row)).encode() + b"\n")
        return digest.hexdigest()


# ---- conditions ----


def _num_judgments() -> ColumnElement[int]:
    return select(func.count()).where(judgments.c.task == tasks.c.position).correlate(tasks).scalar_subquery()


def _is_held_by(labeler: str, now: float) -> ColumnElement[bool]:
    mine = select(leases.c.task).where(
        leases.c.task == tasks.c.position, leases.c.labeler == labeler, leases.c.expires_at > now
    )
    return mine.correlate(tasks).exists()


def _has_room_for(labeler: str, now: float) -> ColumnElement[bool]:
    others = select(func.count()).where(
        leases.c.task == tasks.c.position, leases.c.labeler != labeler, leases.c.expires_at > now
    )
    return _num_judgments() + others.correlate(tasks).scalar_subquery() < tasks.c.num_labelers


def _is_open_for(labeler: str, now: float) -> ColumnElement[bool]:
    mine = select(judgments.c.task).where(judgments.c.task == tasks.c.position, judgments.c.labeler == labeler)
    return and_(~mine.correlate(tasks).exists(), _has_room_for(labeler, now))


# ---- rows ----


def _grant(
    connection: Connection, rows: Sequence[Row[Any]], labeler: str, now: float, expires_at: float
) -> list[Lease]:
    for part in parts([row.position for row in rows]):
        spent = or_(leases.c.labeler == labeler, leases.c.expires_at <= now)
        connection.execute(delete(leases).where(leases.c.task.in_(part), spent))
        renewed = [{"task": position, "labeler": labeler, "expires_at": expires_at} for position in part]
        connection.execute(insert(leases), renewed)
    granted = []
    for row in rows:
        order = display_order(row.task_id, labeler, len(row.responses))
        responses = tuple(row.responses[index] for index in order)
        granted.append(Lease(ShownTask(row.task_id, messages(row.prompt), responses), labeler, order, expires_at))
    return granted


def _record(connection: Connection, rows: Sequence[dict[str, Any]], labeler: str, now: float) -> None:
    mine = and_(judgments.c.task == tasks.c.position, judgments.c.labeler == labeler)
    statement = (
        select(tasks.c.task_id, tasks.c.position, judgments.c.ranks, judgments.c.flags)
        .add_columns(or_(_is_held_by(labeler, now), _has_room_for(labeler, now)).label("has_place"))
        .outerjoin(judgments, mine)
        .where(tasks.c.task_id.in_([row["task_id"] for row in rows]))
    )
    found = {row.task_id: row for row in connection.execute(statement)}
    stored = {row.task_id: (row.ranks, row.flags) for row in found.values() if row.ranks is not None}
    new = []
    for row in rows:
        where = f"task {row['task_id']!r}, labeler {labeler!r}"
        if row["task_id"] not in found:
            raise ValueError(f"{where}: task_id is not in the store")
        answer = (row["ranks"], row["flags"])
        if row["task_id"] in stored:
            if stored[row["task_id"]] != answer:
                raise ValueError(f"{where}: ranks, flags {answer} differ from the stored {stored[row['task_id']]}")
        elif not found[row["task_id"]].has_place:
            raise LeaseLostError(f"{where}: the lease ran out and others took the task's places")
        else:
            stored[row["task_id"]] = answer
            position = found[row["task_id"]].position
            new.append({key: row[key] for key in row if key != "task_id"} | {"task": position, "created_at": now})
    if new:
        connection.execute(insert(judgments), new)
        done = leases.c.task.in_([row["task"] for row in new])
        connection.execute(delete(leases).where(leases.c.labeler == labeler, done))


def _check_lease(labeler: str, seconds: float) -> None:
    if not labeler:
        raise ValueError("labeler is empty; a name was expected")
    if not seconds > 0:
        raise ValueError(f"seconds is {seconds}; a lease longer than 0 was expected")
