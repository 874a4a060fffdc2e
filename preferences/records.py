"""Records of labeling (tasks, shown tasks, answers, judgments, rankings), and how error messages name them.

Ranks count from 1 (best), equal ranks are ties, and gaps are closed (1, 1, 3 becomes 1, 1, 2).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, Protocol, Self, get_args

from files.conversations import spoken
from preferences.annotations import NO_ANNOTATIONS, Annotations

MIN_RESPONSES = 2  # to rank; a single response is rated alone
GOLD = "gold"  # the key in a task's details that holds the right answer about a single response
MAX_RESPONSES = 9
MAX_LABELERS = 1_000  # per task; adding a task creates a row for each
MAX_REVISION = 10_000  # events of one labeler on one task
MAX_MILLISECONDS = 2**31 - 1  # nearly 25 days: the largest integer that the store's column holds
MAX_CREATED_AT = 4_102_444_800.0  # the year 2100; times in milliseconds are far above it
MAX_ID_CHARACTERS = 500  # a PostgreSQL index entry holds 2,704 bytes, a character takes at most 4
OVERALL = "overall"  # the objective if there is only one

Flags = tuple[tuple[str, ...], ...]  # the flags of each response
Kind = Literal["answer", "skip", "undo", "adjudication", "void"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Locations = Mapping[tuple[str, str, int], str]  # file and line by (task, labeler, revision); (task, "", 0) for a task
NO_LOCATIONS: Locations = {}  # for rows that come from no file


@dataclass(frozen=True)
class Message:
    """One turn of a conversation. `role` is system, user, assistant or tool.

    `more` holds the other fields of a message with tools, as `files.conversations` reads them: an assistant's
    `tool_calls`, the `tool_call_id` and `name` of a result, and the `tools` in the first message. It is their JSON
    text, so that messages can be compared and hashed; "" = none.
    """

    role: str
    content: str
    more: str = ""

    @classmethod
    def of(cls, turn: Mapping[str, Any]) -> Self:
        """Converts a message of a file or a request, which was checked."""
        more = {name: value for name, value in turn.items() if name not in ("role", "content")}
        return cls(turn["role"], turn["content"], json.dumps(more, ensure_ascii=False) if more else "")

    @property
    def turn(self) -> dict[str, Any]:
        """The message as files and chat templates have it."""
        return {"role": self.role, "content": self.content, **(json.loads(self.more) if self.more else {})}

    @property
    def fields(self) -> list[str]:
        """What the store and hashes have of the message."""
        return [self.role, self.content, *([self.more] if self.more else [])]

    @property
    def text(self) -> str:
        """The content, with a line for each call of a tool."""
        return spoken(self.turn)


@dataclass(frozen=True)
class Task:
    """A prompt and the K responses to rank, in canonical order. `sources[i]` names who wrote `responses[i]`. A single
    response is not ranked (its rank is 1), but rated and marked.

    `objective` is what labelers judge by ("helpful", ...). `gold_ranks` is the correct ranking of a gold task. A gold
    task with a single response has the rank 1, and `details["gold"]` holds the right answer (`GoldAnswer`).
    `repeat_of` names the task that this one repeats for labelers who judged that task. Both are hidden from labelers,
    and so is `details`: where the task comes from and how it was chosen, in JSON's types. If there is a `warning`
    ("describes violence"), labelers see it first and decide whether to see the task.
    """

    task_id: str
    prompt: tuple[Message, ...]
    responses: tuple[str, ...]
    sources: tuple[str, ...]
    objective: str = OVERALL
    gold_ranks: tuple[int, ...] = ()
    repeat_of: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    warning: str = ""

    def __post_init__(self) -> None:
        if not self.task_id:
            raise ValueError("task_id is empty; every task needs a unique name")
        if not self.prompt:
            raise ValueError(f"task {self.task_id!r}: prompt has no messages; at least one was expected")
        if not 1 <= len(self.responses) <= MAX_RESPONSES:
            raise ValueError(
                f"task {self.task_id!r}: responses has {len(self.responses)} entries;"
                f" 1 to {MAX_RESPONSES} were expected"
            )
        if len(self.sources) != len(self.responses):
            raise ValueError(
                f"task {self.task_id!r}: sources has {len(self.sources)} entries for {len(self.responses)} responses"
            )
        if self.gold_ranks and len(self.gold_ranks) != len(self.responses):
            raise ValueError(
                f"task {self.task_id!r}: gold_ranks has {len(self.gold_ranks)} entries for"
                f" {len(self.responses)} responses"
            )

    @property
    def is_single(self) -> bool:
        """Whether there is nothing to rank: labelers rate and mark the response alone."""
        return len(self.responses) < MIN_RESPONSES


@dataclass(frozen=True)
class GoldAnswer:
    """The right answer about a single response: the lowest and the highest right rating by name, and its marks.

    The name of the overall rating, which belongs to no criterion, is "". Without `flags`, any marks are right.
    """

    ratings: Mapping[str, tuple[float, float]]
    flags: frozenset[str] | None

    @classmethod
    def of(cls, where: str, details: Mapping[str, Any]) -> Self:
        """Reads {"gold": {"rating": 6, "criteria": {"correct": 1, "helpful": [5, 7]}, "flags": []}} or some keys.

        Raises: ValueError, beginning with `where`, for something else.
        """
        found = details.get(GOLD)
        if not isinstance(found, Mapping) or not found or found.keys() - {"rating", "criteria", "flags"}:
            raise ValueError(
                f"{where}: details.{GOLD} is {found!r}; the right ratings and marks were expected, such as"
                ' {"rating": [5, 7], "criteria": {"correct": 1}, "flags": []}, with at least one of these keys'
            )
        criteria, flags = found.get("criteria", {}), found.get("flags")
        if not isinstance(criteria, Mapping):
            raise ValueError(f"{where}: details.{GOLD}.criteria is {criteria!r}; ratings by criterion were expected")
        if flags is not None and not (isinstance(flags, list) and all(isinstance(flag, str) for flag in flags)):
            raise ValueError(f"{where}: details.{GOLD}.flags is {flags!r}; a list of marks was expected")
        given = {**({"": found["rating"]} if "rating" in found else {}), **criteria}
        if not given and flags is None:
            raise ValueError(f"{where}: details.{GOLD} is {found!r}; a right rating or marks were expected")
        ratings = {name: _right_ratings(f"{where}: details.{GOLD}", name, right) for name, right in given.items()}
        return cls(ratings, None if flags is None else frozenset(flags))


def _right_ratings(where: str, name: str, right: Any) -> tuple[float, float]:
    ends = right if isinstance(right, list) else [right, right]
    if len(ends) != 2 or not all(type(end) in (int, float) for end in ends) or not ends[0] <= ends[1]:
        expected = "a rating, or the lowest and the highest that are right, was expected"
        raise ValueError(f"{where}: {name or 'rating'} is {right!r}; {expected}")
    return float(ends[0]), float(ends[1])


@dataclass(frozen=True)
class StoredTask:
    """A task with its batch and the number of labelers that it wants."""

    task: Task
    batch: str
    num_labelers: int
    handle: str = field(default="", compare=False)  # what labelers see instead of the id; it differs between stores


@dataclass(frozen=True)
class Progress:
    """A batch's progress. An open task has fewer judgments than it wants labelers."""

    num_tasks: int
    num_judgments: int
    num_open: int


@dataclass(frozen=True)
class Coverage:
    """Who has judged a task, sorted by name, and how many distinct labelers it wants."""

    task_id: str
    num_labelers: int
    judged_by: tuple[str, ...]


@dataclass(frozen=True)
class ShownTask:
    """What a labeler sees: no sources, and the responses in the order shown."""

    task_id: str
    prompt: tuple[Message, ...]
    responses: tuple[str, ...]
    warning: str = ""  # shown before the rest


@dataclass(frozen=True)
class Answer:
    """A labeler's answer. `ranks`, `ratings` and `flags` are in the order shown; `()` means no ratings or no flags."""

    ranks: tuple[int, ...]
    milliseconds: int
    ratings: tuple[float, ...] = ()  # higher is better; 1 to 7 on the page
    flags: Flags = ()
    note: str = ""
    annotations: Annotations = NO_ANNOTATIONS


@dataclass(frozen=True)
class Skip:
    """A labeler's decision to leave the task to others. `reason` is not empty."""

    reason: str
    milliseconds: int


class Labeler(Protocol):
    """Anyone who judges: a person using the page, or a script with known noise."""

    @property
    def name(self) -> str: ...

    def judge(self, shown: ShownTask) -> Answer | Skip: ...


@dataclass(frozen=True)
class Ranking:
    """One labeler's ranking of one task, in canonical order: what a reward model trains on."""

    task_id: str
    prompt: tuple[Message, ...]
    responses: tuple[str, ...]
    ranks: tuple[int, ...]
    labeler: str
    objective: str = OVERALL
    ratings: tuple[float, ...] = ()  # one per response, higher is better; () = no ratings
    flags: Flags = ()  # of each response; () = no flags


@dataclass(frozen=True)
class Judgment:
    """One immutable row of the label store: everything known about one event of one labeler.

    Lists are in canonical order. `revision` counts a labeler's events on one task; the last one is current. For a skip,
    an undo or a void, `ranks` is empty and `note` gives the reason. A void comes from a lead: it takes the labeler's
    judgment out of everything, and the audit log says who did it.
    """

    task_id: str
    labeler: str
    revision: int
    kind: Kind
    ranks: tuple[int, ...]
    ratings: tuple[float, ...]
    flags: Flags
    note: str
    shown_order: tuple[int, ...]  # shown_order[i]: canonical index of the response shown at position i
    instructions_version: str
    milliseconds: int
    client: str
    created_at: float  # seconds since the epoch
    annotations: Annotations = NO_ANNOTATIONS


def assistant_turns(prompt: Sequence[Message]) -> tuple[int, ...]:
    """Returns the places, from 0, of the assistant's turns in a conversation."""
    return tuple(place for place, message in enumerate(prompt) if message.role == "assistant")


def dense_ranks(ranks: Sequence[float]) -> tuple[int, ...]:
    """Closes gaps and keeps ties: (4, 4, 9) gives (1, 1, 2)."""
    dense = {rank: number for number, rank in enumerate(sorted(set(ranks)), start=1)}
    return tuple(dense[rank] for rank in ranks)


def as_moment(seconds: float, form: str = "%Y-%m-%d %H:%M") -> str:
    """Formats seconds since the epoch, in UTC. Old stores may hold an impossible time, since times were not checked."""
    if not is_moment(seconds):
        return f"impossible time {seconds:g}"
    return datetime.fromtimestamp(seconds, UTC).strftime(form)


def is_moment(seconds: float) -> bool:
    """Whether seconds since the epoch lie between 1970 and 2100, which excludes milliseconds. 0 stands for unknown."""
    return 0 <= seconds <= MAX_CREATED_AT


def require_moment(where: str, field: str, seconds: float) -> float:
    """Returns the seconds. Raises: ValueError for a time in milliseconds, before 1970 or after 2100."""
    if not is_moment(seconds):
        raise ValueError(
            f"{where}: {field} is {seconds!r}; seconds since the epoch, 0 to {MAX_CREATED_AT:.0f} (the year 2100), were"
            " expected"
        )
    return seconds


def named(locations: Locations, task_id: str, labeler: str = "", revision: int = 0) -> str:
    """Names a task, and who judged it, for an error message. File and line come first if they are known."""
    location = locations.get((task_id, labeler, revision), "")
    name = f"task {_short(task_id)}, labeler {_short(labeler)}" if labeler else f"task {_short(task_id)}"
    return f"{location}: {name}" if location else name


def _short(name: str) -> str:
    return repr(name) if len(name) <= MAX_ID_CHARACTERS // 2 else f"{name[: MAX_ID_CHARACTERS // 4]!r}..."
