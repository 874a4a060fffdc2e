"""Label stores as training sees them: tasks go in, judgments come out.

`preferences.store` implements them, and the driver hands in what opens one. Leaves out: leases, search, questions and
all else that only the labeling page needs.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from preferences.records import Coverage, Judgment, Labeler, Progress, Ranking, StoredTask, Task


class Labels(Protocol):
    """An open label store. Each call is one transaction; once it returns, its data is on disk."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def add_tasks(self, new_tasks: Sequence[Task], *, batch: str, num_labelers: int | Sequence[int]) -> None:
        """Add all tasks or none; those that are stored already are left alone. Raises: ValueError naming a bad task."""

    def answer_all(
        self,
        labelers: Sequence[Labeler],
        *,
        batch: str,
        client: str,
        instructions_version: str,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Progress:
        """Let scripted labelers answer a batch. Safe to call again after a kill."""

    def batches(self) -> list[str]:
        """The batches' names, in order of arrival."""

    def single_response_batches(self) -> list[str]:
        """The batches whose tasks have one response each, in order of arrival."""

    def tasks(self, batch: str) -> list[StoredTask]:
        """A batch's tasks, in order of arrival."""

    def coverage(self, batch: str) -> list[Coverage]:
        """Who has judged each task of the batch, in order of arrival."""

    def judgments(self, batch: str, *, with_names: bool = True) -> list[Judgment]:
        """Every event on the batch's tasks, in order; without names, labelers appear under their pseudonyms."""

    def rankings(self, batch: str) -> list[Ranking]:
        """Each labeler's current answer, or only the adjudication of an adjudicated task, by task and labeler."""


OpenLabels = Callable[[str | Path], Labels]  # takes a file's path or a database's URL
