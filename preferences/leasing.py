"""What a labeler holds while judging, in which order the responses are shown, and how an answer becomes a judgment."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from preferences.records import Answer, ShownTask

Entry = TypeVar("Entry")


class LeaseLostError(RuntimeError):
    """The lease ran out and the task's places went to others: the answer was not stored."""


@dataclass(frozen=True)
class Lease:
    """One task reserved for one labeler. `order[i]` is the canonical index of the response shown at place i.

    `revision` is the number that the labeler's next act on the task will have. `handle` names the task to the labeler,
    without saying which one it is. `given_at` is when they were given it under this lease, 0 where they hold none.
    """

    shown: ShownTask
    labeler: str
    order: tuple[int, ...]
    expires_at: float  # seconds since the epoch
    revision: int = 0
    handle: str = ""
    given_at: float = 0.0  # seconds since the epoch

    @property
    def task_id(self) -> str:
        return self.shown.task_id


def display_order(task_id: str, labeler: str, num_responses: int) -> tuple[int, ...]:
    """The order in which `labeler` sees the task's responses: canonical indices, place by place.

    A function of (task_id, labeler) alone, so a reload or a restart shows the same order, while over tasks and
    labelers every order is equally likely and no source profits from its place.
    """

    def key(index: int) -> bytes:
        return hashlib.sha256(json.dumps(["display order", task_id, labeler, index]).encode()).digest()

    return tuple(sorted(range(num_responses), key=key))


def require_fits(where: str, answer: Answer, num_responses: int) -> None:
    """Raises ValueError, after `where` and naming the field, for an answer that cannot be one on so many responses."""
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


def canonical(order: Sequence[int], entries: Sequence[Entry]) -> list[Entry]:
    """Entries in the order shown, back in canonical order; none stay none."""
    back = dict(zip(order, entries, strict=True)) if entries else {}
    return [back[index] for index in range(len(back))]
