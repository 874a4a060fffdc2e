"""Recording tasks and what labelers do, within the caller's transaction.

Each event (answer, skip, undo, adjudication, void) appends one judgment row. An answer finishes the labeler's
assignment of the task, and a further answer by the same labeler replaces it in place, so that the assignment is theirs
throughout. A skip or a void releases the assignment, and an undo takes back the last event and leases it again. An
adjudication (a lead's answer that overrides those of labelers) needs no assignment, and neither does its undo or void.

An import stores tasks with judgments that were made outside this store: either all of them or none.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, insert, select

from preferences import adjudication, assignment, leases, search
from preferences.leases import AssignmentState, LeaseLostError
from preferences.names import NOT_PEOPLE, pseudonym_of
from preferences.records import NO_LOCATIONS, Judgment, Locations, Task, named
from preferences.rows import Values, judgment_row, parts, refuse_different, refuse_other, task_row
from preferences.schema import assignments, audit_log, judgments, tasks

UNDOABLE = ("answer", "skip")
TAKING_BACK = ("undo", "void")
RELEASING = ("skip", "void")
MOVES = ("answer", "skip", "undo", "void")  # the events that change an assignment
# keys of advisory locks, which only Heed uses: of importers, and (its first half) of those who begin a batch
_IMPORTING, _BEGINNING = 7_243_005, 7_243_006


# ---- tasks ----


def add_tasks(connection: Connection, wanted: Sequence[Values], files: Locations = NO_LOCATIONS) -> None:
    """Adds tasks with their assignments. A task that is stored with the same content is left alone.

    A stored task may want the number of labelers that it was added with, or the one that a lead has set since.

    Raises: ValueError, naming the task, for an id that is taken by other content, for a repeat of an unknown task or
    with other responses, and for a task with one response in a batch of rankings, or the other way round.
    """
    known = stored(connection, [name for row in wanted for name in (row["task_id"], row["repeat_of"]) if name])
    missing: dict[str, Values] = {}
    numbers = _changed_numbers(connection, wanted, known)
    for row in wanted:
        task_id, original = row["task_id"], row["repeat_of"]
        if task_id in known or task_id in missing:
            agreed = {"num_labelers": row["num_labelers"]} if numbers.get(task_id) == row["num_labelers"] else {}
            refuse_different(row, {**(known.get(task_id) or missing[task_id]), **agreed}, files)
        elif original and original not in known and original not in missing:
            where = named(files, task_id)
            raise ValueError(f"{where}: repeat_of is {original!r}; an earlier task's id was expected")
        elif original and sorted(row["responses"]) != sorted((known.get(original) or missing[original])["responses"]):
            where = named(files, task_id)
            raise ValueError(f"{where}: repeat_of is {original!r}, which has other responses; the same were expected")
        else:
            missing[task_id] = row
    _refuse_mixed(connection, list(missing.values()), files)
    _insert_tasks(connection, list(missing.values()), known)


def _refuse_mixed(connection: Connection, rows: Sequence[Values], files: Locations) -> None:
    """Raises: ValueError, naming the task, if a batch mixes single responses with responses to rank.

    Labelers would need two sets of instructions, and the statistics would describe neither kind.
    """
    known = {batch: _num_responses(connection, batch) for batch in sorted({row["batch"] for row in rows})}
    is_single = {row["batch"]: (known[row["batch"]] or len(row["responses"])) == 1 for row in reversed(rows)}
    for row in rows:
        batch, num = row["batch"], len(row["responses"])
        if is_single[batch] != (num == 1):
            others = "single responses, which are rated alone" if is_single[batch] else "several responses to rank"
            raise ValueError(
                f"{named(files, row['task_id'])}: responses has {num} {'entry' if num == 1 else 'entries'}, but the"
                f" tasks of batch {batch!r} have {others}; another batch was expected"
            )


def _num_responses(connection: Connection, batch: str) -> int:
    """Returns how many responses a task of the batch has, or 0 if the batch has none: others then wait to begin it."""
    one = select(tasks.c.responses).where(tasks.c.batch == batch).limit(1)
    found = connection.scalar(one)
    if found is None and connection.dialect.name == "postgresql":  # SQLite has one writer anyway
        connection.execute(select(func.pg_advisory_xact_lock(_BEGINNING, func.hashtext(batch))))
        found = connection.scalar(one)
    return len(found or ())


def _changed_numbers(connection: Connection, wanted: Sequence[Values], known: Mapping[str, Values]) -> dict[str, int]:
    """Returns how many labelers stored tasks want by now, for those that were added with another number than wanted."""
    ids = [row["task_id"] for row in wanted]
    asked = {name: row["num_labelers"] for name, row in zip(ids, wanted, strict=True)}
    at = {name: known[name]["position"] for name in ids if name in known and known[name]["num_labelers"] != asked[name]}
    numbers = assignment.num_wanted(connection, sorted(at.values()))
    return {name: numbers[position] for name, position in at.items()}


def stored(connection: Connection, task_ids: Sequence[str]) -> dict[str, Values]:
    """Returns the rows of the tasks in `task_ids` that are stored, by id."""
    found: dict[str, Values] = {}
    for part in parts(task_ids):
        for row in connection.execute(select(tasks).where(tasks.c.task_id.in_(part))).mappings():
            found[row["task_id"]] = dict(row)
    return found


def _insert_tasks(connection: Connection, rows: Sequence[Values], known: Mapping[str, Values]) -> None:
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
                "requires": assignment.required_by(row),
            }
            for row in rows
            for number in range(row["num_labelers"])
        ],
    )
    assignment.remember(connection, {(row["batch"], assignment.required_by(row)) for row in rows})
    search.index_texts(connection, [(positions[row["task_id"]], row["prompt"], row["responses"]) for row in rows])


# ---- events ----


def record(
    connection: Connection,
    rows: Sequence[Values],
    labeler: str,
    now: float,
    expires_at: float,
    *,
    external: bool = False,
    files: Locations = NO_LOCATIONS,
) -> int:
    """Stores events of one labeler, in order, and returns how many. Events already stored are accepted and left alone.

    `expires_at` is the time when leases granted by an undo run out. External events (recorded outside this store) may
    follow each other in any order: an answer may replace another without an undo, and a task whose last event is an
    undo needs no assignment. `files` says where the rows come from. Undos and voids of this store get the instructions'
    version of the event that they take back.

    Raises: ValueError for an unknown task and for an event that contradicts the stored one of its revision;
    LeaseLostError if other labelers took the task's assignments (for external events a ValueError).
    """
    movers = [row for row in rows if row["kind"] != "adjudication"]
    if external:
        movers = list({row["task_id"]: row for row in movers}.values())  # only the last event on each task
    moving = {(row["task_id"], row["revision"]) for row in movers}
    who = pseudonym_of(connection, labeler)
    return sum(
        _record(connection, part, labeler, who, now, expires_at, external, moving, files) for part in parts(rows)
    )


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
) -> int:
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
        ends_adjudication = row["kind"] in TAKING_BACK and bool(before) and before[-1]["kind"] == "adjudication"
        if (row["task_id"], row["revision"]) in moving and not ends_adjudication:
            number = moves[position][1] if position in moves else _number(who, states[position], row["kind"], now)
            if number is not None:
                moves[position] = (row["kind"], number)
            elif external and row["kind"] == "answer":
                raise ValueError(
                    f"{where}: the task wants {len(states[position])} labelers, and others have judged it already"
                )
            elif row["kind"] not in RELEASING and not external:
                raise LeaseLostError(f"{where}: the lease ran out and other labelers took the task's assignments")
        if row["kind"] in TAKING_BACK and not external:  # the version of the form that the labeler judged with
            row = row | {"instructions_version": before[-1]["instructions_version"]}
        columns = {name: value for name, value in row.items() if name != "task_id"}
        new.append(columns | {"task": position, "labeler": who})
        before.append(row)
    if new:
        connection.execute(insert(judgments), new)
        by_kind = {kind: [(p, number) for p, (k, number) in moves.items() if k == kind] for kind in MOVES}
        leases.finish(connection, who, by_kind["answer"])
        leases.release(connection, by_kind["skip"] + by_kind["void"])
        leases.grant(connection, who, by_kind["undo"], now, expires_at)
        if any(state.is_surplus for some in states.values() for state in some):
            assignment.balance(connection, sorted(states), now)
        adjudication.refresh(connection, sorted({row["task"] for row in new if row["kind"] != "skip"}))
    return len(new)


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


def _require_sequence(where: str, kind: str, before: Sequence[Mapping[str, Any]]) -> None:
    last = before[-1]["kind"] if before else "undo"
    if kind == "undo" and last not in (*UNDOABLE, "adjudication"):
        raise ValueError(f"{where}: there is no answer or skip to take back")
    if kind == "void" and last not in ("answer", "adjudication"):
        raise ValueError(f"{where}: there is no judgment to void")
    if kind in UNDOABLE and last in UNDOABLE and (kind, last) != ("answer", "answer"):
        raise ValueError(f"{where}: already judged ({last}); take that back first")


def _number(who: str, states: Sequence[AssignmentState], kind: str, now: float) -> int | None:
    """Returns the labeler's assignment of a task, else a free one unless `kind` releases assignments, else None."""
    own = [state.number for state in states if state.labeler == who]
    free = [state.number for state in states if state.is_free(now) and kind not in RELEASING]
    return next(iter([*own, *free]), None)


# ---- the audit log ----


def log(connection: Connection, actor: str, action: str, subject: str, now: float) -> None:
    """Appends an event about a batch, or about a pseudonym. `actor` is a person's name or one of NOT_PEOPLE."""
    who = actor if actor in NOT_PEOPLE else pseudonym_of(connection, actor)
    connection.execute(insert(audit_log).values(actor=who, act=action, subject=subject, created_at=now))


# ---- imports ----


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
        """Converts an import to rows. Raises: ValueError, naming file and line, for rows that no store accepts."""
        pairs = zip(coming.tasks, coming.quotas, strict=True)
        rows = [task_row(task, coming.batch, quota, files) for task, quota in pairs]
        by_id = {row["task_id"]: row for row in rows}
        return cls(coming.batch, rows, judgment_rows(coming.batch, coming.judgments, by_id, files))


def judgment_rows(
    batch: str, judgments: Sequence[Judgment], known: Mapping[str, Values], files: Locations = NO_LOCATIONS
) -> list[Values]:
    """Returns rows in order of revision. `known` are the rows of the batch's tasks by id.

    Raises: ValueError, naming task and labeler, for a malformed judgment and for a task outside the batch.
    """
    rows = []
    for judgment in sorted(judgments, key=lambda judgment: judgment.revision):
        if judgment.task_id not in known:
            where = named(files, judgment.task_id, judgment.labeler, judgment.revision)
            raise ValueError(f"{where}: batch {batch!r} has no such task")
        rows.append(judgment_row(judgment, known[judgment.task_id], files))
    return rows


def store_rows(connection: Connection, coming: Sequence[ImportRows], files: Locations, now: float) -> None:
    """Stores imports, one after another. Rows that are already stored are left alone.

    Raises: ValueError, naming file and line, for rows that contradict the store or exceed a task's quota.
    """
    if connection.dialect.name == "postgresql":  # SQLite has one writer anyway
        connection.execute(select(func.pg_advisory_xact_lock(_IMPORTING)))
    for one in coming:
        add_tasks(connection, one.tasks, files)
        record_external(connection, one.judgments, now, files)


def record_external(
    connection: Connection, rows: Sequence[Values], now: float, files: Locations = NO_LOCATIONS
) -> None:
    """Stores external judgments, one labeler after another. Raises what `record` raises."""
    by_labeler: dict[str, list[Values]] = {}
    for row in rows:
        by_labeler.setdefault(row["labeler"], []).append(row)
    for labeler, own in by_labeler.items():
        record(connection, own, labeler, now, now, external=True, files=files)
