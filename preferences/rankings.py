"""Selects what reward models learn from: the current judgments among all stored ones, and the held-out rankings; and
says how far answers agree.

Judgments are only ever appended, so which of them are current is computed here.

Held-out comparisons are split by conversation: no prompt is ever on both sides, nor are two turns of a conversation,
whose later prompt contains the earlier one. A prompt's side depends only on its own text, the share and the seed, not
on the rest of the data, so a batch collected later never moves a prompt to the other side.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from preferences.annotations import Annotations
from preferences.records import Flags, Judgment, Message, Ranking, Task, dense_ranks

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


# ---- how far answers to one task agree ----
#
# Rankings are compared by pairs of responses; a single response has no ranks, so answers about it are compared by their
# ratings (overall, by criterion, and of earlier turns) and marks. Summaries in the store and leads' statistics use the
# same functions.


# A question is ("rating", ""), ("criterion", name), ("turn 3", name) or ("mark", name). A mark that was set is 1.
Said = Mapping[tuple[str, str], float]
MARK = "mark"
FAR_APART = 6  # points between 1 and 7, at which the distance is 1; for yes and no, one point is enough


def disagreement(rankings: Sequence[Sequence[int]]) -> float:
    """Returns how far rankings of one task disagree: 0 if all agree, 1 if they order all pairs in opposite ways.

    A tie against a preference counts ¼. 0 for fewer than two rankings.
    """
    num_pairs, total = 0, 0.0
    for one, other in combinations(rankings, 2):
        for first, second in combinations(range(len(one)), 2):
            difference = _sign(one, first, second) - _sign(other, first, second)
            total += (difference / 2) ** 2
            num_pairs += 1
    return total / num_pairs if num_pairs else 0.0


def _sign(ranks: Sequence[int], first: int, second: int) -> int:
    return (ranks[first] > ranks[second]) - (ranks[first] < ranks[second])


def said_alone(ratings: Sequence[float], flags: Flags | Sequence[Sequence[str]], annotations: Annotations) -> Said:
    """Returns what an answer says about a single response and the turns before it, by question."""
    return {
        **({("rating", ""): float(ratings[0])} if ratings else {}),
        **{("criterion", one.name): float(one.ratings[0]) for one in annotations.criteria},
        **{(f"turn {one.turn}", one.name): float(one.rating) for one in annotations.turns},
        **{(MARK, flag): 1.0 for flag in (flags[0] if flags else ())},
    }


def disagreement_alone(answers: Sequence[Said]) -> float:
    """Returns how far answers about a single response disagree, 0 to 1, on the question on which they disagree most.

    For one question, it is the mean distance between two labelers' answers over all pairs of labelers. The distance is
    1 between yes and no, between a mark that is set and one that is not, and between ratings six points apart; it is
    proportionally smaller for closer ratings.
    """
    questions = dict.fromkeys(question for said in answers for question in said)
    return max((_distance(question, answers) for question in questions), default=0.0)


def _distance(question: tuple[str, str], answers: Sequence[Said]) -> float:
    is_mark = question[0] == MARK
    values = [said.get(question, 0.0) for said in answers if is_mark or question in said]
    full = 1 if min(values) == 0 else FAR_APART  # scales begin at 1, and no is 0
    distances = [min(1.0, abs(one - other) / full) for one, other in combinations(values, 2)]
    return sum(distances) / len(distances) if distances else 0.0


def compare_alone(one: Said, other: Said) -> tuple[int, int]:
    """Returns to how many questions two labelers gave the same answer, and how many questions both answered.

    A mark counts if at least one of them set it.
    """
    shared = [
        question for question in {**one, **other} if question[0] == MARK or (question in one and question in other)
    ]
    return sum(one.get(question, 0.0) == other.get(question, 0.0) for question in shared), len(shared)
