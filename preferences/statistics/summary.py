"""All label statistics of the lead's page, computed from tasks and judgments.

Agreement and alpha use ordinary tasks only: gold tasks are chosen because they are clear, and a repeat counts an
opinion twice. Position, time and ratings use all answers. docs/labels-quality.md explains each number
and how far to trust it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from files.records import as_json
from preferences.annotations import NO_ANNOTATIONS
from preferences.rankings import criteria_in, current_judgments, judgment_by
from preferences.records import MIN_RESPONSES, Judgment, Task
from preferences.statistics.agreement import Alpha, ranking_alpha, rating_alpha, share_of_tasks
from preferences.statistics.estimates import Share
from preferences.statistics.panel import Panel, count_pairs, pair_signs
from preferences.statistics.quality import (
    TOO_FAST_WORDS_PER_MINUTE,
    LabelerCount,
    Pace,
    Ratings,
    agreement_counts,
    agreement_with_others,
    flag_counts,
    gold_accuracy,
    labeler_counts,
    paces,
    ratings_of,
    self_agreement,
    shown_first,
    skip_reasons,
    words_per_minute,
)


@dataclass(frozen=True)
class LabelerReport:
    """One labeler. Shares are of comparisons of two responses."""

    labeler: str
    counts: LabelerCount
    agreement: Share  # with the others
    self_agreement: Share  # on hidden repeats
    gold_accuracy: Share  # on hidden gold tasks, ties counting half
    shown_first: Share  # how often the response shown earlier is preferred; ½ without bias
    pace: Pace
    ratings: Ratings
    flags: Mapping[str, int]
    skip_reasons: Mapping[str, int]


@dataclass(frozen=True)
class CriterionReport:
    """One criterion. Agreement and alpha leave out gold tasks and repeats; the mean does not.

    Of the assistant's earlier turns it counts ratings. A unit is a turn; two labelers agree if they rate it equally.
    """

    name: str
    num_answers: int
    mean_rating: float
    agreement: Share  # between labelers: on pairs that both rated differently, or on the ratings of single responses
    alpha: Alpha  # of the ratings, ordinal


@dataclass(frozen=True)
class LabelReport:
    """Statistics of all labels. Labelers are sorted by name."""

    is_single: bool  # tasks have one response: agreement is on ratings and marks, and nothing is ranked
    num_tasks: int
    num_answers: int
    num_skips: int
    num_adjudications: int
    tie_share: float  # tied pairs of responses among all pairs of all answers; NaN without answers
    agreement: Share
    alpha: Alpha
    rating_alpha: Alpha
    criteria: tuple[CriterionReport, ...]  # sorted by name
    turns: tuple[CriterionReport, ...]  # of the assistant's earlier turns, by criterion, sorted by name
    shown_first: Share
    labelers: tuple[LabelerReport, ...]
    too_fast_words_per_minute: float

    def as_dict(self) -> dict[str, Any]:
        """Converts to JSON's types. Unknown values (NaN) become None."""
        return dict(as_json(self))


def summary(
    tasks: Sequence[Task],
    judgments: Sequence[Judgment],
    *,
    too_fast_words_per_minute: float = TOO_FAST_WORDS_PER_MINUTE,
) -> LabelReport:
    """Returns all statistics of the current judgments.

    Raises: ValueError, naming the task, for a judgment that fits no task, and for a revision that appears twice.
    """
    current = current_judgments(judgments)
    counts = labeler_counts(judgments, current)
    panel = Panel.of(tasks, current.answers, [count.labeler for count in counts])
    ordinary = panel.of_tasks(np.array([not task.gold_ranks and not task.repeat_of for task in tasks], dtype=bool))
    signs_JP = pair_signs(panel.ranks_JK)
    num_pairs = int((np.abs(signs_JP) <= 1).sum())
    rate_J = words_per_minute(panel)
    first, first_by_labeler = shown_first(panel)
    responses_T = np.array([max(len(task.responses), MIN_RESPONSES) for task in panel.tasks], dtype=np.int64)
    pace_by_labeler = paces(panel, rate_J, threshold=too_fast_words_per_minute)
    return LabelReport(
        is_single=bool(tasks) and all(task.is_single for task in tasks),
        num_tasks=len(tasks),
        num_answers=len(current.answers),
        num_skips=len(current.skips),
        num_adjudications=len(current.adjudications),
        tie_share=float((signs_JP == 0).sum() / num_pairs) if num_pairs else math.nan,
        agreement=share_of_tasks(*agreement_counts(ordinary), panel.prompt_T, responses_T),
        alpha=ranking_alpha(count_pairs(ordinary, pair_signs(ordinary.ranks_JK)), panel.prompt_T, responses_T),
        rating_alpha=rating_alpha(ordinary),
        criteria=criterion_reports(tasks, current.answers),
        turns=turn_reports(tasks, current.answers),
        shown_first=first,
        labelers=_labelers(panel, ordinary, counts, current.skips, first_by_labeler, pace_by_labeler),
        too_fast_words_per_minute=too_fast_words_per_minute,
    )


def _labelers(
    panel: Panel,
    ordinary: Panel,
    counts: Sequence[LabelerCount],
    skips: Sequence[Judgment],
    first: Sequence[Share],
    pace: Sequence[Pace],
) -> tuple[LabelerReport, ...]:
    answers: dict[str, list[Judgment]] = {name: [] for name in panel.labelers}
    for answer in panel.answers:
        answers[answer.labeler].append(answer)
    with_others, with_self, gold = agreement_with_others(ordinary), self_agreement(panel), gold_accuracy(panel)
    ratings = ratings_of(panel)
    return tuple(
        LabelerReport(
            labeler=name,
            counts=counts[index],
            agreement=with_others[index],
            self_agreement=with_self[index],
            gold_accuracy=gold[index],
            shown_first=first[index],
            pace=pace[index],
            ratings=ratings[index],
            flags=flag_counts(answers[name]),
            skip_reasons=skip_reasons([skip for skip in skips if skip.labeler == name]),
        )
        for index, name in enumerate(panel.labelers)
    )


def turn_reports(tasks: Sequence[Task], answers: Sequence[Judgment]) -> tuple[CriterionReport, ...]:
    """Returns the statistics of the ratings of turns in the current answers, by criterion, sorted by name."""
    ordinary = {task.task_id: task for task in tasks if not task.gold_ranks and not task.repeat_of}
    found = []
    for name in sorted({one.name for answer in answers for one in answer.annotations.turns}):
        rated = [(answer, *item) for answer in answers for item in answer.annotations.turn_ratings_by(name).items()]
        # Each turn is a task of its own with one response, which labelers rate.
        judged = [
            replace(_rated_alone(answer, (rating,)), task_id=f"{answer.task_id}\n{turn}", ranks=(1,), shown_order=(0,))
            for answer, turn, rating in rated
            if answer.task_id in ordinary
        ]
        prompts = {
            f"{answer.task_id}\n{turn}": ordinary[answer.task_id].prompt
            for answer, turn, _ in rated
            if answer.task_id in ordinary
        }
        panel = Panel.of([Task(task_id, prompt, ("",), ("",)) for task_id, prompt in prompts.items()], judged)
        found.append(_criterion_report(name, [rating for *_, rating in rated], len(rated), panel))
    return tuple(found)


def _rated_alone(answer: Judgment, ratings: tuple[float, ...]) -> Judgment:
    """Returns an answer that says nothing but these ratings."""
    return replace(answer, ratings=ratings, flags=(), annotations=NO_ANNOTATIONS)


def _criterion_report(name: str, ratings: Sequence[float], num_answers: int, ordinary: Panel) -> CriterionReport:
    """Returns a report from all ratings and a panel of the ordinary tasks' ones."""
    responses_T = np.array([max(len(task.responses), MIN_RESPONSES) for task in ordinary.tasks], dtype=np.int64)
    agreement = share_of_tasks(*agreement_counts(ordinary), ordinary.prompt_T, responses_T)
    return CriterionReport(name, num_answers, float(np.mean(ratings)), agreement, rating_alpha(ordinary))


def criterion_reports(tasks: Sequence[Task], answers: Sequence[Judgment]) -> tuple[CriterionReport, ...]:
    """Returns the statistics of each criterion in the current answers, sorted by name."""
    is_ordinary_T = np.array([not task.gold_ranks and not task.repeat_of for task in tasks], dtype=bool)
    found = []
    for name in criteria_in(answers):
        of_all = [judgment_by(answer, name) for answer in answers if answer.annotations.ratings_by(name)]
        rated = [_rated_alone(one, one.ratings) for one in of_all]
        panel = Panel.of(tasks, rated).of_tasks(is_ordinary_T)
        found.append(_criterion_report(name, [x for one in rated for x in one.ratings], len(rated), panel))
    return tuple(found)
