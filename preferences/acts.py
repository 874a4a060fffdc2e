"""How acts of labelers are recorded: each appends one judgment, and moves the labeler's place of the task.

An answer takes the labeler's place for good; a skip frees it; an undo takes the last act back and holds the place
again. An adjudication, a lead's answer over those of others, needs none, and neither does taking it back.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any

from sqlalchemy import Connection, insert, select

from preferences import claims
from preferences.claims import PlaceState
from preferences.leasing import LeaseLostError
from preferences.rows import NOWHERE, Places, Values, named, parts, refuse_other
from preferences.schema import judgments, tasks

TAKES_BACK = ("answer", "skip")
MOVES = ("answer", "skip", "undo")


def record(
    connection: Connection,
    rows: Sequence[Values],
    labeler: str,
    now: float,
    expires_at: float,
    *,
    made_elsewhere: bool = False,
    files: Places = NOWHERE,
) -> None:
    """Store acts of one labeler, in order. What is stored already is accepted and not stored again.

    `expires_at` is the end of the leases that undoing gives. Acts that were made elsewhere may follow each other in any
    order: there, an answer may have replaced another without an undo, and what was taken back in the end needs no
    place. `files` names where they come from.

    Raises ValueError for an unknown task and for an act that contradicts the stored one of its revision;
    LeaseLostError where the task's places went to others, which of acts made elsewhere is a ValueError too.
    """
    movers = [row for row in rows if row["kind"] != "adjudication"]
    if made_elsewhere:
        movers = list({row["task_id"]: row for row in movers}.values())  # of each task the last one
    moving = {(row["task_id"], row["revision"]) for row in movers}
    for part in parts(rows):
        _record(connection, part, labeler, now, expires_at, made_elsewhere, moving, files)


def _record(
    connection: Connection,
    rows: Sequence[Values],
    labeler: str,
    now: float,
    expires_at: float,
    made_elsewhere: bool,
    moving: Set[tuple[str, int]],
    files: Places,
) -> None:
    positions = _positions(connection, [row["task_id"] for row in rows], labeler)
    places = claims.lock(connection, sorted(set(positions.values())))
    acts = _acts_of(connection, labeler, sorted(set(positions.values())))
    new: list[Values] = []
    moves: dict[int, tuple[str, int]] = {}  # position -> the last act that concerns the labeler's place, and which
    for row in rows:
        position, where = positions[row["task_id"]], named(files, row["task_id"], labeler, row["revision"])
        before = acts[position]
        if row["revision"] < len(before):
            refuse_other(row, before[row["revision"]], where)
            continue
        if row["revision"] > len(before):
            raise ValueError(f"{where}: revision is {row['revision']}; {len(before)} acts are stored")
        if not made_elsewhere:
            _require_sequence(where, row["kind"], before)
        if (row["task_id"], row["revision"]) in moving and not _takes_adjudication_back(row["kind"], before):
            place = moves[position][1] if position in moves else _place(labeler, places[position], row["kind"], now)
            if place is not None:
                moves[position] = (row["kind"], place)
            elif made_elsewhere and row["kind"] == "answer":
                raise ValueError(f"{where}: the task wants {len(places[position])} labelers, and others judged it")
            elif row["kind"] != "skip" and not made_elsewhere:
                raise LeaseLostError(f"{where}: the lease ran out and others took the task's places")
        columns = {name: value for name, value in row.items() if name != "task_id"}
        new.append(columns | {"task": position})
        before.append(row)
    if new:
        connection.execute(insert(judgments), new)
        of_kind = {kind: [(p, place) for p, (k, place) in moves.items() if k == kind] for kind in MOVES}
        claims.finish(connection, labeler, of_kind["answer"])
        claims.free(connection, of_kind["skip"])
        claims.hold(connection, labeler, of_kind["undo"], now, expires_at)


def _positions(connection: Connection, task_ids: Sequence[str], labeler: str) -> dict[str, int]:
    statement = select(tasks.c.task_id, tasks.c.position).where(tasks.c.task_id.in_(task_ids))
    found = {row.task_id: row.position for row in connection.execute(statement)}
    for task_id in task_ids:
        if task_id not in found:
            raise ValueError(f"task {task_id!r}, labeler {labeler!r}: task_id is not in the store")
    return found


def _acts_of(connection: Connection, labeler: str, positions: Sequence[int]) -> dict[int, list[Mapping[str, Any]]]:
    """All that the labeler did so far on these tasks, by task, in order."""
    statement = (
        select(judgments)
        .where(judgments.c.task.in_(positions), judgments.c.labeler == labeler)
        .order_by(judgments.c.task, judgments.c.revision)
    )
    found: dict[int, list[Mapping[str, Any]]] = {position: [] for position in positions}
    for row in connection.execute(statement).mappings():
        found[row["task"]].append(dict(row))
    return found


def _takes_adjudication_back(kind: str, before: Sequence[Mapping[str, Any]]) -> bool:
    return kind == "undo" and bool(before) and before[-1]["kind"] == "adjudication"


def _require_sequence(where: str, kind: str, before: Sequence[Mapping[str, Any]]) -> None:
    last = before[-1]["kind"] if before else "undo"
    if kind == "undo" and last not in (*TAKES_BACK, "adjudication"):
        raise ValueError(f"{where}: there is no answer or skip to take back")
    if kind in TAKES_BACK and last in TAKES_BACK:
        raise ValueError(f"{where}: judged already ({last}); it has to be taken back first")


def _place(labeler: str, places: Sequence[PlaceState], kind: str, now: float) -> int | None:
    """The labeler's own place of a task, or but for a skip one that is free; None where there is none."""
    own = [state.place for state in places if state.labeler == labeler]
    free = [state.place for state in places if state.is_free(now) and kind != "skip"]
    return next(iter([*own, *free]), None)
