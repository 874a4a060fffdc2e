"""What passes through the label door: tasks, what a labeler is shown, answers, judgments, rankings.

Ranks count from 1 (best); equal ranks are ties; gaps are normalised away (1, 1, 3 becomes 1, 1, 2).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

MIN_RESPONSES = 2
MAX_RESPONSES = 9
MAX_LABELERS = 1_000  # of one task; each is a row of the store from the start
MAX_REVISION = 10_000  # acts of one labeler on one task
MAX_MILLISECONDS = 2**31 - 1  # nearly 25 days: the largest whole number of the store's column
OVERALL = "overall"  # the objective of those who ask for one judgment of everything

Flags = tuple[tuple[str, ...], ...]  # of each response, the flags it was given
Kind = Literal["answer", "skip", "undo", "adjudication"]


@dataclass(frozen=True)
class Message:
    """One turn of a conversation. `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Task:
    """A prompt and the K responses to rank, in canonical order. `sources[i]` names who wrote `responses[i]`.

    `objective` is what labelers judge by ("helpful", ...). `gold_ranks` are a gold task's right answer, `repeat_of` the
    task that this one repeats for whoever judged it; both are hidden from labelers, as is `details`: where the task
    comes from and how it was chosen, in JSON's types.
    """

    task_id: str
    prompt: tuple[Message, ...]
    responses: tuple[str, ...]
    sources: tuple[str, ...]
    objective: str = OVERALL
    gold_ranks: tuple[int, ...] = ()
    repeat_of: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.task_id:
            raise ValueError("task_id is empty; every task needs a unique name")
        if not self.prompt:
            raise ValueError(f"task {self.task_id!r}: prompt has no messages; at least one was expected")
        if not MIN_RESPONSES <= len(self.responses) <= MAX_RESPONSES:
            raise ValueError(
                f"task {self.task_id!r}: responses has {len(self.responses)} entries;"
                f" a ranking needs {MIN_RESPONSES} to {MAX_RESPONSES}"
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


@dataclass(frozen=True)
class ShownTask:
    """What a labeler sees: blinded, the responses in the order shown."""

    task_id: str
    prompt: tuple[Message, ...]
    responses: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """A labeler's answer, `ranks`, `ratings` and `flags` in the order shown. `()` = no ratings, no flags."""

    ranks: tuple[int, ...]
    milliseconds: int
    ratings: tuple[float, ...] = ()  # higher is better; 1 to 7 on the page
    flags: Flags = ()
    note: str = ""


@dataclass(frozen=True)
class Skip:
    """A labeler leaves the task to others; `reason` is not empty."""

    reason: str
    milliseconds: int


class Labeler(Protocol):
    """Anyone who judges: a person behind the page, or a script with known noise."""

    @property
    def name(self) -> str: ...

    def judge(self, shown: ShownTask) -> Answer | Skip: ...


@dataclass(frozen=True)
class Ranking:
    """One labeler's judgment of one task, back in canonical order: what a reward model trains on."""

    task_id: str
    prompt: tuple[Message, ...]
    responses: tuple[str, ...]
    ranks: tuple[int, ...]
    labeler: str
    objective: str = OVERALL
    ratings: tuple[float, ...] = ()  # one a response, higher is better; () = none were given


@dataclass(frozen=True)
class Judgment:
    """One row of the label store, never changed: all that is known of one act of one labeler.

    Lists are in canonical order. `revision` counts a labeler's acts on one task; the last one stands. Of an undo or a
    skip, `ranks` is empty and `note` gives the reason.
    """

    task_id: str
    labeler: str
    revision: int
    kind: Kind
    ranks: tuple[int, ...]
    ratings: tuple[float, ...]
    flags: Flags
    note: str
    shown_order: tuple[int, ...]  # shown_order[i]: canonical index of the response shown at place i
    instructions_version: str
    milliseconds: int
    client: str
    created_at: float  # seconds since the epoch


def dense_ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    """Ranks 1, 2, ... without gaps, ties kept: (4, 4, 9) gives (1, 1, 2)."""
    place = {rank: position for position, rank in enumerate(sorted(set(ranks)), start=1)}
    return tuple(place[rank] for rank in ranks)
