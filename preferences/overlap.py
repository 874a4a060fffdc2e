"""How many labelers a task wants, changed after it was added, and archived tasks.

Assignments are never removed, so those that are no longer wanted are marked as surplus: free ones first, then those
that somebody is working on. A labeler may finish a surplus assignment that they have leased; nobody gets it afterwards.
All functions run within the caller's transaction.
"""

from collections.abc import Mapping, Sequence

from sqlalchemy import (
    Connection,
    Integer,
    and_,
    bindparam,
    case,
    exists,
    false,
    func,
    insert,
    literal,
    null,
    or_,
    select,
    update,
)

from preferences import leases
from preferences.leases import AssignmentState
from preferences.records import MAX_LABELERS
from preferences.rows import parts
from preferences.schema import assignments

IS_WANTED = or_(assignments.c.is_done, ~assignments.c.is_surplus)  # of an assignment


def set_num_labelers(connection: Connection, positions: Sequence[int], num_labelers: int, now: float) -> None:
    """Makes each of these tasks want `num_labelers` labelers. Answers that were given stay, also if they are more.

    Raises: ValueError for a number that is not possible.
    """
    if not 1 <= num_labelers <= MAX_LABELERS:
        raise ValueError(f"num_labelers is {num_labelers}; 1 to {MAX_LABELERS:,} was expected")
    for part in parts(positions):
        states = leases.lock(connection, sorted(part))
        for number in range(min(map(len, states.values()), default=0), num_labelers):
            _add_assignments(connection, part, number)
        states = leases.lock(connection, sorted(part))
        _mark(connection, {task: (some, num_labelers) for task, some in states.items()}, now)


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
    _mark(connection, wanted, now)


def set_archived(connection: Connection, positions: Sequence[int], *, is_archived: bool) -> None:
    """Archives tasks, or takes them out of the archive. Archived tasks are given to nobody and count as no work left.

    Labelers may finish those that they have leased. Their hidden repeats go with them: they would show the same texts,
    and stay open for ever, since only who has judged the original may get them.
    """
    for part in parts(positions):
        own = or_(assignments.c.task.in_(part), assignments.c.original.in_(part))
        connection.execute(update(assignments).where(own).values(is_archived=is_archived))


def _add_assignments(connection: Connection, positions: Sequence[int], number: int) -> None:
    """Adds an assignment with this number to each task that lacks it, like the task's first one."""
    other = assignments.alias("other")
    is_there = exists().where(other.c.task == assignments.c.task, other.c.place == number)
    copied = (assignments.c.batch, assignments.c.original, assignments.c.is_archived, assignments.c.requires)
    fresh = select(
        assignments.c.task,
        literal(number, Integer),
        *copied,
        null(),
        literal(0.0),
        false(),
        literal(0.0),
        false(),
        false(),
    ).where(assignments.c.task.in_(positions), assignments.c.place == 0, ~is_there)
    names = ["task", "place", *(column.name for column in copied)]
    fields = ["labeler", "expires_at", "is_done", "given_at", "is_revealed", "is_surplus"]
    connection.execute(insert(assignments).from_select([*names, *fields], fresh))


def _mark(connection: Connection, wanted: Mapping[int, tuple[Sequence[AssignmentState], int]], now: float) -> None:
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
