"""Who gets which tasks: closed batches, tags that a labeler needs for a batch or a task, how many labelers a task
wants, and archived tasks.

A lead gives people tags (languages, skills, teams; to give tasks to certain people, give those a tag of their own). A
batch may require tags, and so may a task, through `details["requires"]`, a list of tags. A labeler needs all of them.
The tables hold a requirement as JSON, sorted, or "" if nothing is required.

Assignments are never removed, so those that are no longer wanted are marked as surplus: free ones first, then those
that somebody is working on. A labeler may finish a surplus assignment that they have leased; nobody gets it afterwards.
All functions run within the caller's transaction.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, and_, bindparam, case, func, or_, select, true, update
from sqlalchemy.dialects import postgresql, sqlite

from preferences import leases
from preferences.leases import AssignmentState
from preferences.rows import parts
from preferences.schema import assignments, batch_settings, judgments, requirements

REQUIRES = "requires"  # the key in a task's details
MAX_TAGS, MAX_TAG_CHARACTERS = 20, 40
DAY_SECONDS = 86_400

Nothing = Literal["batches closed", "no fitting task", "nothing open"]


@dataclass(frozen=True)
class BatchSettings:
    """Whether a batch is closed (labelers get no new tasks from it), and the tags that it requires."""

    is_closed: bool = False
    requires: tuple[str, ...] = ()


def as_tags(where: str, tags: Iterable[object]) -> tuple[str, ...]:
    """Returns tags in lower case, each once, sorted. Raises: ValueError for what is no tag."""
    found = set()
    for tag in tags:
        name = " ".join(tag.split()).casefold() if isinstance(tag, str) else ""
        if not 1 <= len(name) <= MAX_TAG_CHARACTERS or not name.isprintable() or "," in name:
            raise ValueError(
                f"{where}: {tag!r} is not a tag; 1 to {MAX_TAG_CHARACTERS} printable characters without a comma were"
                " expected"
            )
        found.add(name)
    if len(found) > MAX_TAGS:
        raise ValueError(f"{where}: {len(found)} tags; at most {MAX_TAGS} were expected")
    return tuple(sorted(found))


def as_requirement(tags: Sequence[str]) -> str:
    return json.dumps(sorted(tags)) if tags else ""


def tags_of(requirement: str) -> tuple[str, ...]:
    return tuple(json.loads(requirement)) if requirement else ()


def required_by(row: Mapping[str, Any]) -> str:
    """Returns the requirement of a task, given as a row of the table.

    Raises: ValueError, naming the task, if `details["requires"]` is not a list of tags.
    """
    given = row["details"].get(REQUIRES, [])
    where = f"task {row['task_id']!r}: details.{REQUIRES}"
    if not isinstance(given, list):
        raise ValueError(f"{where} is {given!r}; a list of tags was expected")
    return as_requirement(as_tags(where, given))


def remember(connection: Connection, new: Iterable[tuple[str, str]]) -> None:
    """Stores which requirements tasks of a batch have, given as (batch, requirement)."""
    rows = [{"batch": batch, "requires": requirement} for batch, requirement in sorted(new) if requirement]
    if rows:
        insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
        connection.execute(insert(requirements).on_conflict_do_nothing(), rows)


# ---- giving tasks ----


def fitting(connection: Connection, batch: str, tags: Collection[str]) -> ColumnElement[bool] | None:
    """Returns the condition for assignments of the batch that a labeler with these tags may get.

    Returns None if there are none: the batch is closed, or requires a tag that the labeler lacks.
    """
    settings = settings_of(connection, batch)
    if settings.is_closed or not set(settings.requires) <= set(tags):
        return None
    known = list(connection.scalars(select(requirements.c.requires).where(requirements.c.batch == batch)))
    fits = [one for one in known if set(tags_of(one)) <= set(tags)]
    return true() if len(fits) == len(known) else assignments.c.requires.in_(["", *fits])


def why_nothing(connection: Connection, who: str, batches: Sequence[str], now: float) -> Nothing:
    """Returns why a labeler gets no task from these batches: "batches closed", "no fitting task" or "nothing open"."""
    is_open = [batch for batch in batches if not settings_of(connection, batch).is_closed]
    if batches and not is_open:
        return "batches closed"
    return "no fitting task" if any(leases.is_open_to(connection, who, now, one) for one in is_open) else "nothing open"


def num_answered_today(connection: Connection, who: str, now: float) -> int:
    """Counts the tasks that a labeler has answered since midnight, UTC. A changed answer counts once."""
    today = judgments.c.created_at >= now - now % DAY_SECONDS
    answered = select(judgments.c.task).where(judgments.c.labeler == who, today, judgments.c.kind == "answer")
    return len(set(connection.scalars(answered)))


def settings_of(connection: Connection, batch: str) -> BatchSettings:
    row = connection.execute(select(batch_settings).where(batch_settings.c.batch == batch)).one_or_none()
    return BatchSettings(row.is_closed, tags_of(row.requires)) if row is not None else BatchSettings()


# ---- how many labelers ----

IS_WANTED = or_(assignments.c.is_done, ~assignments.c.is_surplus)  # of an assignment


def num_wanted(connection: Connection, positions: Sequence[int]) -> dict[int, int]:
    """Returns how many labelers each of these tasks wants by now, or has had if those are more."""
    counted = select(assignments.c.task, func.sum(case((IS_WANTED, 1), else_=0))).group_by(assignments.c.task)
    return {
        row[0]: row[1]
        for part in parts(positions)
        for row in connection.execute(counted.where(assignments.c.task.in_(part)))
    }


def balance(connection: Connection, positions: Sequence[int], now: float) -> None:
    """Moves the marks of surplus assignments to those that are least in use, after answers or releases."""
    states = leases.lock(connection, positions)
    wanted = {task: (some, sum(not state.is_surplus for state in some)) for task, some in states.items()}
    mark(connection, wanted, now)


def mark(connection: Connection, wanted: Mapping[int, tuple[Sequence[AssignmentState], int]], now: float) -> None:
    """Marks all but the given number of each task's assignments as surplus, those that are least in use."""
    changed = []
    for task, (states, number) in wanted.items():
        by_use = sorted(states, key=lambda state: _use(state, now))
        for index, state in enumerate(by_use):
            if state.is_surplus != (index >= number):
                changed.append({"its_task": task, "its_number": state.number, "is_now": index >= number})
    if changed:
        here = and_(assignments.c.task == bindparam("its_task"), assignments.c.place == bindparam("its_number"))
        connection.execute(update(assignments).where(here).values(is_surplus=bindparam("is_now")), changed)


def _use(state: AssignmentState, now: float) -> tuple[bool, bool, bool, int]:
    is_leased = state.labeler is not None and state.expires_at > now
    return not state.is_done, not is_leased, state.is_surplus, state.number
