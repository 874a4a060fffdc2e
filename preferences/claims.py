"""Who works on what: places of tasks, claimed for a time. SQL over `places`, within a caller's transaction.

A place is free, held (its lease may have run out: whoever holds it keeps it until another takes it), or done.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    ScalarSelect,
    Select,
    and_,
    bindparam,
    func,
    or_,
    select,
    text,
    true,
    update,
)

from preferences.schema import judgments, places

_LEASING = 7_243_002  # first half of the advisory locks of those who lease

Place = tuple[int, int]  # a task's position, and which of its places


class PlaceState(NamedTuple):
    """One place of a task: `labeler` (None = nobody) holds it until `expires_at`, or is done with it."""

    place: int
    labeler: str | None
    expires_at: float
    is_done: bool

    def is_free(self, now: float) -> bool:
        """Whether another than its labeler may take it."""
        return not self.is_done and (self.labeler is None or self.expires_at <= now)


def one_at_a_time(connection: Connection, labeler: str) -> None:
    """A labeler's pages take turns. SQLite has one writer anyway; PostgreSQL is told.

    It is told as well to read places in the order of an index and to stop at the first that is open. Before it has
    statistics of a new batch it takes the batch for small, and would sort all that is open for every page.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_LEASING, func.hashtext(labeler))))
        connection.execute(text("SET LOCAL enable_sort = off"))


def held(connection: Connection, labeler: str, now: float, batch: str) -> list[Place]:
    """What the labeler holds, leases not run out, in the tasks' order of arrival; nobody answers it meanwhile."""
    mine = select(places.c.task, places.c.place).where(
        places.c.labeler == labeler, places.c.expires_at > now, ~places.c.is_done, places.c.batch == batch
    )
    return [(row.task, row.place) for row in connection.execute(mine.order_by(places.c.task).with_for_update())]


def claim(
    connection: Connection,
    labeler: str,
    now: float,
    expires_at: float,
    *,
    batch: str,
    limit: int,
    positions: Sequence[int] | None = None,
) -> list[Place]:
    """Hold places of up to `limit` tasks (among `positions`, where given) that are open for the labeler.

    Open: neither done, held nor skipped by them, with a place that is free or whose lease ran out; a repeat, once they
    have judged what it repeats.
    """
    among = true() if positions is None else places.c.task.in_(positions)
    candidates = (
        select(places.c.task, places.c.place)
        .where(places.c.batch == batch, _is_free(now), among, _is_new_to(labeler), _is_due_to(labeler))
        .order_by(places.c.task, places.c.place)
        .with_for_update(skip_locked=True, of=places)  # PostgreSQL: what another is taking is passed over
    )
    claimed: list[Place] = []
    while len(claimed) < limit:
        first: dict[int, int] = {}  # several places of one task may be free
        for task, place in connection.execute(candidates.limit(limit - len(claimed))):
            first.setdefault(task, place)
        if not first:
            break
        hold(connection, labeler, first.items(), now, expires_at)
        claimed += first.items()
    return sorted(claimed)


def hold(connection: Connection, labeler: str, chosen: Iterable[Place], now: float, expires_at: float) -> None:
    """Give the labeler these places, from now until `expires_at`."""
    _update(connection, chosen, labeler=labeler, expires_at=expires_at, is_done=False, given_at=now)


def renew(connection: Connection, chosen: Iterable[Place], expires_at: float) -> None:
    """Let whoever holds these places hold them until then. When they were given stays: time counts from there."""
    _update(connection, chosen, expires_at=expires_at)


def finish(connection: Connection, labeler: str, chosen: Iterable[Place]) -> None:
    """The labeler has judged these."""
    _update(connection, chosen, labeler=labeler, expires_at=0.0, is_done=True)


def free(connection: Connection, chosen: Iterable[Place]) -> None:
    """Others may take these."""
    _update(connection, chosen, labeler=None, expires_at=0.0, is_done=False, given_at=0.0)


def free_all(connection: Connection, labeler: str) -> None:
    """Others may take all that the labeler holds; what they are done with stays theirs."""
    one_at_a_time(connection, labeler)
    holds = update(places).where(places.c.labeler == labeler, ~places.c.is_done)
    connection.execute(holds.values(labeler=None, expires_at=0.0))


def lock(connection: Connection, positions: Sequence[int]) -> dict[int, list[PlaceState]]:
    """All places of these tasks, by task; nobody else changes them before this transaction ends."""
    statement = select(places.c.task, places.c.place, places.c.labeler, places.c.expires_at, places.c.is_done)
    statement = statement.where(places.c.task.in_(positions)).order_by(places.c.task, places.c.place)
    found: dict[int, list[PlaceState]] = {position: [] for position in positions}
    for task, *state in connection.execute(statement.with_for_update()):
        found[task].append(PlaceState(*state))
    return found


def _update(connection: Connection, chosen: Iterable[Place], **values: object) -> None:
    rows = [{"its_task": task, "its_place": place} for task, place in chosen]
    if rows:
        here = and_(places.c.task == bindparam("its_task"), places.c.place == bindparam("its_place"))
        connection.execute(update(places).where(here).values(**values), rows)


def _is_free(now: float) -> ColumnElement[bool]:
    return and_(~places.c.is_done, or_(places.c.labeler.is_(None), places.c.expires_at <= now))


# Counts, where EXISTS would say it too: PostgreSQL turns that into a join over all places, which costs more the larger
# the store is, while a count is taken of each candidate, by index, and the first that is open ends the search.


def _is_new_to(labeler: str) -> ColumnElement[bool]:
    """The labeler has no other place of the task, and their last act on it, if any, is no skip."""
    other = places.alias("other")
    num_others = select(func.count()).where(
        other.c.task == places.c.task, other.c.labeler == labeler, other.c.place != places.c.place
    )
    last_act = (
        select(judgments.c.kind)
        .where(judgments.c.task == places.c.task, judgments.c.labeler == labeler)
        .order_by(judgments.c.revision.desc())
        .limit(1)
    )
    return and_(_of_each(num_others) == 0, func.coalesce(_of_each(last_act), "") != "skip")


def _is_due_to(labeler: str) -> ColumnElement[bool]:
    original = places.alias("original")
    num_judged = select(func.count()).where(
        original.c.task == places.c.original, original.c.labeler == labeler, original.c.is_done
    )
    return or_(places.c.original == 0, _of_each(num_judged) > 0)


def _of_each(statement: Select[Any]) -> ScalarSelect[Any]:
    """The statement's one value for each of the places that are looked at."""
    return statement.correlate(places).scalar_subquery()
