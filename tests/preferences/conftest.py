"""A label store in memory, with the calls that imports and exports make."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from preferences.records import Judgment, Task


@dataclass(frozen=True)
class Stored:
    task: Task
    batch: str
    num_labelers: int


class Book:
    """Tasks in order of arrival; judgments by (task, labeler, revision), each told once."""

    def __init__(self) -> None:
        self.stored: dict[str, Stored] = {}
        self.acts: dict[tuple[str, str, int], Judgment] = {}

    def add_tasks(self, new_tasks: Sequence[Task], *, batch: str, num_labelers: int | Sequence[int]) -> None:
        quotas = [num_labelers] * len(new_tasks) if isinstance(num_labelers, int) else num_labelers
        for task, quota in zip(new_tasks, quotas, strict=True):
            stored = Stored(task, batch, quota)
            assert self.stored.setdefault(task.task_id, stored) == stored

    def import_judgments(self, batch: str, judgments: Sequence[Judgment]) -> None:
        for act in judgments:
            assert self.stored[act.task_id].batch == batch
            assert self.acts.setdefault((act.task_id, act.labeler, act.revision), act) == act

    def tasks(self, batch: str | None = None) -> list[Stored]:
        return [one for one in self.stored.values() if batch in (None, one.batch)]

    def judgments(self, batch: str | None = None) -> list[Judgment]:
        return [act for act in self.acts.values() if batch in (None, self.stored[act.task_id].batch)]


@pytest.fixture(scope="session")
def new_book() -> Callable[[], Book]:
    return Book
