"""Parts that all formats share: votes, warnings, the report, and helpers for readers and writers.

A reader converts one row to tasks and judgments. It reports a warning for anything that it cannot convert or has to
interpret, and raises ValueError for a row that is not in the format at all.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from files.conversations import tool_messages
from files.fields import present, text_field, tools_field
from files.hashes import json_hash
from preferences.records import OVERALL, Flags, Judgment, Kind, Message, StoredTask, Task

ASKS = ("user", "tool")  # whose turn a response follows
UNKNOWN = "unknown"  # the labeler or the source, if the data does not say
NO_DETAILS: Mapping[str, Any] = {}
CONSENSUS = "consensus"  # the labeler, if the data has only several labelers' aggregate

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RowWarning:
    """Something unusual about a row: `where` (file and line), what was found, and what was done about it."""

    kind: str
    where: str
    found: str
    done: str

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}: {self.found}; {self.done}"


class Report:
    """The warnings of an import or an export. A strict report raises the first one."""

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.num_rows = 0
        self.warnings: list[RowWarning] = []

    def add(self, kind: str, where: str, found: str, done: str) -> None:
        """Adds a warning. Raises: ValueError with the warning, if the report is strict."""
        warning = RowWarning(kind, where, found, done)
        if self.strict:
            raise ValueError(f"{where}: {kind}: {found}; --strict refuses it (otherwise: {done})")
        self.warnings.append(warning)

    def counts(self) -> dict[str, int]:
        """Counts warnings by kind, the most frequent first."""
        return dict(Counter(warning.kind for warning in self.warnings).most_common())

    def outcomes(self) -> dict[str, int]:
        """Counts warnings by kind. The kind includes what was done, if that is the same for all its warnings."""
        done: dict[str, set[str]] = {}
        for warning in self.warnings:
            done.setdefault(warning.kind, set()).add(warning.done)
        return {
            f"{kind} ({', '.join(done[kind])})" if len(done[kind]) == 1 else kind: count
            for kind, count in self.counts().items()
        }


@dataclass(frozen=True)
class Vote:
    """One labeler's judgment as a row states it, in canonical order. Merging rows assigns revisions.

    `note` contains what the row says about this judgment beyond ranks, ratings and flags, as JSON if it has fields.
    `shown_order` is `()` if it is unknown. A skip has no ranks, and its note is the reason.
    """

    labeler: str
    ranks: tuple[int, ...]
    ratings: tuple[float, ...] = ()
    flags: Flags = ()
    note: str = ""
    shown_order: tuple[int, ...] = ()
    created_at: float = 0.0  # seconds since the epoch; 0 = not known
    kind: Kind = "answer"
    milliseconds: int = 0  # 0 = not known


@dataclass(frozen=True)
class JudgedTask:
    """One task of a row with its votes, or its `judgments` if the row has all of their columns."""

    where: str
    task: Task
    votes: tuple[Vote, ...] = ()
    judgments: tuple[Judgment, ...] = ()
    batch: str = ""  # "" = the row does not say
    num_labelers: int = 0  # 0 = as many as judged it


Read = Callable[[str, Row, Report, str], Iterable[JudgedTask]]  # (where, row, report, objective)
Stored = Sequence[StoredTask]  # the tasks that a writer gets
Judged = Sequence[Judgment]  # every event on them
Written = Iterator[dict[str, Any]]  # rows
Write = Callable[[Stored, Judged, Report], Written]


@dataclass(frozen=True)
class Format:
    """A published format. `recognise` returns why a row looks like this format, or "" if it does not."""

    name: str
    description: str
    recognise: Callable[[Row], str]
    read: Read | None  # None: it is only written
    write: Write | None  # None: the format cannot represent what a store contains


def has_fields(*names: str, reason: str, text: str = "") -> Callable[[Row], str]:
    """Returns `Format.recognise` for rows with all of these fields, of which `text` is a string; `reason` is what it
    returns for them.
    """
    return lambda row: reason if row.keys() >= {*names} and (not text or isinstance(row[text], str)) else ""


def content_id(name: str, prompt: Sequence[Message], responses: Sequence[str], sources: Sequence[str]) -> str:
    """Returns an id for a task whose data has none: the format's name and a hash of what was judged."""
    turns = [message.fields for message in prompt]
    return f"{name}/{json_hash(turns, list(responses), list(sources))[:20]}"


def imported_task(
    name: str,
    prompt: tuple[Message, ...],
    responses: tuple[str, ...],
    objective: str,
    details: Mapping[str, Any] = NO_DETAILS,
    sources: tuple[str, ...] = (),
    task_id: str = "",
    warning: str = "",
) -> Task:
    """Returns the task of a row in the format `name`. By default its id is `content_id`, and its sources unknown."""
    return Task(
        task_id=task_id or content_id(name, prompt, responses, sources),
        prompt=prompt,
        responses=responses,
        sources=sources or (UNKNOWN,) * len(responses),
        objective=objective or OVERALL,
        details=details,
        warning=warning,
    )


def in_hash_order(chosen: str, rejected: str) -> tuple[tuple[str, str], tuple[int, int]]:
    """Returns the two responses and their ranks, in the order of the responses' hashes.

    So a response's position carries no information, and a pair that was judged both ways is one task.
    """
    if json_hash(chosen) <= json_hash(rejected):
        return (chosen, rejected), (1, 2)
    return (rejected, chosen), (2, 1)


def ranks_of(ratings: Sequence[float]) -> tuple[int, ...]:
    """Converts ratings to ranks: the highest rating is rank 1, equal ratings are ties."""
    order = sorted(set(ratings), reverse=True)
    return tuple(order.index(rating) + 1 for rating in ratings)


def as_note(fields: Mapping[str, Any]) -> str:
    """Returns a judgment's other fields as JSON, without empty ones; "" if there are none."""
    filled = {name: plain(value) for name, value in fields.items() if value not in (None, "", [], {})}
    return json.dumps(filled, ensure_ascii=False) if filled else ""


def rest(row: Row, *read: str) -> dict[str, Any]:
    """Returns the fields of a row that were not read, in JSON's types."""
    return {name: plain(value) for name, value in row.items() if name not in read and value is not None}


def plain(value: Any) -> Any:
    """Converts a value to JSON's types. What JSON lacks (Parquet's times and bytes, NaN) becomes text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    is_known = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return value if is_known else str(value)


def user(text: str) -> tuple[Message, ...]:
    return (Message("user", text),)


def as_messages(turns: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    return tuple(Message.of(turn) for turn in turns)


def as_turns(prompt: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.turn for message in prompt]


def prompt_field(where: str, row: Row, *, is_asked: bool = False) -> tuple[Message, ...]:
    """Returns a row's `prompt`, a list of messages, which may call tools; the first gets the row's `tools`. With
    `is_asked` no text may be empty, and the last turn must be the user's or a tool's.

    Raises: ValueError naming the field.
    """
    turns = tool_messages(where, present(where, row, "prompt"), "prompt")
    if tools := tools_field(where, row, "tools"):
        turns[0]["tools"] = [*turns[0].get("tools", ()), *tools]
    for number, turn in enumerate(turns if is_asked else ()):
        if turn["role"] != "tool" and "tool_calls" not in turn:
            text_field(f"{where}: prompt[{number}]", turn, "content")
    if is_asked and turns[-1]["role"] not in ASKS:
        field = f"prompt[{len(turns) - 1}].role"
        raise ValueError(f"{where}: field {field!r} is {turns[-1]['role']!r}; the last turn must be the user's")
    return as_messages(turns)


def is_sound_prompt(where: str, prompt: Sequence[Message], report: Report) -> bool:
    """Returns whether responses to this prompt can be trained on. Reports anything unusual about it."""
    if not prompt or prompt[-1].role not in ASKS:
        last = prompt[-1].role if prompt else "nobody"
        report.add("no user's turn", where, f"the prompt ends with {last}'s turn", "left out")
        return False
    empty = [
        turn
        for turn, message in enumerate(prompt)
        if not message.text.strip() and message.role != "tool"  # a tool may return nothing
    ]
    if empty:
        report.add("empty turn", where, f"turn {empty[0] + 1} of the prompt is empty", "left out")
        return False
    for turn, (first, second) in enumerate(pairwise(prompt), start=1):
        if first.role == second.role != "tool":  # several calls have several results
            report.add(
                "same speaker twice", where, f"turns {turn} and {turn + 1} are both {first.role}'s", "kept as is"
            )
            break
    return True


VERDICTS: dict[tuple[int, ...], str] = {(1, 2): "the first", (2, 1): "the second", (1, 1): "neither"}


def judged_pair(where: str, report: Report, task: Task, votes: Sequence[Vote]) -> Iterator[JudgedTask]:
    """Yields a comparison of two responses, unless its prompt is unsound or one of two equal responses is preferred.

    Reports labelers who disagree.
    """
    if not is_sound_prompt(where, task.prompt, report):
        return
    report_empty_replies(where, task, report)
    if len({vote.ranks for vote in votes}) > 1:
        verdicts = ", ".join(VERDICTS[vote.ranks] for vote in votes)
        report.add("annotators disagree", where, f"better is {verdicts}", "each kept as a judgment")
    sound = list(votes)
    if task.responses[0] == task.responses[1]:
        sound = [vote for vote in votes if vote.ranks[0] == vote.ranks[1]]
        if len(sound) < len(votes):
            found = f"both are {task.responses[0][:40]!r}, and one was preferred by {len(votes) - len(sound)}"
            report.add("identical responses", where, found, "left out" if not sound else "their judgments left out")
    if sound:
        yield JudgedTask(where, task, tuple(sound))


def report_empty_replies(where: str, task: Task, report: Report) -> None:
    empty = [index for index, response in enumerate(task.responses) if not response.strip()]
    if empty:
        report.add("empty reply", where, f"response {empty[0] + 1} of {len(task.responses)} is empty", "kept as is")
