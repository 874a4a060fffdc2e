"""Between records and table rows: what a column holds, and what is refused before it gets there."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from preferences.leasing import Lease, canonical, display_order, require_fits
from preferences.records import Answer, Judgment, Message, Task, dense_ranks

ROLES = ("system", "user", "assistant")
KINDS = ("answer", "skip", "undo", "adjudication")
COMPARED = ("kind", "ranks", "ratings", "flags", "note")  # what two acts of one revision must have in common
_VARIABLES_PER_STATEMENT = 5_000  # SQLite takes 32,766

_T = TypeVar("_T")
Values = dict[str, Any]


def answer_row(lease: Lease, answer: Answer, kind: str) -> Values:
    """An answer's columns, in canonical order. Raises ValueError for an answer that does not fit the lease."""
    where = f"task {lease.task_id!r}, labeler {lease.labeler!r}"
    require_fits(where, answer, len(lease.order))
    expected = display_order(lease.task_id, lease.labeler, len(lease.order))
    assert lease.order == expected, f"{where}: order {lease.order}, but {expected} was shown"
    return _act_row(lease, kind, answer.milliseconds) | {
        "ranks": canonical(lease.order, dense_ranks(answer.ranks)),
        "ratings": canonical(lease.order, answer.ratings),
        "flags": [list(flags) for flags in canonical(lease.order, answer.flags)],
        "note": answer.note,
    }


def empty_row(lease: Lease, kind: str, reason: str, milliseconds: int) -> Values:
    """The columns of an act without a ranking: a skip, an undo."""
    if not reason:
        raise ValueError(f"task {lease.task_id!r}, labeler {lease.labeler!r}: note is empty; a reason was expected")
    return _act_row(lease, kind, milliseconds) | {"ranks": [], "ratings": [], "flags": [], "note": reason}


def _act_row(lease: Lease, kind: str, milliseconds: int) -> Values:
    return {
        "task_id": lease.task_id,
        "revision": lease.revision,
        "kind": kind,
        "shown_order": list(lease.order),
        "milliseconds": milliseconds,
    }


def judgment_row(judgment: Judgment, num_responses: int) -> Values:
    """A judgment made elsewhere. Raises ValueError, naming task, labeler and field, for one that cannot be."""
    where = f"task {judgment.task_id!r}, labeler {judgment.labeler!r}, revision {judgment.revision}"
    if judgment.kind not in KINDS:
        raise ValueError(f"{where}: kind is {judgment.kind!r}; one of {KINDS} was expected")
    if judgment.shown_order and sorted(judgment.shown_order) != list(range(num_responses)):
        raise ValueError(
            f"{where}: shown_order is {judgment.shown_order}; each of 0 to {num_responses - 1} once was expected"
        )
    if judgment.kind in ("answer", "adjudication"):
        answer = Answer(judgment.ranks, judgment.milliseconds, judgment.ratings, judgment.flags, judgment.note)
        require_fits(where, answer, num_responses)
    elif judgment.ranks or judgment.ratings or judgment.flags:
        raise ValueError(f"{where}: ranks, ratings or flags in a judgment of kind {judgment.kind!r}")
    return asdict(judgment) | {
        "ranks": list(dense_ranks(judgment.ranks)),
        "ratings": list(judgment.ratings),
        "flags": [list(flags) for flags in judgment.flags],
        "shown_order": list(judgment.shown_order),
    }


def as_judgment(row: Mapping[str, Any]) -> Judgment:
    """A stored row as a record."""
    return Judgment(
        task_id=row["task_id"],
        labeler=row["labeler"],
        revision=row["revision"],
        kind=row["kind"],
        ranks=tuple(row["ranks"]),
        ratings=tuple(row["ratings"]),
        flags=tuple(tuple(flags) for flags in row["flags"]),
        note=row["note"],
        shown_order=tuple(row["shown_order"]),
        instructions_version=row["instructions_version"],
        milliseconds=row["milliseconds"],
        client=row["client"],
        created_at=row["created_at"],
    )


def task_row(task: Task, batch: str, quota: int) -> Values:
    """A task's columns. Raises ValueError, naming task and field, for what a task cannot hold."""
    where = f"task {task.task_id!r}"
    if quota < 1:
        raise ValueError(f"{where}: num_labelers is {quota}; at least 1 was expected")
    for turn, message in enumerate(task.prompt):
        if message.role not in ROLES or not isinstance(message.content, str):
            raise ValueError(f"{where}: prompt[{turn}] is {asdict(message)}; a role of {ROLES} and text were expected")
    for name, texts in (("responses", task.responses), ("sources", task.sources)):
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{where}: {name} is {texts!r}; strings were expected")
    return {
        "task_id": task.task_id,
        "batch": batch,
        "num_labelers": quota,
        "prompt": [[message.role, message.content] for message in task.prompt],
        "responses": list(task.responses),
        "sources": list(task.sources),
        "objective": task.objective,
        "gold_ranks": list(dense_ranks(task.gold_ranks)),
        "repeat_of": task.repeat_of,
        "details": dict(task.details),
    }


def as_task(row: Mapping[str, Any]) -> Task:
    """A stored row as a record."""
    return Task(
        task_id=row["task_id"],
        prompt=messages(row["prompt"]),
        responses=tuple(row["responses"]),
        sources=tuple(row["sources"]),
        objective=row["objective"],
        gold_ranks=tuple(row["gold_ranks"]),
        repeat_of=row["repeat_of"],
        details=row["details"],
    )


def refuse_different(row: Values, stored: Values) -> None:
    """Raise ValueError, naming task and field, where an arriving task contradicts the stored one."""
    for field, value in row.items():
        if stored[field] != value:
            raise ValueError(f"task {row['task_id']!r}: {field} is {value!r}, but the store has {stored[field]!r}")


def refuse_other(row: Values, stored: Mapping[str, Any]) -> None:
    """Raise ValueError where an act contradicts the stored one of the same task, labeler and revision."""
    for field in COMPARED:
        if stored[field] != row[field]:
            raise ValueError(
                f"task {row['task_id']!r}, labeler {stored['labeler']!r}: {field} {row[field]!r} differs from the"
                f" stored {stored[field]!r}"
            )


def messages(prompt: list[list[str]]) -> tuple[Message, ...]:
    """A stored prompt as messages."""
    return tuple(Message(role, content) for role, content in prompt)


def parts(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Runs of items short enough for one statement."""
    for start in range(0, len(items), _VARIABLES_PER_STATEMENT):
        yield items[start : start + _VARIABLES_PER_STATEMENT]
