"""Converting between records and table rows, and checking everything before it is stored."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar

from files.conversations import tool_messages
from preferences.annotations import Annotations, require_annotations
from preferences.leases import Lease, canonical, display_order
from preferences.records import (
    GOLD,
    KINDS,
    MAX_ID_CHARACTERS,
    MAX_LABELERS,
    MAX_MILLISECONDS,
    NO_LOCATIONS,
    Answer,
    GoldAnswer,
    Judgment,
    Locations,
    Message,
    Task,
    assistant_turns,
    dense_ranks,
    named,
    require_moment,
)

ROLES = ("system", "user", "assistant", "tool")
NAMES = ("task_id", "objective", "repeat_of", "warning")  # a task's text columns
COMPARED = (
    "kind",
    "ranks",
    "ratings",
    "flags",
    "note",
    "annotations",
)  # what two events with the same revision must agree on
_VARIABLES_PER_STATEMENT = 5_000  # SQLite allows 32,766
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_NO_NAME = re.compile(r"[\0\ud800-\udfff]")

_T = TypeVar("_T")
Values = dict[str, Any]


def require_name(where: str, field: str, text: str) -> None:
    """Checks that a text column of every supported database can hold the text.

    Raises: ValueError for NUL, half a surrogate pair, and more than MAX_ID_CHARACTERS.
    """
    found = _NO_NAME.search(text)
    if found:
        raise ValueError(f"{where}: {field} contains the character {found.group()!r}, which no name may contain")
    if len(text) > MAX_ID_CHARACTERS:
        raise ValueError(f"{where}: {field} has {len(text):,} characters; at most {MAX_ID_CHARACTERS} were expected")


def require_text(where: str, field: str, texts: Sequence[str]) -> None:
    """Checks that UTF-8 can encode the texts. NUL is allowed: these columns are JSON, which escapes it.

    Raises: ValueError for half a surrogate pair.
    """
    found = next((found for text in texts if (found := _SURROGATE.search(text))), None)
    if found:
        raise ValueError(f"{where}: {field} contains {found.group()!r}, half of a surrogate pair")


def _require_fits(where: str, answer: Answer, num_responses: int, *, turns: Sequence[int]) -> None:
    """Raises: ValueError, beginning with `where` and naming the field, if the answer does not fit the task.

    `turns` are the places of the assistant's in the prompt.
    """
    if len(answer.ranks) != num_responses:
        raise ValueError(f"{where}: ranks has {len(answer.ranks)} entries for {num_responses} responses")
    for rank in answer.ranks:
        if type(rank) is not int or rank < 1:
            raise ValueError(f"{where}: ranks contains {rank!r}; integers from 1 (best) were expected")
    if type(answer.milliseconds) is not int or answer.milliseconds < 0:
        raise ValueError(f"{where}: milliseconds is {answer.milliseconds!r}; an integer of at least 0 was expected")
    for name, entries in (("ratings", answer.ratings), ("flags", answer.flags)):
        if entries and len(entries) != num_responses:
            raise ValueError(f"{where}: {name} has {len(entries)} entries for {num_responses} responses")
    if not all(isinstance(flag, str) for flags in answer.flags for flag in flags):
        raise ValueError(f"{where}: flags is {answer.flags!r}; strings were expected")
    if not all(type(rating) in (int, float) and math.isfinite(rating) for rating in answer.ratings):
        raise ValueError(f"{where}: ratings is {answer.ratings!r}; finite numbers were expected")
    require_annotations(where, answer.annotations, num_responses, turns=turns)
    for field, text in answer.annotations.texts:
        require_text(where, field, [text])


def answer_row(lease: Lease, answer: Answer, kind: str) -> Values:
    """Returns an answer's columns, in canonical order.

    Raises: ValueError for an answer that does not fit the lease.
    """
    where = f"task {lease.task_id!r}, labeler {lease.labeler!r}"
    _require_fits(where, answer, len(lease.order), turns=assistant_turns(lease.shown.prompt))
    require_text(where, "note", [answer.note])
    require_text(where, "flags", [flag for flags in answer.flags for flag in flags])
    expected = display_order(lease.task_id, lease.labeler, len(lease.order))
    assert lease.order == expected, f"{where}: order {lease.order}, but {expected} was shown"
    return _event_row(lease, kind, answer.milliseconds) | {
        "ranks": canonical(lease.order, dense_ranks(answer.ranks)),
        "ratings": canonical(lease.order, answer.ratings),
        "flags": [list(flags) for flags in canonical(lease.order, answer.flags)],
        "note": answer.note,
        "annotations": answer.annotations.canonical(lease.order).as_dict(),
    }


def empty_row(lease: Lease, kind: str, reason: str, milliseconds: int) -> Values:
    """Returns the columns of an event without a ranking: a skip or an undo."""
    if not reason:
        raise ValueError(f"task {lease.task_id!r}, labeler {lease.labeler!r}: note is empty; a reason was expected")
    require_text(f"task {lease.task_id!r}, labeler {lease.labeler!r}", "note", [reason])
    nothing: Values = {"ranks": [], "ratings": [], "flags": [], "annotations": {}}
    return _event_row(lease, kind, milliseconds) | nothing | {"note": reason}


def _event_row(lease: Lease, kind: str, milliseconds: int) -> Values:
    return {
        "task_id": lease.task_id,
        "revision": lease.revision,
        "kind": kind,
        "shown_order": list(lease.order),
        "milliseconds": milliseconds,
    }


def judgment_row(judgment: Judgment, task: Values, locations: Locations = NO_LOCATIONS) -> Values:
    """Returns the columns of an external judgment, given those of its task.

    Raises: ValueError, naming task, labeler and field, for a malformed judgment.
    """
    where = f"{named(locations, judgment.task_id, judgment.labeler, judgment.revision)}, revision {judgment.revision}"
    num_responses = len(task["responses"])
    for field in ("labeler", "instructions_version", "client"):
        require_name(where, field, getattr(judgment, field))
    if not judgment.labeler:
        raise ValueError(f"{where}: labeler is empty; a name was expected")
    require_text(where, "note", [judgment.note])
    require_text(where, "flags", [flag for flags in judgment.flags for flag in flags])
    if judgment.milliseconds > MAX_MILLISECONDS:
        raise ValueError(f"{where}: milliseconds is {judgment.milliseconds}; at most {MAX_MILLISECONDS} was expected")
    require_moment(where, "created_at", judgment.created_at)
    if judgment.kind not in KINDS:
        raise ValueError(f"{where}: kind is {judgment.kind!r}; one of {KINDS} was expected")
    if judgment.shown_order and sorted(judgment.shown_order) != list(range(num_responses)):
        raise ValueError(
            f"{where}: shown_order is {judgment.shown_order}; each of 0 to {num_responses - 1} once was expected"
        )
    if judgment.kind in ("answer", "adjudication"):
        said = (judgment.ratings, judgment.flags, judgment.note, judgment.annotations)
        turns = assistant_turns(messages(task["prompt"]))
        _require_fits(where, Answer(judgment.ranks, judgment.milliseconds, *said), num_responses, turns=turns)
    elif judgment.ranks or judgment.ratings or judgment.flags or judgment.annotations:
        raise ValueError(f"{where}: ranks, ratings, flags or annotations in a judgment of kind {judgment.kind!r}")
    return asdict(judgment) | {
        "ranks": list(dense_ranks(judgment.ranks)),
        "ratings": list(judgment.ratings),
        "flags": [list(flags) for flags in judgment.flags],
        "shown_order": list(judgment.shown_order),
        "annotations": judgment.annotations.as_dict(),
    }


def as_judgment(row: Mapping[str, Any]) -> Judgment:
    """Converts a stored row to a record."""
    lists = {name: tuple(row[name]) for name in ("ranks", "ratings", "shown_order")}
    flags, annotations = tuple(map(tuple, row["flags"])), Annotations.of(row["annotations"])
    own = {field.name: row[field.name] for field in fields(Judgment)}
    return Judgment(**own | lists | {"flags": flags, "annotations": annotations})


def task_row(task: Task, batch: str, quota: int, locations: Locations = NO_LOCATIONS) -> Values:
    """Returns a task's columns.

    Raises: ValueError, naming task and field, for a malformed task.
    """
    where = named(locations, task.task_id)
    for field, name in (("batch", batch), *((field, getattr(task, field)) for field in NAMES)):
        require_name(where, field, name)
    if task.is_single and (task.gold_ranks or GOLD in task.details):
        _ = GoldAnswer.of(where, task.details)
        if not task.gold_ranks:
            raise ValueError(f"{where}: details.{GOLD} makes it a gold task, but gold_ranks is empty; [1] was expected")
    if not 1 <= quota <= MAX_LABELERS:
        raise ValueError(f"{where}: num_labelers is {quota}; 1 to {MAX_LABELERS:,} was expected")
    for turn, message in enumerate(task.prompt):
        if message.role not in ROLES or not isinstance(message.content, str):
            raise ValueError(f"{where}: prompt[{turn}] is {asdict(message)}; a role of {ROLES} and text were expected")
    if any(message.more or message.role == "tool" for message in task.prompt):
        tool_messages(where, [message.turn for message in task.prompt], "prompt")  # raises for a malformed call
    for name, texts in (("responses", task.responses), ("sources", task.sources)):
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{where}: {name} is {texts!r}; strings were expected")
        require_text(where, name, texts)
    require_text(where, "prompt", [text for message in task.prompt for text in message.fields])
    return {
        "task_id": task.task_id,
        "batch": batch,
        "num_labelers": quota,
        "prompt": [message.fields for message in task.prompt],
        "responses": list(task.responses),
        "sources": list(task.sources),
        "objective": task.objective,
        "gold_ranks": list(dense_ranks(task.gold_ranks)),
        "repeat_of": task.repeat_of,
        "details": dict(task.details),
        "warning": task.warning,
    }


def as_task(row: Mapping[str, Any]) -> Task:
    """Converts a stored row to a record."""
    lists = {name: tuple(row[name]) for name in ("responses", "sources", "gold_ranks")}
    own = {field.name: row[field.name] for field in fields(Task)}
    return Task(**own | lists | {"prompt": messages(row["prompt"])})


def refuse_different(row: Values, stored: Values, locations: Locations = NO_LOCATIONS) -> None:
    """Raises: ValueError, naming task and field, if a new task contradicts the stored one with its id."""
    for field, value in row.items():
        if stored[field] != value:
            where = named(locations, row["task_id"])
            raise ValueError(f"{where}: {field} is {value!r}, but the store has {stored[field]!r}")


def refuse_other(row: Values, stored: Mapping[str, Any], where: str) -> None:
    """Raises: ValueError if an event contradicts the stored one of the same task, labeler and revision."""
    for field in COMPARED:
        if stored[field] != row[field]:
            raise ValueError(f"{where}: {field} {row[field]!r} differs from the stored {stored[field]!r}")


def messages(prompt: Sequence[Sequence[str]]) -> tuple[Message, ...]:
    """Converts a stored prompt to messages."""
    return tuple(Message(*fields) for fields in prompt)


def parts(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Splits items into slices that are short enough for one SQL statement."""
    for start in range(0, len(items), _VARIABLES_PER_STATEMENT):
        yield items[start : start + _VARIABLES_PER_STATEMENT]
