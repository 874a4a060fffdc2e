"""Importing tasks with external judgments into a label store: all of them or none, within one transaction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, func, insert, select

from preferences import events
from preferences.naming import NO_LOCATIONS, Locations, named
from preferences.records import Judgment, Task
from preferences.rows import Values, judgment_row, parts, refuse_different, task_row
from preferences.schema import assignments, tasks

_IMPORTING = 7_243_003  # key of the importers' advisory lock; any number that only Heed uses


@dataclass(frozen=True)
class Import:
    """Tasks of one batch with their judgments. `quotas` says how many labelers each task wants."""

    batch: str
    tasks: Sequence[Task]
    quotas: Sequence[int]
    judgments: Sequence[Judgment]


@dataclass(frozen=True)
class ImportRows:
    """An import as table rows, checked as far as that is possible without a database."""

    batch: str
    tasks: list[Values]
    judgments: list[Values]

    @classmethod
    def of(cls, coming: Import, files: Locations) -> "ImportRows":
        """Raises: ValueError, naming file and line, for rows that no store accepts."""
        pairs = zip(coming.tasks, coming.quotas, strict=True)
        rows = [task_row(task, coming.batch, quota, files) for task, quota in pairs]
        sizes = {task.task_id: len(task.responses) for task in coming.tasks}
        return cls(coming.batch, rows, judgment_rows(coming.batch, coming.judgments, sizes, files))


def judgment_rows(
    batch: str, judgments: Sequence[Judgment], sizes: Mapping[str, int], files: Locations = NO_LOCATIONS
) -> list[Values]:
    """Returns rows in order of revision. `sizes` has the number of responses of each of the batch's tasks.

    Raises: ValueError, naming task and labeler, for a malformed judgment and for one of a task outside the batch.
    """
    rows = []
    for judgment in sorted(judgments, key=lambda judgment: judgment.revision):
        if judgment.task_id not in sizes:
            where = named(files, judgment.task_id, judgment.labeler, judgment.revision)
            raise ValueError(f"{where}: batch {batch!r} has no such task")
        rows.append(judgment_row(judgment, sizes[judgment.task_id], files))
    return rows


def store_rows(connection: Connection, coming: Sequence[ImportRows], files: Locations, now: float) -> None:
    """Stores imports, one after another. Rows that are stored already are left alone.

    Raises: ValueError, naming file and line, for rows that contradict the store or exceed a task's quota.
    """
    if connection.dialect.name == "postgresql":  # SQLite has one writer anyway
        connection.execute(select(func.pg_advisory_xact_lock(_IMPORTING)))
    for one in coming:
        add(connection, one.tasks, files)
        record(connection, one.judgments, now, files)


def record(connection: Connection, rows: Sequence[Values], now: float, files: Locations = NO_LOCATIONS) -> None:
    """Stores external judgments, one labeler after another. Raises what `events.record` raises."""
    by_labeler: dict[str, list[Values]] = {}
    for row in rows:
        by_labeler.setdefault(row["labeler"], []).append(row)
    for labeler, own in by_labeler.items():
        events.record(connection, own, labeler, now, now, external=True, files=files)


def add(connection: Connection, wanted: Sequence[Values], files: Locations = NO_LOCATIONS) -> None:
    """Adds tasks with their assignments. A task that is stored with the same content is left alone.

    Raises: ValueError, naming the task, for an id that is taken by other content, and for a repeat of an unknown task.
    """
    known = stored(connection, [name for row in wanted for name in (row["task_id"], row["repeat_of"]) if name])
    missing: dict[str, Values] = {}
    for row in wanted:
        task_id, original = row["task_id"], row["repeat_of"]
        if task_id in known or task_id in missing:
            refuse_different(row, known.get(task_id) or missing[task_id], files)
        elif original and original not in known and original not in missing:
            where = named(files, task_id)
            raise ValueError(f"{where}: repeat_of is {original!r}; an earlier task's id was expected")
        else:
            missing[task_id] = row
    _insert(connection, list(missing.values()), known)


def stored(connection: Connection, task_ids: Sequence[str]) -> dict[str, Values]:
    """Returns those of these tasks that the store has, by id."""
    found: dict[str, Values] = {}
    for part in parts(task_ids):
        for row in connection.execute(select(tasks).where(tasks.c.task_id.in_(part))).mappings():
            found[row["task_id"]] = dict(row)
    return found


def _insert(connection: Connection, rows: Sequence[Values], known: Mapping[str, Values]) -> None:
    """Inserts new tasks with their assignments."""
    if not rows:
        return
    connection.execute(insert(tasks), rows)
    positions = {name: row["position"] for name, row in known.items()}
    positions |= {name: row["position"] for name, row in stored(connection, [row["task_id"] for row in rows]).items()}
    connection.execute(
        insert(assignments),
        [
            {
                "task": positions[row["task_id"]],
                "place": number,
                "batch": row["batch"],
                "original": positions.get(row["repeat_of"], 0),
                "labeler": None,
                "expires_at": 0.0,
                "is_done": False,
                "given_at": 0.0,
            }
            for row in rows
            for number in range(row["num_labelers"])
        ],
    )
