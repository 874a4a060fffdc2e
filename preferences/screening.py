"""Screening: whether a new labeler agrees with gold tasks often enough to be admitted."""

from typing import Protocol

from preferences.current import current_judgments
from preferences.statistics.panel import Panel
from preferences.statistics.quality import gold_accuracy, screen
from preferences.store import LabelStore


class Threshold(Protocol):
    """What a labeler must reach: `min_accuracy` on at least `min_tasks` gold tasks of a batch."""

    @property
    def batch(self) -> str: ...
    @property
    def min_tasks(self) -> int: ...
    @property
    def min_accuracy(self) -> float: ...


def screened(store: LabelStore, labeler: str, threshold: Threshold) -> bool:
    """Whether the labeler has passed. Call it once the batch has no more tasks for them."""
    own = [judgment for judgment in store.judgments(threshold.batch) if judgment.labeler == labeler]
    answers = current_judgments(own).answers
    if not answers:
        return False
    tasks = [stored.task for stored in store.tasks(threshold.batch)]
    (accuracy,) = gold_accuracy(Panel.of(tasks, answers, [labeler]))
    return screen(accuracy, threshold=threshold.min_accuracy, min_tasks=threshold.min_tasks) == "passed"
