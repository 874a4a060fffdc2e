"""What leads change about batches and tasks after they were added. Each change is in the audit log.

All functions run within the caller's transaction; `by` is the lead's name, and `positions` are those of tasks.
"""

from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, Integer, exists, false, insert, literal, null, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from preferences import leases, recording
from preferences.assignment import as_requirement, as_tags, mark, remember
from preferences.records import MAX_LABELERS
from preferences.rows import parts
from preferences.schema import assignments, batch_settings, tasks


def set_closed(connection: Connection, batch: str, *, is_closed: bool, by: str, now: float) -> None:
    """Closes or reopens a batch. Labelers may finish what they have leased. Raises: ValueError for an unknown batch."""
    set_settings(connection, batch, is_closed=is_closed)
    recording.log(connection, by, "closed the batch" if is_closed else "reopened the batch", batch, now)


def set_required(connection: Connection, batch: str, tags: Iterable[object], *, by: str, now: float) -> None:
    """Sets the tags that a batch requires; none = anybody. Raises: ValueError for an unknown batch or a bad tag."""
    wanted = as_tags("tags", tags)
    set_settings(connection, batch, requires=as_requirement(wanted))
    recording.log(connection, by, f"set the required tags to {', '.join(wanted) or 'none'} for", batch, now)


def set_settings(connection: Connection, batch: str, **values: object) -> None:
    """Changes columns of a batch's settings. Raises: ValueError for an unknown batch."""
    require_batch(connection, batch)
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    new = insert(batch_settings).values({"batch": batch, "is_closed": False, "requires": ""} | values)
    connection.execute(new.on_conflict_do_update(index_elements=["batch"], set_=values))


def set_num_labelers(
    connection: Connection, positions: Sequence[int], num_labelers: int, *, by: str, now: float
) -> None:
    """Makes each of these tasks want `num_labelers` labelers. Answers that were given stay, even if they are more.

    Raises: ValueError for a number that is not possible.
    """
    if not 1 <= num_labelers <= MAX_LABELERS:
        raise ValueError(f"num_labelers is {num_labelers}; 1 to {MAX_LABELERS:,} was expected")
    for part in parts(positions):
        states = leases.lock(connection, sorted(part))
        for number in range(min(map(len, states.values()), default=0), num_labelers):
            _add_assignments(connection, part, number)
        states = leases.lock(connection, sorted(part))
        mark(connection, {task: (some, num_labelers) for task, some in states.items()}, now)
    _log(connection, by, f"set the labelers per task to {num_labelers} for", positions, now)


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


def set_archived(connection: Connection, positions: Sequence[int], *, is_archived: bool, by: str, now: float) -> None:
    """Archives tasks, or takes them out of the archive. Archived tasks are given to nobody and do not count as work
    left.

    Labelers may finish those that they have leased. Their hidden repeats go with them: they would show the same texts,
    and stay open forever, since only those who have judged the original may get them.
    """
    for part in parts(positions):
        own = or_(assignments.c.task.in_(part), assignments.c.original.in_(part))
        connection.execute(update(assignments).where(own).values(is_archived=is_archived))
    _log(connection, by, "archived" if is_archived else "took out of the archive", positions, now)


def set_required_of_tasks(
    connection: Connection, positions: Sequence[int], tags: Iterable[object], *, by: str, now: float
) -> None:
    """Sets the tags that these tasks require, in addition to those of their batches. Raises: ValueError: a bad tag."""
    wanted = as_tags("tags", tags)
    requirement, in_batches = as_requirement(wanted), set[str]()
    for part in parts(positions):
        here = assignments.c.task.in_(part)
        in_batches |= set(connection.scalars(select(assignments.c.batch).where(here).distinct()))
        connection.execute(update(assignments).where(here).values(requires=requirement))
    remember(connection, {(batch, requirement) for batch in in_batches})
    _log(connection, by, f"set the required tags to {', '.join(wanted) or 'none'} for", positions, now)


def positions_of(connection: Connection, task_ids: Sequence[str]) -> list[int]:
    """Returns the positions of tasks. Raises: ValueError for an unknown id."""
    found = recording.stored(connection, task_ids)
    for task_id in task_ids:
        if task_id not in found:
            raise ValueError(f"task {task_id!r}: task_id is not in the store")
    return sorted(row["position"] for row in found.values())


def positions_in(connection: Connection, batch: str) -> list[int]:
    """Returns the positions of all tasks of a batch. Raises: ValueError for an unknown batch."""
    require_batch(connection, batch)
    return list(connection.scalars(select(tasks.c.position).where(tasks.c.batch == batch).order_by(tasks.c.position)))


def _log(connection: Connection, by: str, action: str, positions: Sequence[int], now: float) -> None:
    """Appends an event per batch to the audit log, with the number of tasks, or the id of a single one."""
    numbers: dict[str, int] = {}
    only = ""
    for part in parts(positions):
        for row in connection.execute(select(tasks.c.task_id, tasks.c.batch).where(tasks.c.position.in_(part))):
            numbers[row.batch] = numbers.get(row.batch, 0) + 1
            only = row.task_id
    for batch, number in sorted(numbers.items()):
        subject = f"task {only!r}" if len(positions) == 1 else f"{number} tasks of {batch}"
        recording.log(connection, by, action, subject, now)


def require_batch(connection: Connection, batch: str) -> None:
    """Raises: ValueError for an unknown batch."""
    if connection.scalar(select(tasks.c.position).where(tasks.c.batch == batch).limit(1)) is None:
        raise ValueError(f"batch {batch!r} is not in the store")
