"""Statistics of each criterion that labelers rated responses by, with the functions for ranks and ratings."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from preferences.rankings import criteria_in, judgment_by
from preferences.records import Judgment, Task
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
    agreement: Share  # of labelers on pairs that both rated differently
    alpha: Alpha  # of the ratings, ordinal


def criterion_reports(tasks: Sequence[Task], answers: Sequence[Judgment]) -> tuple[CriterionReport, ...]:
    """Returns the statistics of each criterion in the current answers, sorted by name."""
    is_ordinary_T = np.array([not task.gold_ranks and not task.repeat_of for task in tasks], dtype=bool)
    responses_T = np.array([len(task.responses) for task in tasks], dtype=np.int64)
    found = []
    for name in criteria_in(answers):
        rated = [judgment_by(answer, name) for answer in answers if answer.annotations.ratings_by(name)]
        panel = Panel.of(tasks, rated).of_tasks(is_ordinary_T)
        mean = float(np.mean([rating for answer in rated for rating in answer.ratings]))
        agreement = share_of_tasks(*agreement_counts(panel), panel.prompt_T, responses_T)
        found.append(CriterionReport(name, len(rated), mean, agreement, rating_alpha(panel)))
    return tuple(found)
