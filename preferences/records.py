"""What passes through the label door: tasks, what a labeler is shown, answers, judgments, rankings.

Ranks count from 1 (best); equal ranks are ties; gaps are normalised away (1, 1, 3 becomes 1, 1, 2).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

MIN_RESPONSES = 2
MAX_RESPONSES = 9


@dataclass(frozen=True)
class Message:
    """One turn of a conversation. `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Task:
    """A prompt and the K responses to rank, in canonical order. `sources[i]` names who wrote `responses[i]`."""

    task_id: str
    prompt: tuple[Message, ...]
    responses: tuple[str, ...]
    sources: tuple[str, ...]

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


@dataclass(frozen=True)
class ShownTask:
    """What a labeler sees: blinded, the responses in the order shown."""

    task_id: str
    prompt: tuple[Message, ...]
    responses: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """A labeler's answer, `ranks` in the order shown."""

    ranks: tuple[int, ...]
    milliseconds: int
    flags: tuple[str, ...] = field(default=())


class Labeler(Protocol):
    """Anyone who judges: a person behind the page, or a script with known noise."""

    @property
    def name(self) -> str: ...

    def judge(self, shown: ShownTask) -> Answer: ...


@dataclass(frozen=True)
class Ranking:
    """One labeler's judgment of one task, back in canonical order: what a reward model trains on."""

    task_id: str
    prompt: tuple[Message, ...]
    responses: tuple[str, ...]
    ranks: tuple[int, ...]
    labeler: str


def dense_ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    """Ranks 1, 2, ... without gaps, ties kept: (4, 4, 9) gives (1, 1, 2)."""
    place = {rank: position for position, rank in enumerate(sorted(set(ranks)), start=1)}
    return tuple(place[rank] for rank in ranks)
