"""Searching tasks and answers, for leads.

Words of prompts and responses are in a full-text index: FTS5 on SQLite, a GIN index of `to_tsvector('simple', ..)` on
PostgreSQL. A task is found if it has every word of the query, in any order and case; a word also finds longer words
that start with it. What labelers did is filtered through indexes, newest first. All functions run within the caller's
transaction.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Select, String, and_, cast, column, func, insert, select, table, text

from preferences.names import known_pseudonym
from preferences.records import Judgment
from preferences.results import as_judgments, select_events
from preferences.rows import messages, parts
from preferences.schema import assignments, judgments, task_summaries, task_texts, tasks

MAX_INDEXED_CHARACTERS = 200_000  # per task; PostgreSQL indexes at most 1 MB of distinct words
MAX_WORDS = 20
_WORD = re.compile(r"\w+")
_WORDS = table("task_words", column("rowid"), column("task_words"))  # SQLite's full-text index

Sort = Literal["", "gold", "repeat", "ordinary"]
ANY_KIND = "any"
State = Literal["", "open", "done", "archived", "adjudicated"]


@dataclass(frozen=True)
class Search:
    """What to look for. "" and 0 mean anything; times are in seconds since the epoch.

    `words` are in the prompt or a response, `note` in a note or a reason for a skip. `labeler` is a name, and `kind`
    may be ANY_KIND. With `labeler`, `kind`, `mark`, `note`, `since` or `until` the search finds what labelers did,
    otherwise tasks.
    """

    words: str = ""
    batch: str = ""
    sort: Sort = ""
    state: State = ""
    min_disagreement: float = 0.0
    labeler: str = ""
    kind: str = ""
    mark: str = ""
    note: str = ""
    since: float = 0.0
    until: float = 0.0

    @property
    def finds_answers(self) -> bool:
        return bool(self.labeler or self.kind or self.mark or self.note or self.since or self.until)


@dataclass(frozen=True)
class FoundTask:
    """A task, how many answers it has and wants, and how far they disagree (0 to 1)."""

    position: int
    task_id: str
    batch: str
    num_answers: int
    num_wanted: int
    disagreement: float
    is_adjudicated: bool
    is_archived: bool
    is_gold: bool
    is_repeat: bool


def index_texts(connection: Connection, new: Sequence[tuple[int, Sequence[Sequence[str]], Sequence[str]]]) -> None:
    """Stores the words of new tasks, given as (position, prompt, responses) as the table of tasks has them."""
    rows = []
    for position, prompt, responses in new:
        text = "\n".join([*(message.text for message in messages(prompt)), *responses])
        rows.append({"task": position, "text": text.replace("\0", " ")[:MAX_INDEXED_CHARACTERS]})
    if rows:
        connection.execute(insert(task_texts), rows)


# ---- tasks ----


def find_tasks(connection: Connection, search: Search, *, after: int, limit: int) -> list[FoundTask]:
    """Returns the first `limit` tasks at positions above `after` that the search finds, in order of arrival."""
    wanted = _tasks(connection, search).where(tasks.c.position > after).order_by(tasks.c.position).limit(limit)
    positions = list(connection.scalars(wanted))
    return [found for part in parts(positions) for found in _described(connection, part)]


def find_positions(connection: Connection, search: Search, *, limit: int) -> list[int]:
    """Returns the positions of the first `limit` tasks that the search finds, in order of arrival.

    A search for answers finds their tasks.
    """
    if search.finds_answers:
        statement = _answers(connection, search).with_only_columns(tasks.c.position).distinct()
        return sorted(connection.scalars(statement.order_by(tasks.c.position).limit(limit)))
    return list(connection.scalars(_tasks(connection, search).order_by(tasks.c.position).limit(limit)))


def _tasks(connection: Connection, search: Search) -> Select[Any]:
    return select(tasks.c.position).where(*_of_task(connection, search))


def _of_task(connection: Connection, search: Search) -> list[ColumnElement[bool]]:
    """Returns the conditions on a task."""
    conditions: list[ColumnElement[bool]] = []
    if search.batch:
        # Answers are read newest first; coalesce keeps databases from reading all of the batch's tasks by its index.
        batch = func.coalesce(tasks.c.batch, "") if search.finds_answers else tasks.c.batch
        conditions.append(batch == search.batch)
    if search.words:
        conditions.append(_has_words(connection, search.words))
    if search.sort:
        conditions.append(_is_of_sort(connection, search.sort))
    if search.min_disagreement > 0:
        above = task_summaries.c.disagreement >= search.min_disagreement
        in_batch = (task_summaries.c.batch == search.batch,) if search.batch else ()
        conditions.append(tasks.c.position.in_(select(task_summaries.c.task).where(above, *in_batch)))
    if search.state:
        conditions.append(_is_in_state(search.state))
    return conditions


def _is_of_sort(connection: Connection, sort: Sort) -> ColumnElement[bool]:
    if sort == "gold":
        return _is_not(connection, "tasks.gold_ranks", "[]")
    if sort == "repeat":
        return and_(text("tasks.repeat_of <> ''"))
    return and_(cast(tasks.c.gold_ranks, String) == "[]", tasks.c.repeat_of == "")


def _is_in_state(state: State) -> ColumnElement[bool]:
    """Returns the condition for a state. The subqueries start from what is rarer, so that few rows are looked at."""
    position, answered = tasks.c.position, select(task_summaries.c.task)
    if state == "adjudicated":
        return position.in_(answered.where(task_summaries.c.is_adjudicated))
    is_archived = position.in_(select(assignments.c.task).where(assignments.c.is_archived))
    if state == "archived":
        return is_archived
    own = and_(assignments.c.batch == tasks.c.batch, assignments.c.task == position)
    is_offered = and_(~assignments.c.is_done, ~assignments.c.is_surplus, ~assignments.c.is_archived)
    is_open = select(assignments.c.task).where(own, is_offered).correlate(tasks).exists()
    return is_open if state == "open" else and_(position.in_(answered), ~is_archived, ~is_open)


def _has_words(connection: Connection, words: str) -> ColumnElement[bool]:
    """Returns the condition that a task has every word, or a longer one that starts with it."""
    found = list(dict.fromkeys(_WORD.findall(words)))[:MAX_WORDS]
    if not found:
        return tasks.c.position < 0  # punctuation only: nothing is indexed under it
    if connection.dialect.name == "postgresql":
        query = " & ".join(f"'{word}':*" for word in found)
        matches = func.to_tsvector(text("'simple'"), task_texts.c.text).op("@@")(
            func.to_tsquery(text("'simple'"), query)
        )
        return tasks.c.position.in_(select(task_texts.c.task).where(matches))
    query = " ".join(f'"{word}"*' for word in found)
    return tasks.c.position.in_(select(_WORDS.c.rowid).where(_WORDS.c.task_words.op("MATCH")(query)))


def _described(connection: Connection, positions: Sequence[int]) -> list[FoundTask]:
    counts: dict[int, tuple[int, int, bool]] = {}
    columns = (assignments.c.task, assignments.c.is_done, assignments.c.is_surplus, assignments.c.is_archived)
    for task, is_done, is_surplus, is_archived in connection.execute(
        select(*columns).where(assignments.c.task.in_(positions))
    ):
        done, wanted, archived = counts.get(task, (0, 0, False))
        counts[task] = (done + is_done, wanted + (is_done or not is_surplus), archived or is_archived)
    statement = (
        select(tasks, task_summaries.c.disagreement, task_summaries.c.is_adjudicated)
        .outerjoin(task_summaries, task_summaries.c.task == tasks.c.position)
        .where(tasks.c.position.in_(positions))
        .order_by(tasks.c.position)
    )
    return [
        FoundTask(
            row.position,
            row.task_id,
            row.batch,
            *counts[row.position][:2],
            row.disagreement or 0.0,
            bool(row.is_adjudicated),
            counts[row.position][2],
            bool(row.gold_ranks),
            bool(row.repeat_of),
        )
        for row in connection.execute(statement)
    ]


# ---- what labelers did ----


def find_answers(connection: Connection, search: Search, *, before: int, limit: int) -> list[tuple[int, Judgment]]:
    """Returns (number, event) of the newest `limit` events with numbers below `before` (0 = any), newest first."""
    statement = _answers(connection, search).order_by(judgments.c.judgment_id.desc()).limit(limit)
    if before:
        statement = statement.where(judgments.c.judgment_id < before)
    rows = connection.execute(statement).mappings().all()
    return list(zip((row["judgment_id"] for row in rows), as_judgments(rows), strict=True))


def _answers(connection: Connection, search: Search) -> Select[Any]:
    conditions = _of_task(connection, search)
    if search.labeler:
        conditions.append(judgments.c.labeler == known_pseudonym(connection, search.labeler))
    if search.kind not in ("", ANY_KIND):
        conditions.append(judgments.c.kind == search.kind)
    if search.mark:
        conditions += [
            _is_not(connection, "judgments.flags", "[]"),
            _contains(judgments.c.flags, json.dumps(search.mark)),
        ]
    if search.note:
        pattern = json.dumps(search.note)[1:-1]
        conditions += [_is_not(connection, "judgments.note", '""'), _contains(judgments.c.note, pattern)]
    if search.since:
        conditions.append(judgments.c.created_at >= search.since)
    if search.until:
        conditions.append(judgments.c.created_at < search.until)
    return select_events().where(*conditions)


def _is_not(connection: Connection, column: str, empty: str) -> ColumnElement[bool]:
    """Returns the condition of a partial index on a column of JSON, word for word, or SQLite ignores the index."""
    cast_to = "::text" if connection.dialect.name == "postgresql" else ""
    return and_(text(f"{column}{cast_to} <> '{empty}'"))


def _contains(column: ColumnElement[Any], part: str) -> ColumnElement[bool]:
    """Whether the JSON in a column contains a text, ignoring the case of ASCII letters."""
    escaped = part.replace("!", "!!").replace("%", "!%").replace("_", "!_")
    return func.lower(cast(column, String)).like(f"%{escaped.lower()}%", escape="!")
