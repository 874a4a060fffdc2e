"""The tasks on which labelers disagree most, for a lead to review."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from preferences.records import Judgment
from preferences.statistics.panel import Panel, count_pairs, pair_signs


@dataclass(frozen=True)
class Disagreement:
    """A task that labelers order differently, with their rankings.

    `disagreement` is the mean of `alpha.ranking_alpha`'s δ² over pairs of responses and pairs of labelers: 0 if all
    agree, 1 if two labelers order every pair in opposite ways; a tie against a preference counts ¼.
    """

    task_id: str
    disagreement: float
    ranks: tuple[tuple[str, tuple[int, ...]], ...]  # (labeler, ranks in canonical order), by name


def disagreements(panel: Panel, adjudications: Sequence[Judgment], *, limit: int) -> tuple[Disagreement, ...]:
    """Returns the `limit` tasks with the most disagreement, most first, without adjudicated ones.

    On equal disagreement the task with more labelers comes first, then the one earlier in `panel.tasks`.
    """
    counts = count_pairs(panel, pair_signs(panel.ranks_JK))
    num_TP = counts.num_TP
    squares_TP = counts.first_TP * counts.second_TP + counts.tied_TP * (counts.first_TP + counts.second_TP) / 4
    compared_T = (num_TP * (num_TP - 1) / 2).sum(axis=1)
    mean_T = squares_TP.sum(axis=1) / np.maximum(compared_T, 1)
    adjudicated = {judgment.task_id for judgment in adjudications}
    open_T = np.array([task.task_id not in adjudicated for task in panel.tasks], dtype=bool)
    candidates = np.flatnonzero((mean_T > 0) & open_T)
    order = np.lexsort((candidates, -num_TP[candidates].max(axis=1, initial=0), -mean_T[candidates]))[:limit]
    rankings: dict[int, list[tuple[str, tuple[int, ...]]]] = {int(task): [] for task in candidates[order]}
    for row in np.flatnonzero(np.isin(panel.task_J, candidates[order])):
        answer = panel.answers[row]
        rankings[int(panel.task_J[row])].append((answer.labeler, answer.ranks))
    return tuple(
        Disagreement(panel.tasks[task].task_id, float(mean_T[task]), tuple(sorted(ranks)))
        for task, ranks in rankings.items()
    )
