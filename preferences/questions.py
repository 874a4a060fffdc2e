"""Questions of labelers to the leads about a task, and the replies, within the caller's transaction.

A thread belongs to one labeler and one task, so no labeler sees what others asked. Its last message says where it
stands: "question" (a lead should reply), "reply" (the labeler should read it) or "resolved". A labeler who was erased
can read no reply, so their threads are resolved.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Select, func, insert, select

from preferences.names import name_in
from preferences.records import Message
from preferences.rows import messages, require_text
from preferences.schema import labelers, questions, tasks

MAX_QUESTION_CHARACTERS = 4_000
ThreadState = Literal["question", "reply", "resolved"]


@dataclass(frozen=True)
class Said:
    """One message of a thread."""

    author: str
    kind: ThreadState
    text: str
    created_at: float  # seconds since the epoch


@dataclass(frozen=True)
class Thread:
    """What a labeler and the leads wrote about a task. `handle` names the task to the labeler."""

    task_id: str
    batch: str
    handle: str
    labeler: str
    prompt: tuple[Message, ...]
    warning: str
    said: tuple[Said, ...]
    is_erased: bool  # its labeler

    @property
    def state(self) -> ThreadState:
        return "resolved" if self.is_erased else self.said[-1].kind


def write(
    connection: Connection, position: int, who: str, author: str, kind: ThreadState, text: str, now: float
) -> bool:
    """Appends a message to the thread of the labeler `who` on a task. `who` and `author` are pseudonyms.

    Returns False for one that repeats the thread's last message, because a form may be sent twice.

    Raises: ValueError for an empty or too long text, and for a reply or a resolution without a question.
    """
    if kind != "resolved" and not text.strip():
        raise ValueError("text is empty; a question or a reply was expected")
    if len(text) > MAX_QUESTION_CHARACTERS:
        raise ValueError(f"text has {len(text):,} characters; at most {MAX_QUESTION_CHARACTERS:,} were expected")
    require_text("a message", "text", [text])
    own = select(questions).where(questions.c.task == position, questions.c.labeler == who)
    last = connection.execute(own.order_by(questions.c.message_id.desc()).limit(1)).one_or_none()
    if last is None and kind != "question":
        raise ValueError("there is no question of this labeler on this task")
    if last is not None and (last.author, last.kind, last.text) == (author, kind, text):
        return False
    row = {"task": position, "labeler": who, "author": author, "kind": kind, "text": text, "created_at": now}
    connection.execute(insert(questions).values(row))
    return True


def threads(connection: Connection, *, who: str = "", task_id: str = "") -> list[Thread]:
    """Returns threads of the labeler with the pseudonym `who` ("" = all), or on one task; the newest message first."""
    author = name_in(questions.c.author).label("author_name")
    labeler = name_in(questions.c.labeler).label("labeler_name")
    columns = (tasks.c.task_id, tasks.c.batch, tasks.c.handle, tasks.c.prompt, tasks.c.warning)
    statement = select(questions, author, labeler, _is_erased().label("is_erased"), *columns).join(
        tasks, questions.c.task == tasks.c.position
    )
    if who:
        statement = statement.where(questions.c.labeler == who)
    if task_id:
        statement = statement.where(tasks.c.task_id == task_id)
    found: dict[tuple[int, str], list[Any]] = {}
    for row in connection.execute(statement.order_by(questions.c.message_id)):
        found.setdefault((row.task, row.labeler), []).append(row)
    return [_thread(rows) for rows in sorted(found.values(), key=lambda rows: -rows[-1].message_id)]


def _thread(rows: Sequence[Any]) -> Thread:
    first = rows[0]
    said = tuple(Said(row.author_name, row.kind, row.text, row.created_at) for row in rows)
    about = (first.task_id, first.batch, first.handle, first.labeler_name)
    return Thread(*about, messages(first.prompt), first.warning, said, first.is_erased)


def num_waiting(connection: Connection, state: ThreadState, *, who: str = "") -> int:
    """Counts the threads in a state, of one labeler or of all."""
    newest: Select[Any] = select(func.max(questions.c.message_id)).group_by(questions.c.task, questions.c.labeler)
    if who:
        newest = newest.where(questions.c.labeler == who)
    waiting = select(func.count()).where(questions.c.message_id.in_(newest), questions.c.kind == state, ~_is_erased())
    return connection.scalar(waiting) or 0


def _is_erased() -> ColumnElement[bool]:
    """Whether a thread's labeler was erased."""
    own = select(labelers.c.pseudonym).where(labelers.c.pseudonym == questions.c.labeler, labelers.c.is_erased)
    return own.correlate(questions).exists()
