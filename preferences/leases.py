"""Leases: which labeler works on which task, and the SQL that grants, renews and releases assignments.

A task has one assignment (a row of `places`) for each labeler that it wants. An assignment is free, leased or done. A
lease that ran out stays with its labeler until another labeler takes the assignment. All functions run within the
caller's transaction; `who` is a labeler's pseudonym.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    ScalarSelect,
    Select,
    and_,
    bindparam,
    false,
    func,
    or_,
    select,
    text,
    true,
    update,
)

from preferences.records import ShownTask
from preferences.schema import assignments, judgments, tasks

NUM_DRAWS = 24  # random tasks to try before those in order of arrival
_LEASING = 7_243_002  # first half of the key of a labeler's advisory lock

Assignment = tuple[int, int]  # a task's position, and the assignment's number within the task
Entry = TypeVar("Entry")


class LeaseLostError(RuntimeError):
    """The lease ran out and other labelers took the task's assignments: the answer was not stored."""


@dataclass(frozen=True)
class Lease:
    """One task reserved for one labeler. `order[i]` is the canonical index of the response shown at position i.

    `revision` is the number that the labeler's next judgment of the task will have. `handle` identifies the task to the
    labeler without revealing its id. `given_at` is when this lease was first granted, or when the labeler revealed a
    task with a warning, or 0 without a live lease.
    """

    shown: ShownTask
    labeler: str
    order: tuple[int, ...]
    expires_at: float  # seconds since the epoch
    revision: int = 0
    handle: str = ""
    given_at: float = 0.0  # seconds since the epoch
    is_revealed: bool = False
    is_done: bool = False  # the labeler's own answer to the task counts now; a further one replaces it

    @property
    def is_hidden(self) -> bool:
        """Whether the task has a warning and the labeler has not yet asked to see the task."""
        return bool(self.shown.warning) and not self.is_revealed

    @property
    def task_id(self) -> str:
        return self.shown.task_id


def display_order(task_id: str, labeler: str, num_responses: int) -> tuple[int, ...]:
    """Returns the order in which `labeler` sees the task's responses, as canonical indices.

    It depends only on (task_id, labeler), so a reload or a restart shows the same order. Over tasks and labelers every
    order is equally likely, so no source benefits from its position.
    """

    def key(index: int) -> bytes:
        return hashlib.sha256(json.dumps(["display order", task_id, labeler, index]).encode()).digest()

    return tuple(sorted(range(num_responses), key=key))


def canonical(order: Sequence[int], entries: Sequence[Entry]) -> list[Entry]:
    """Puts entries from the order shown back into canonical order. An empty list stays empty."""
    back = dict(zip(order, entries, strict=True)) if entries else {}
    return [back[index] for index in range(len(back))]


class AssignmentState(NamedTuple):
    """One assignment of a task. `labeler` (None = nobody) has it until `expires_at`, or has finished it."""

    number: int
    labeler: str | None
    expires_at: float
    is_done: bool
    is_surplus: bool = False
    is_archived: bool = False

    def is_free(self, now: float) -> bool:
        """Whether another labeler may take it."""
        is_offered = not self.is_done and not self.is_surplus and not self.is_archived
        return is_offered and (self.labeler is None or self.expires_at <= now)


def lock_labeler(connection: Connection, labeler: str) -> None:
    """Serialises one labeler's requests until the transaction ends. SQLite has a single writer anyway.

    On PostgreSQL it also turns sorting off, so that the planner reads assignments in index order and stops at the first
    open one. Until PostgreSQL has statistics on a new batch, it assumes that the batch is small and would sort all open
    assignments for every page.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_LEASING, func.hashtext(labeler))))
        connection.execute(text("SET LOCAL enable_sort = off"))


def live(connection: Connection, who: str, now: float, batch: str) -> list[Assignment]:
    """Returns the labeler's live leases in the batch, in the tasks' order of arrival, and locks their rows."""
    mine = select(assignments.c.task, assignments.c.place).where(
        assignments.c.labeler == who,
        assignments.c.expires_at > now,
        ~assignments.c.is_done,
        assignments.c.batch == batch,
    )
    return [(row.task, row.place) for row in connection.execute(mine.order_by(assignments.c.task).with_for_update())]


def drawn(connection: Connection, who: str, now: float, batch: str, fits: ColumnElement[bool]) -> list[int]:
    """Draws task positions, with replacement, for a labeler to try first. Returns those that are open.

    The draws depend only on the labeler's pseudonym (which is random, so the order differs between stores), the batch
    and how many of its tasks they have judged. So they are the same after a reload, a restart or an expired lease. Late
    in a batch few of the drawn tasks are open; then tasks come in order of arrival.
    """
    ends = select(func.min(tasks.c.position), func.max(tasks.c.position)).where(tasks.c.batch == batch)
    first, last = connection.execute(ends).one()
    if first is None:
        return []
    mine = (assignments.c.batch == batch, assignments.c.labeler == who, assignments.c.is_done)
    num_done = connection.scalar(select(func.count()).where(*mine)) or 0
    seed = hashlib.sha256(json.dumps(["task order", who, batch, num_done]).encode()).digest()
    draws = [random.Random(seed + bytes([number])).randint(first, last) for number in range(NUM_DRAWS)]
    # Unlocked: `lease_open` checks again, and a lock on all of them would keep others from taking any.
    found = select(assignments.c.task).where(assignments.c.task.in_(draws), fits, *_is_open(who, now, batch))
    is_open = set(connection.scalars(found))
    return [position for position in dict.fromkeys(draws) if position in is_open]


def lease_open(
    connection: Connection,
    who: str,
    now: float,
    expires_at: float,
    *,
    batch: str,
    limit: int,
    fits: ColumnElement[bool],
    positions: Sequence[int] | None = None,
) -> list[Assignment]:
    """Leases assignments of up to `limit` tasks (only those at `positions`, if given) that are open for the labeler.

    `fits` is the condition that the labeler's tags set (`assignment.fitting`).

    A task is open for a labeler who has not judged, leased or skipped it, if one of its assignments is free or its
    lease ran out. A repeat opens once the labeler has judged the task that it repeats.
    """
    among = true() if positions is None else assignments.c.task.in_(positions)
    candidates = (
        select(assignments.c.task, assignments.c.place)
        .where(among, fits, *_is_open(who, now, batch))
        .order_by(assignments.c.task, assignments.c.place)
        .with_for_update(skip_locked=True, of=assignments)  # PostgreSQL: skip what another request is taking
    )
    leased: list[Assignment] = []
    while len(leased) < limit:
        first: dict[int, int] = {}  # several assignments of one task may be free
        for task, number in connection.execute(candidates.limit(limit - len(leased))):
            first.setdefault(task, number)
        if not first:
            break
        grant(connection, who, first.items(), now, expires_at)
        leased += first.items()
    return sorted(leased)


def grant(connection: Connection, who: str, chosen: Iterable[Assignment], now: float, expires_at: float) -> None:
    """Leases these assignments to the labeler, from now until `expires_at`."""
    _update(connection, chosen, labeler=who, expires_at=expires_at, is_done=False, given_at=now, is_revealed=False)


def reveal(connection: Connection, who: str, position: int, now: float) -> None:
    """Marks a task as revealed to the labeler who has leased or judged it. Time on it counts from the first reveal.

    A task that was judged through the API, or elsewhere, may be revealed for the first time when its answer is changed.
    """
    own = update(assignments).where(assignments.c.task == position, assignments.c.labeler == who)
    connection.execute(own.where(~assignments.c.is_revealed).values(is_revealed=True, given_at=now))


def num_left(
    connection: Connection, who: str, now: float, batch: str, limit: int, fits: ColumnElement[bool] | None
) -> int:
    """Counts the batch's tasks that the labeler has leased or may still lease, up to `limit`.

    `fits` is as in `lease_open`, or None if the labeler may lease nothing of the batch.
    """
    mine = and_(assignments.c.labeler == who, assignments.c.expires_at > now, ~assignments.c.is_done)
    may_lease = false() if fits is None else and_(fits, _is_free(now), _is_new_to(who), _is_due_to(who))
    left = select(assignments.c.task).where(assignments.c.batch == batch, or_(mine, may_lease)).distinct().limit(limit)
    return connection.scalar(select(func.count()).select_from(left.subquery())) or 0


def renew(connection: Connection, chosen: Iterable[Assignment], expires_at: float) -> None:
    """Extends these leases. `given_at` stays, because the time on a task is counted from there."""
    _update(connection, chosen, expires_at=expires_at)


def finish(connection: Connection, who: str, chosen: Iterable[Assignment]) -> None:
    """Marks these assignments as judged by the labeler."""
    _update(connection, chosen, labeler=who, expires_at=0.0, is_done=True)


def release(connection: Connection, chosen: Iterable[Assignment]) -> None:
    """Makes these assignments free for other labelers."""
    _update(connection, chosen, labeler=None, expires_at=0.0, is_done=False, given_at=0.0)


def release_all(connection: Connection, labeler: str, who: str) -> None:
    """Frees all assignments that the labeler has leased but not finished. Finished assignments stay theirs."""
    lock_labeler(connection, labeler)
    leased = update(assignments).where(assignments.c.labeler == who, ~assignments.c.is_done)
    connection.execute(leased.values(labeler=None, expires_at=0.0))


def lock(connection: Connection, positions: Sequence[int]) -> dict[int, list[AssignmentState]]:
    """Returns all assignments of these tasks, by task, locked until the transaction ends."""
    columns = (assignments.c.task, assignments.c.place, assignments.c.labeler, assignments.c.expires_at)
    statement = select(*columns, assignments.c.is_done, assignments.c.is_surplus, assignments.c.is_archived)
    statement = statement.where(assignments.c.task.in_(positions)).order_by(assignments.c.task, assignments.c.place)
    found: dict[int, list[AssignmentState]] = {position: [] for position in positions}
    for task, *state in connection.execute(statement.with_for_update()):
        found[task].append(AssignmentState(*state))
    return found


def is_open_to(connection: Connection, who: str, now: float, batch: str) -> bool:
    """Whether the batch has a task that is open for the labeler, apart from the tags that it requires."""
    return connection.scalar(select(assignments.c.task).where(*_is_open(who, now, batch)).limit(1)) is not None


def _update(connection: Connection, chosen: Iterable[Assignment], **values: object) -> None:
    rows = [{"its_task": task, "its_number": number} for task, number in chosen]
    if rows:
        here = and_(assignments.c.task == bindparam("its_task"), assignments.c.place == bindparam("its_number"))
        connection.execute(update(assignments).where(here).values(**values), rows)


def _is_open(who: str, now: float, batch: str) -> tuple[ColumnElement[bool], ...]:
    return (assignments.c.batch == batch, _is_free(now), _is_new_to(who), _is_due_to(who))


def _is_free(now: float) -> ColumnElement[bool]:
    is_offered = and_(~assignments.c.is_done, ~assignments.c.is_surplus, ~assignments.c.is_archived)
    return and_(is_offered, or_(assignments.c.labeler.is_(None), assignments.c.expires_at <= now))


# These are counts although EXISTS would do: PostgreSQL turns EXISTS into a join over all assignments, whose cost grows
# with the store. A count is evaluated per candidate, by index, and the search stops at the first open candidate.


def _is_new_to(who: str) -> ColumnElement[bool]:
    """Whether the labeler has no other assignment of the task, and did not skip it with their last judgment."""
    other = assignments.alias("other")
    num_others = select(func.count()).where(
        other.c.task == assignments.c.task, other.c.labeler == who, other.c.place != assignments.c.place
    )
    last_kind = (
        select(judgments.c.kind)
        .where(judgments.c.task == assignments.c.task, judgments.c.labeler == who)
        .order_by(judgments.c.revision.desc())
        .limit(1)
    )
    return and_(_per_assignment(num_others) == 0, func.coalesce(_per_assignment(last_kind), "") != "skip")


def _is_due_to(who: str) -> ColumnElement[bool]:
    """Whether the task repeats nothing, or the labeler has judged the task that it repeats."""
    original = assignments.alias("original")
    num_judged = select(func.count()).where(
        original.c.task == assignments.c.original, original.c.labeler == who, original.c.is_done
    )
    return or_(assignments.c.original == 0, _per_assignment(num_judged) > 0)


def _per_assignment(statement: Select[Any]) -> ScalarSelect[Any]:
    """Returns the statement as a subquery that is evaluated for each candidate assignment."""
    return statement.correlate(assignments).scalar_subquery()
