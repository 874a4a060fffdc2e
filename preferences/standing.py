"""What stands of a label store's judgments, of which none is ever changed: each labeler's last act on each task."""

from collections.abc import Iterable
from dataclasses import dataclass

from preferences.records import Judgment, Ranking, Task


@dataclass(frozen=True)
class Standing:
    """What stands: labelers' answers, skips, and the answers that settle a task (its last adjudication alone).

    An answer of a labeler stands beside the adjudication of its task: agreement, accuracy and time are about what
    labelers said by themselves. `settled` is what a reward model should learn from.
    """

    answers: tuple[Judgment, ...]
    skips: tuple[Judgment, ...]
    adjudications: tuple[Judgment, ...]
    replaced: tuple[Judgment, ...]  # what its own labeler did again, or undid
    undos: tuple[Judgment, ...]  # that nothing came after

    @property
    def settled(self) -> tuple[Judgment, ...]:
        """The adjudication of each task that has one, and all answers of the others."""
        decided = {judgment.task_id for judgment in self.adjudications}
        return (*self.adjudications, *(answer for answer in self.answers if answer.task_id not in decided))


def standing(judgments: Iterable[Judgment]) -> Standing:
    """What stands after revisions, undos and adjudications, in any order of `judgments`.

    Of a labeler's acts on a task the highest revision stands; an undo leaves nothing. Raises ValueError where two of
    them have the same revision.
    """
    last: dict[tuple[str, str], Judgment] = {}
    replaced: list[Judgment] = []
    for judgment in judgments:
        key = (judgment.task_id, judgment.labeler)
        other = last.get(key)
        if other is None:
            last[key] = judgment
        elif judgment.revision > other.revision:
            last[key] = judgment
            replaced.append(other)
        elif judgment.revision < other.revision:
            replaced.append(judgment)
        else:
            raise ValueError(
                f"task {judgment.task_id!r}, labeler {judgment.labeler!r}: revision {judgment.revision} is there twice;"
                " each revision once was expected"
            )
    decided: dict[str, Judgment] = {}
    for judgment in last.values():
        if judgment.kind == "adjudication":
            known = decided.get(judgment.task_id)
            if known is None or judgment.created_at > known.created_at:
                decided[judgment.task_id] = judgment
    return Standing(
        answers=tuple(judgment for judgment in last.values() if judgment.kind == "answer"),
        skips=tuple(judgment for judgment in last.values() if judgment.kind == "skip"),
        adjudications=tuple(decided.values()),
        replaced=tuple(replaced),
        undos=tuple(judgment for judgment in last.values() if judgment.kind == "undo"),
    )


def held_back(task: Task) -> str:
    """Returns why the task's judgments are no training data, "" where they are.

    Gold tasks and hidden repeats measure labelers. Their answers are known or were given before, so training on them
    would count chosen, easy prompts and some opinions twice.
    """
    return "gold task" if task.gold_ranks else "hidden repeat" if task.repeat_of else ""


def ranking_of(task: Task, answer: Judgment) -> Ranking:
    """An answer or an adjudication as what a reward model learns from."""
    return Ranking(
        task.task_id, task.prompt, task.responses, answer.ranks, answer.labeler, task.objective, answer.ratings
    )
