"""Counting what each labeler did."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from preferences.current import CurrentJudgments
from preferences.records import Judgment


@dataclass(frozen=True)
class LabelerCount:
    """What a labeler did. `num_undone` counts all undos; `last_at` is the time of the last event, epoch seconds."""

    labeler: str
    num_answers: int
    num_skips: int
    num_undone: int
    num_revised: int  # answers that replaced an earlier answer or skip
    last_at: float


def labeler_counts(judgments: Sequence[Judgment], current: CurrentJudgments) -> tuple[LabelerCount, ...]:
    """Returns what each labeler did, by name. `current` are the current ones among `judgments`."""
    answers = Counter(answer.labeler for answer in current.answers)
    skips = Counter(skip.labeler for skip in current.skips)
    undone = Counter(judgment.labeler for judgment in judgments if judgment.kind == "undo")
    done_again = {(old.task_id, old.labeler) for old in current.replaced if old.kind != "undo"}
    revised = Counter(answer.labeler for answer in current.answers if (answer.task_id, answer.labeler) in done_again)
    last_at: dict[str, float] = {}
    for judgment in judgments:
        if judgment.created_at > last_at.get(judgment.labeler, -math.inf):
            last_at[judgment.labeler] = judgment.created_at
    return tuple(
        LabelerCount(name, answers[name], skips[name], undone[name], revised[name], last_at[name])
        for name in sorted(last_at)
    )
