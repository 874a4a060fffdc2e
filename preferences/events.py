"""Recording what labelers do. Each event (answer, skip, undo, adjudication) appends one judgment row.

An answer finishes the labeler's assignment of the task, a skip releases it, and an undo takes the last event back and
leases the assignment again. An adjudication, a lead's answer that overrides those of labelers, needs no assignment;
neither does its undo.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any

from sqlalchemy import Connection, insert, select

from preferences import leases
from preferences.labelers import pseudonym_of
from preferences.leases import AssignmentState, LeaseLostError
from preferences.naming import NO_LOCATIONS, Locations, named
from preferences.rows import Values, parts, refuse_other
from preferences.schema import judgments, tasks

UNDOABLE = ("answer", "skip")
MOVES = ("answer", "skip", "undo")  # the events that change an assignment


def record(
    connection: Connection,
    rows: Sequence[Values],
    labeler: str,
    now: float,
    expires_at: float,
    *,
    external: bool = False,
    files: Locations = NO_LOCATIONS,
) -> None:
    """Stores events of one labeler, in order. Events that are stored already are accepted and not stored again.

    `expires_at` is when the leases that an undo grants run out. External events, recorded outside this store, may
    follow each other in any order: an answer may have replaced another without an undo, and what was undone in the end
    needs no assignment. `files` says where the rows come from.

    Raises: ValueError for an unknown task and for an event that contradicts the stored one of its revision;
    LeaseLostError if other labelers took the task's assignments (for external events a ValueError).
    """
    movers = [row for row in rows if row["kind"] != "adjudication"]
    if external:
        movers = list({row["task_id"]: row for row in movers}.values())  # only the last event on each task
    moving = {(row["task_id"], row["revision"]) for row in movers}
    who = pseudonym_of(connection, labeler)
    for part in parts(rows):
        _record(connection, part, labeler, who, now, expires_at, external, moving, files)


def _record(
    connection: Connection,
    rows: Sequence[Values],
    labeler: str,
    who: str,
    now: float,
    expires_at: float,
    external: bool,
    moving: Set[tuple[str, int]],
    files: Locations,
) -> None:
    positions = _positions(connection, [row["task_id"] for row in rows], labeler)
    states = leases.lock(connection, sorted(set(positions.values())))
    history = _history(connection, who, sorted(set(positions.values())))
    new: list[Values] = []
    moves: dict[int, tuple[str, int]] = {}  # position -> (kind of the last event that moves it, assignment number)
    for row in rows:
        position, where = positions[row["task_id"]], named(files, row["task_id"], labeler, row["revision"])
        before = history[position]
        if row["revision"] < len(before):
            refuse_other(row, before[row["revision"]], where)
            continue
        if row["revision"] > len(before):
            raise ValueError(f"{where}: revision is {row['revision']}, but only {len(before)} are stored")
        if not external:
            _require_sequence(where, row["kind"], before)
        if (row["task_id"], row["revision"]) in moving and not _undoes_adjudication(row["kind"], before):
            number = moves[position][1] if position in moves else _number(who, states[position], row["kind"], now)
            if number is not None:
                moves[position] = (row["kind"], number)
            elif external and row["kind"] == "answer":
                raise ValueError(
                    f"{where}: the task wants {len(states[position])} labelers, and others have judged it already"
                )
            elif row["kind"] != "skip" and not external:
                raise LeaseLostError(f"{where}: the lease ran out and other labelers took the task's assignments")
        columns = {name: value for name, value in row.items() if name != "task_id"}
        new.append(columns | {"task": position, "labeler": who})
        before.append(row)
    if new:
        connection.execute(insert(judgments), new)
        by_kind = {kind: [(p, number) for p, (k, number) in moves.items() if k == kind] for kind in MOVES}
        leases.finish(connection, who, by_kind["answer"])
        leases.release(connection, by_kind["skip"])
        leases.grant(connection, who, by_kind["undo"], now, expires_at)


def _positions(connection: Connection, task_ids: Sequence[str], labeler: str) -> dict[str, int]:
    statement = select(tasks.c.task_id, tasks.c.position).where(tasks.c.task_id.in_(task_ids))
    found = {row.task_id: row.position for row in connection.execute(statement)}
    for task_id in task_ids:
        if task_id not in found:
            raise ValueError(f"task {task_id!r}, labeler {labeler!r}: task_id is not in the store")
    return found


def _history(connection: Connection, who: str, positions: Sequence[int]) -> dict[int, list[Mapping[str, Any]]]:
    """Returns the labeler's events on each of these tasks so far, in order."""
    statement = (
        select(judgments)
        .where(judgments.c.task.in_(positions), judgments.c.labeler == who)
        .order_by(judgments.c.task, judgments.c.revision)
    )
    found: dict[int, list[Mapping[str, Any]]] = {position: [] for position in positions}
    for row in connection.execute(statement).mappings():
        found[row["task"]].append(dict(row))
    return found


def _undoes_adjudication(kind: str, before: Sequence[Mapping[str, Any]]) -> bool:
    return kind == "undo" and bool(before) and before[-1]["kind"] == "adjudication"


def _require_sequence(where: str, kind: str, before: Sequence[Mapping[str, Any]]) -> None:
    last = before[-1]["kind"] if before else "undo"
    if kind == "undo" and last not in (*UNDOABLE, "adjudication"):
        raise ValueError(f"{where}: there is no answer or skip to take back")
    if kind in UNDOABLE and last in UNDOABLE:
        raise ValueError(f"{where}: already judged ({last}); take that back first")


def _number(who: str, states: Sequence[AssignmentState], kind: str, now: float) -> int | None:
    """Returns the labeler's own assignment of a task, else a free one (not for a skip), else None."""
    own = [state.number for state in states if state.labeler == who]
    free = [state.number for state in states if state.is_free(now) and kind != "skip"]
    return next(iter([*own, *free]), None)
