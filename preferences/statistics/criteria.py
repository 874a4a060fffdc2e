"""Statistics of each criterion that labelers rated responses or turns by, with the functions for ranks and ratings."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from preferences.annotations import NO_ANNOTATIONS
from preferences.rankings import criteria_in, judgment_by
from preferences.records import MIN_RESPONSES, Judgment, Task
from preferences.statistics.agreement import Alpha, rating_alpha, share_of_tasks
from preferences.statistics.estimates import Share
from preferences.statistics.panel import Panel
from preferences.statistics.quality import agreement_counts


@dataclass(frozen=True)
class CriterionReport:
    """One criterion. Agreement and alpha leave out gold tasks and repeats; the mean does not."""

    name: str
    num_answers: int
    mean_rating: float
    agreement: Share  # between labelers: on pairs that both rated differently, or on the ratings of single responses
    alpha: Alpha  # of the ratings, ordinal


@dataclass(frozen=True)
class TurnReport:
    """The ratings of the assistant's earlier turns by one criterion. Agreement and alpha leave out gold tasks and
    repeats; the mean does not.
    """

    name: str
    num_ratings: int
    mean_rating: float
    agreement: Share  # two labelers gave a turn the same rating
    alpha: Alpha  # ordinal; a unit is a turn


def turn_reports(tasks: Sequence[Task], answers: Sequence[Judgment]) -> tuple[TurnReport, ...]:
    """Returns the statistics of the ratings of turns in the current answers, by criterion, sorted by name."""
    ordinary = {task.task_id: task for task in tasks if not task.gold_ranks and not task.repeat_of}
    found = []
    for name in sorted({one.name for answer in answers for one in answer.annotations.turns}):
        rated = [(answer, *item) for answer in answers for item in answer.annotations.turn_ratings_by(name).items()]
        # Each turn is a task of its own with one response, which labelers rate.
        judged = [
            replace(answer, task_id=f"{answer.task_id}\n{turn}", ranks=(1,), ratings=(rating,), shown_order=(0,))
            for answer, turn, rating in rated
            if answer.task_id in ordinary
        ]
        prompts = {
            f"{answer.task_id}\n{turn}": ordinary[answer.task_id].prompt
            for answer, turn, _ in rated
            if answer.task_id in ordinary
        }
        panel = Panel.of([Task(task_id, prompt, ("",), ("",)) for task_id, prompt in prompts.items()], judged)
        mean = float(np.mean([rating for *_, rating in rated]))
        found.append(TurnReport(name, len(rated), mean, _same_ratings(panel), rating_alpha(panel)))
    return tuple(found)


def _same_ratings(panel: Panel) -> Share:
    """Returns the share of pairs of labelers who gave a turn the same rating. Each turn is one comparison."""
    ratings: list[Counter[float]] = [Counter() for _ in panel.tasks]
    for answer, turn in zip(panel.answers, panel.task_J.tolist(), strict=True):
        ratings[turn][answer.ratings[0]] += 1
    same_T = np.array([sum(n * (n - 1) / 2 for n in of.values()) for of in ratings])
    labelers_T = np.array([of.total() for of in ratings], dtype=np.float64)
    pairs_T = labelers_T * (labelers_T - 1) / 2
    return share_of_tasks(same_T, pairs_T, panel.prompt_T, np.full(len(ratings), 2))


def criterion_reports(tasks: Sequence[Task], answers: Sequence[Judgment]) -> tuple[CriterionReport, ...]:
    """Returns the statistics of each criterion in the current answers, sorted by name."""
    is_ordinary_T = np.array([not task.gold_ranks and not task.repeat_of for task in tasks], dtype=bool)
    responses_T = np.array([max(len(task.responses), MIN_RESPONSES) for task in tasks], dtype=np.int64)
    found = []
    for name in criteria_in(answers):
        of_all = [judgment_by(answer, name) for answer in answers if answer.annotations.ratings_by(name)]
        rated = [replace(one, flags=(), annotations=NO_ANNOTATIONS) for one in of_all]
        panel = Panel.of(tasks, rated).of_tasks(is_ordinary_T)
        mean = float(np.mean([rating for answer in rated for rating in answer.ratings]))
        agreement = share_of_tasks(*agreement_counts(panel), panel.prompt_T, responses_T)
        found.append(CriterionReport(name, len(rated), mean, agreement, rating_alpha(panel)))
    return tuple(found)
