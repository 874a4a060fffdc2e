"""What leads change about batches and tasks after they were added. Each change is in the audit log.

All functions run within the caller's transaction; `by` is the lead's name, and `positions` are those of tasks.
"""

from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, select

from preferences import assignment, recording
from preferences.rows import parts
from preferences.schema import tasks


def set_closed(connection: Connection, batch: str, *, is_closed: bool, by: str, now: float) -> None:
    """Closes or reopens a batch. Labelers may finish what they have leased. Raises: ValueError for an unknown batch."""
    assignment.set_settings(connection, batch, is_closed=is_closed)
    recording.log(connection, by, "closed the batch" if is_closed else "reopened the batch", batch, now)


def set_required(connection: Connection, batch: str, tags: Iterable[object], *, by: str, now: float) -> None:
    """Sets the tags that a batch requires; none = anybody. Raises: ValueError for an unknown batch or a bad tag."""
    wanted = assignment.as_tags("tags", tags)
    assignment.set_settings(connection, batch, requires=assignment.as_requirement(wanted))
    recording.log(connection, by, f"set the required tags to {', '.join(wanted) or 'none'} for", batch, now)


def set_num_labelers(
    connection: Connection, positions: Sequence[int], num_labelers: int, *, by: str, now: float
) -> None:
    """Makes each of these tasks want `num_labelers` labelers. Answers that were given stay, also if they are more.

    Raises: ValueError for a number that is not possible.
    """
    assignment.set_num_labelers(connection, positions, num_labelers, now)
    _log(connection, by, f"set the labelers per task to {num_labelers} for", positions, now)


def set_archived(connection: Connection, positions: Sequence[int], *, is_archived: bool, by: str, now: float) -> None:
    """Archives tasks, or takes them out of the archive."""
    assignment.set_archived(connection, positions, is_archived=is_archived)
    _log(connection, by, "archived" if is_archived else "took out of the archive", positions, now)


def set_required_of_tasks(
    connection: Connection, positions: Sequence[int], tags: Iterable[object], *, by: str, now: float
) -> None:
    """Sets the tags that these tasks require, in addition to those of their batches. Raises: ValueError: a bad tag."""
    wanted = assignment.as_tags("tags", tags)
    assignment.set_required_of_tasks(connection, positions, wanted)
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
    assignment.require_batch(connection, batch)
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
