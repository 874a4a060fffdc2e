"""Counts for the page: how far each batch is and who did what, from one pass over the judgments."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from preferences.intervals import plain
from preferences.records import Judgment, Task
from preferences.standing import Standing, standing


@dataclass(frozen=True)
class BatchCount:
    """A batch. A task is done once as many labelers have answered it as were asked for, or a lead has settled it."""

    batch: str
    num_tasks: int
    num_done: int
    num_answers: int
    num_wanted: int  # answers
    num_skips: int
    answers_by_labeler: Mapping[str, int]


@dataclass(frozen=True)
class LabelerCount:
    """What a labeler did; `num_undone` counts undos, whatever came after; the last act is in epoch seconds."""

    labeler: str
    num_answers: int
    num_skips: int
    num_undone: int
    num_revised: int  # answers that replaced an earlier answer or skip
    last_at: float


@dataclass(frozen=True)
class Counts:
    """Batches in the tasks' order of arrival, labelers by name."""

    batches: tuple[BatchCount, ...]
    labelers: tuple[LabelerCount, ...]

    def as_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        return dict(plain(self))


def count(
    tasks: Sequence[Task],
    judgments: Sequence[Judgment],
    *,
    batch_of: Mapping[str, str],
    num_labelers_of: Mapping[str, int],
) -> Counts:
    """How far everything is. By task id: `batch_of` names its batch, `num_labelers_of` how many are to answer it.

    Raises ValueError, naming the task, where a task has no batch or number, or a judgment no task.
    """
    for task in tasks:
        if task.task_id not in batch_of or task.task_id not in num_labelers_of:
            raise ValueError(f"task {task.task_id!r}: batch_of or num_labelers_of has no entry for it")
    known = {task.task_id for task in tasks}
    stray = next((judgment for judgment in judgments if judgment.task_id not in known), None)
    if stray is not None:
        raise ValueError(f"task {stray.task_id!r}, labeler {stray.labeler!r}: a judgment of none of the tasks")
    stands = standing(judgments)
    answered = Counter(answer.task_id for answer in stands.answers)
    settled = {judgment.task_id for judgment in stands.adjudications}
    task_ids: dict[str, list[str]] = {}
    for task in tasks:
        task_ids.setdefault(batch_of[task.task_id], []).append(task.task_id)
    by_labeler = Counter((batch_of[answer.task_id], answer.labeler) for answer in stands.answers)
    skips = Counter(batch_of[skip.task_id] for skip in stands.skips)
    batches = tuple(
        BatchCount(
            batch=batch,
            num_tasks=len(ids),
            num_done=sum(task_id in settled or answered[task_id] >= num_labelers_of[task_id] for task_id in ids),
            num_answers=sum(answered[task_id] for task_id in ids),
            num_wanted=sum(num_labelers_of[task_id] for task_id in ids),
            num_skips=skips[batch],
            answers_by_labeler={name: num for (of, name), num in sorted(by_labeler.items()) if of == batch},
        )
        for batch, ids in task_ids.items()
    )
    return Counts(batches, labeler_counts(judgments, stands))


def labeler_counts(judgments: Sequence[Judgment], stands: Standing) -> tuple[LabelerCount, ...]:
    """What each labeler did, by name; `stands` is what stands of the judgments."""
    answers = Counter(answer.labeler for answer in stands.answers)
    skips = Counter(skip.labeler for skip in stands.skips)
    undone = Counter(judgment.labeler for judgment in judgments if judgment.kind == "undo")
    done_again = {(old.task_id, old.labeler) for old in stands.replaced if old.kind != "undo"}
    revised = Counter(answer.labeler for answer in stands.answers if (answer.task_id, answer.labeler) in done_again)
    last_at: dict[str, float] = {}
    for judgment in judgments:
        if judgment.created_at > last_at.get(judgment.labeler, -math.inf):
            last_at[judgment.labeler] = judgment.created_at
    return tuple(
        LabelerCount(name, answers[name], skips[name], undone[name], revised[name], last_at[name])
        for name in sorted(last_at)
    )
