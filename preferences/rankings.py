"""Selects what reward models learn from: the current judgments among all stored ones, and the held-out rankings.

Judgments are only ever appended, so which of them are current is computed here.

Held-out comparisons are split by conversation: no prompt is ever on both sides, nor are two turns of a conversation,
whose later prompt contains the earlier one. A prompt's side depends only on its own text, the share and the seed, not
on the rest of the data, so a batch collected later never moves a prompt to the other side.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from preferences.records import Judgment, Message, Ranking, Task, dense_ranks

SAYS = ("answer", "adjudication")  # the kinds of events that judge responses


@dataclass(frozen=True)
class CurrentJudgments:
    """Each labeler's last event on each task, by kind.

    A labeler's answer stays current even if its task is adjudicated, because agreement, accuracy and time describe what
    labelers said on their own. A reward model should learn from `final`.
    """

    answers: tuple[Judgment, ...]
    skips: tuple[Judgment, ...]
    adjudications: tuple[Judgment, ...]  # the last one of each task
    replaced: tuple[Judgment, ...]  # revised or undone by the same labeler, or voided by a lead

    @property
    def final(self) -> tuple[Judgment, ...]:
        """The adjudication of each task that has one, and all answers to the other tasks."""
        adjudicated = {judgment.task_id for judgment in self.adjudications}
        return (*self.adjudications, *(answer for answer in self.answers if answer.task_id not in adjudicated))


def current_judgments(judgments: Iterable[Judgment]) -> CurrentJudgments:
    """Applies revisions, undos, voids and adjudications. `judgments` may come in any order.

    The labeler's highest revision on a task is current. After an undo or a void, no answer is current.

    Raises: ValueError if one labeler has the same revision twice on a task.
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
                f"task {judgment.task_id!r}, labeler {judgment.labeler!r}: revision {judgment.revision} appears twice;"
                " each revision once was expected"
            )
    adjudications: dict[str, Judgment] = {}
    for judgment in last.values():
        if judgment.kind == "adjudication":
            known = adjudications.get(judgment.task_id)
            if known is None or judgment.created_at > known.created_at:
                adjudications[judgment.task_id] = judgment
    return CurrentJudgments(
        answers=tuple(judgment for judgment in last.values() if judgment.kind == "answer"),
        skips=tuple(judgment for judgment in last.values() if judgment.kind == "skip"),
        adjudications=tuple(adjudications.values()),
        replaced=tuple(replaced),
    )


def why_excluded(task: Task) -> str:
    """Returns why the task's judgments are not training data: "gold task", "hidden repeat", or "" if they are.

    Gold tasks and hidden repeats measure labelers. Gold answers are known and repeats were judged before, so training
    on them would overweight easy, hand-picked prompts and count some opinions twice.
    """
    return "gold task" if task.gold_ranks else "hidden repeat" if task.repeat_of else ""


def ranking_of(task: Task, answer: Judgment) -> Ranking:
    """Turns an answer or an adjudication into what a reward model learns from."""
    return Ranking(
        task.task_id,
        task.prompt,
        task.responses,
        answer.ranks,
        answer.labeler,
        task.objective,
        answer.ratings,
        answer.flags,
    )


def criteria_in(judgments: Iterable[Judgment]) -> tuple[str, ...]:
    """Returns the names of all criteria that responses were rated by, sorted."""
    return tuple(sorted({one.name for judgment in judgments for one in judgment.annotations.criteria}))


def judgment_by(judgment: Judgment, criterion: str) -> Judgment:
    """Returns a judgment by one criterion: its ratings become the ratings, and the ranks are theirs.

    The highest rating gets rank 1, and equal ratings are ties. A judgment without such ratings is returned as it is.
    """
    ratings = judgment.annotations.ratings_by(criterion)
    if not ratings:
        return judgment
    others = tuple(one for one in judgment.annotations.criteria if one.name != criterion)
    ranks = dense_ranks([-rating for rating in ratings])
    annotations = replace(judgment.annotations, criteria=others)
    return replace(judgment, ranks=ranks, ratings=ratings, annotations=annotations)


def is_heldout(prompt: Sequence[Message], share: float, seed: int) -> bool:
    """Returns whether the prompt is held out. Over many conversations, a fraction `share` (0 to 1) is.

    The split depends only on the turns up to the user's first one, so all prompts of a conversation are on the same
    side, and so are conversations with the same beginning. Letter case and spacing make no difference.

    Raises: ValueError for a share outside 0 to 1.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"heldout share is {share}; a number from 0 to 1 was expected")
    turns = [
        [message.role, " ".join(message.content.split()).casefold(), *([message.more] if message.more else [])]
        for message in opening(prompt)
    ]
    digest = hashlib.sha256(json.dumps(["heldout", seed, turns]).encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def opening(prompt: Sequence[Message]) -> Sequence[Message]:
    """Returns the turns of a prompt up to the user's first one, which all prompts of a conversation share."""
    first = next((place for place, message in enumerate(prompt) if message.role == "user"), len(prompt))
    return prompt[: first + 1]


def split_rankings(rankings: Sequence[Ranking], heldout_share: float, seed: int) -> tuple[list[Ranking], list[Ranking]]:
    """Returns (train, heldout), each in input order."""
    train: list[Ranking] = []
    heldout: list[Ranking] = []
    for ranking in rankings:
        (heldout if is_heldout(ranking.prompt, heldout_share, seed) else train).append(ranking)
    return train, heldout
