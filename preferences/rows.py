"""Between records and table rows: what a column holds, and what is refused before it gets there."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from preferences.leasing import Lease, canonical_ranks
from preferences.records import Answer, Message, Task

ROLES = ("system", "user", "assistant")
_VARIABLES_PER_STATEMENT = 5_000  # SQLite takes 32,766

_T = TypeVar("_T")


def answer_row(lease: Lease, answer: Answer) -> dict[str, Any]:
    """An answer's columns, ranks in canonical order. Raises ValueError for an answer that does not fit the lease."""
    return {
        "task_id": lease.task_id,
        "ranks": list(canonical_ranks(lease, answer)),
        "shown_order": list(lease.order),
        "flags": [list(flags) for flags in answer.flags],
        "milliseconds": answer.milliseconds,
    }


def task_row(task: Task, batch: str, quota: int) -> dict[str, Any]:
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
    }


def refuse_different(row: dict[str, Any], stored: dict[str, Any]) -> None:
    """Raise ValueError, naming task and field, where an arriving task contradicts the stored one."""
    for field, value in row.items():
        if stored[field] != value:
            raise ValueError(f"task {row['task_id']!r}: {field} is {value!r}, but the store has {stored[field]!r}")


def messages(prompt: list[list[str]]) -> tuple[Message, ...]:
    """A stored prompt as messages."""
    return tuple(Message(role, content) for role, content in prompt)


def parts(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Runs of items short enough for one statement."""
    for start in range(0, len(items), _VARIABLES_PER_STATEMENT):
        yield items[start : start + _VARIABLES_PER_STATEMENT]
