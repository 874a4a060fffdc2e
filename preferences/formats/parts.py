"""What every format is made of: what a row says, what was odd about it, what an import finds.

A reader turns one row into the tasks that were judged in it and the judgments. Whatever of a row it cannot turn into a
judgment, or had to interpret, goes into the report; a row that is not of the format at all is a ValueError.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from preferences.records import Flags, Judgment, Message, Task
from preferences.results import StoredTask

UNKNOWN = "unknown"  # who judged, or who wrote, where the data does not say
CONSENSUS = "consensus"  # where it gives what came of several labelers

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RowWarning:
    """Something that a sound row would not have: `where` (file and line), what was found, what was done about it."""

    kind: str
    where: str
    found: str
    done: str

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}: {self.found}; {self.done}"


class Report:
    """What an import or an export met, row by row. A strict one refuses the first warning."""

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.num_rows = 0
        self.warnings: list[RowWarning] = []

    def add(self, kind: str, where: str, found: str, done: str) -> None:
        """Errors: ValueError with the warning, of a strict report."""
        warning = RowWarning(kind, where, found, done)
        if self.strict:
            raise ValueError(f"{where}: {kind}: {found}; with --strict that is refused (else: {done})")
        self.warnings.append(warning)

    def counts(self) -> dict[str, int]:
        """Oddities by kind, the most frequent first."""
        return dict(Counter(warning.kind for warning in self.warnings).most_common())


@dataclass(frozen=True)
class Vote:
    """One labeler's judgment as a row tells it, in canonical order; revisions are counted when rows come together.

    `note` holds what the row says of this judgment beyond ranks, ratings and flags: as JSON, where it has fields.
    `shown_order` is `()` where it is not known.
    """

    labeler: str
    ranks: tuple[int, ...]
    ratings: tuple[float, ...] = ()
    flags: Flags = ()
    note: str = ""
    shown_order: tuple[int, ...] = ()
    created_at: float = 0.0  # seconds since the epoch; 0 = not known


@dataclass(frozen=True)
class Judged:
    """One task of a row and what was said of it. `whole` are judgments that come with all their columns."""

    where: str
    task: Task
    votes: tuple[Vote, ...] = ()
    whole: tuple[Judgment, ...] = ()
    batch: str = ""  # where the row says it
    num_labelers: int = 0  # 0 = as many as judged it


Read = Callable[[str, Row, Report, str], Iterable[Judged]]  # (where, row, report, objective)
Write = Callable[[Sequence[StoredTask], Sequence[Judgment], Report], Iterator[dict[str, Any]]]


@dataclass(frozen=True)
class Format:
    """A published format by its name. `recognise` says why a row looks like it, or "" where it does not."""

    name: str
    description: str
    recognise: Callable[[Row], str]
    read: Read | None  # None: it is only written
    write: Write | None  # None: the format has no place for what a store holds


def content_id(name: str, prompt: Sequence[Message], responses: Sequence[str], sources: Sequence[str]) -> str:
    """A task's id where the data gives none: the format's name and a hash of what was judged."""
    turns = [[message.role, message.content] for message in prompt]
    return f"{name}/{_hash(turns, list(responses), list(sources))[:20]}"


def in_hash_order(chosen: str, rejected: str) -> tuple[tuple[str, str], tuple[int, int]]:
    """The two responses and their ranks, in the order of their hashes.

    So the place of a response says nothing, and a pair that was judged both ways is one task.
    """
    if _hash(chosen) <= _hash(rejected):
        return (chosen, rejected), (1, 2)
    return (rejected, chosen), (2, 1)


def _hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def ranks_of(ratings: Sequence[float]) -> tuple[int, ...]:
    """The highest rating is rank 1; equal ratings are ties."""
    order = sorted(set(ratings), reverse=True)
    return tuple(order.index(rating) + 1 for rating in ratings)


def as_note(fields: Mapping[str, Any]) -> str:
    """What a row says of one judgment, as JSON without empty fields; "" where nothing is left."""
    said = {name: plain(value) for name, value in fields.items() if value not in (None, "", [], {})}
    return json.dumps(said, ensure_ascii=False) if said else ""


def rest(row: Row, *read: str) -> dict[str, Any]:
    """The fields of a row that were not read, in JSON's types."""
    return {name: plain(value) for name, value in row.items() if name not in read and value is not None}


def plain(value: Any) -> Any:
    """The value in JSON's types: what it has no word for (times and bytes of Parquet, NaN) as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    is_known = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return value if is_known else str(value)


def user(text: str) -> tuple[Message, ...]:
    return (Message("user", text),)


def as_messages(turns: Sequence[Mapping[str, str]]) -> tuple[Message, ...]:
    return tuple(Message(turn["role"], turn["content"]) for turn in turns)


def as_turns(prompt: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in prompt]


def is_sound_prompt(where: str, prompt: Sequence[Message], report: Report) -> bool:
    """Whether responses can be trained on behind this prompt; what is odd about it is reported."""
    if not prompt or prompt[-1].role != "user":
        last = prompt[-1].role if prompt else "nobody"
        report.add("no user's turn", where, f"the prompt ends with {last}'s turn", "left out")
        return False
    empty = [turn for turn, message in enumerate(prompt) if not message.content.strip()]
    if empty:
        report.add("empty turn", where, f"turn {empty[0] + 1} of the prompt is empty", "left out")
        return False
    for turn, (first, second) in enumerate(pairwise(prompt), start=1):
        if first.role == second.role:
            report.add(
                "same speaker twice", where, f"turns {turn} and {turn + 1} are both {first.role}'s", "kept as is"
            )
            break
    return True


VERDICTS: dict[tuple[int, ...], str] = {(1, 2): "the first", (2, 1): "the second", (1, 1): "neither"}


def two_judged(where: str, report: Report, task: Task, votes: Sequence[Vote]) -> Iterator[Judged]:
    """A comparison of two, unless its prompt is unsound or one of two equal responses is preferred.

    Where several judged it and do not say the same, that is reported.
    """
    if not is_sound_prompt(where, task.prompt, report):
        return
    report_empty_replies(where, task, report)
    if len({vote.ranks for vote in votes}) > 1:
        said = ", ".join(VERDICTS[vote.ranks] for vote in votes)
        report.add("annotators disagree", where, f"better is {said}", "each kept as a judgment")
    sound = list(votes)
    if task.responses[0] == task.responses[1]:
        sound = [vote for vote in votes if vote.ranks[0] == vote.ranks[1]]
        if len(sound) < len(votes):
            found = f"both are {task.responses[0][:40]!r}, and one was preferred by {len(votes) - len(sound)}"
            report.add("identical responses", where, found, "left out" if not sound else "their judgments left out")
    if sound:
        yield Judged(where, task, tuple(sound))


def report_empty_replies(where: str, task: Task, report: Report) -> None:
    empty = [index for index, response in enumerate(task.responses) if not response.strip()]
    if empty:
        report.add("empty reply", where, f"response {empty[0] + 1} of {len(task.responses)} is empty", "kept as is")
