"""The quality of each labeler's answers: agreement with others, with themselves, with gold tasks, and position bias.

Each metric is a share of comparisons of two responses (`estimates.Share`). Prompts are a sample, labelers are
fixed: an interval says what similar prompts would give, not other labelers. Pairs that either side ties are left out,
except a labeler's ties on gold tasks, which count half.

Shape letters as in `panel`: J answers, T tasks, L labelers, K responses, P pairs of responses.
"""

from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

from preferences.records import Task
from preferences.statistics.clustered import Tally, clustered_mean, clustered_shares
from preferences.statistics.estimates import Floats, Interval, Ints, Share
from preferences.statistics.panel import Panel, Signs, count_pairs, padded, pair_signs

Verdict = Literal["passed", "failed", "not yet"]


@dataclass(frozen=True)
class PositionRanks:
    """The mean rank by position shown, first to last, over tasks with K responses. Ties share their mean rank.

    Lower is better. With a random order and no bias, all means are (K + 1)/2.
    """

    num_responses: int
    num_answers: int
    means: tuple[Interval, ...]


def agreement_with_others(panel: Panel) -> list[Share]:
    """Returns by labeler the share of comparisons with other labelers of the same task that are ordered alike.

    A pair counts once for each other labeler, unless one of the two ties it.
    """
    signs_JP = pair_signs(panel.ranks_JK)
    counts = count_pairs(panel, signs_JP)
    first_JP, second_JP = counts.first_TP[panel.task_J], counts.second_TP[panel.task_J]
    same_JP = np.where(signs_JP == 1, first_JP - 1, 0) + np.where(signs_JP == -1, second_JP - 1, 0)
    compared_JP = np.where(np.abs(signs_JP) == 1, first_JP + second_JP - 1, 0)
    tally = Tally(
        group_R=panel.labeler_J,
        task_R=panel.task_J,
        prompt_R=panel.prompt_T[panel.task_J],
        right_R=same_JP.sum(axis=1),
        compared_R=compared_JP.sum(axis=1),
        pairs_R=(compared_JP > 0).sum(axis=1).astype(np.float64),
        responses_R=panel.responses_J,
    )
    return clustered_shares(tally, len(panel.labelers))


def agreement_counts(panel: Panel) -> tuple[Floats, Floats]:
    """Returns [T] each: comparisons of two labelers that are ordered alike, and all. Counts as `pairwise_agreement`."""
    counts = count_pairs(panel, pair_signs(panel.ranks_JK))
    first_TP, second_TP = counts.first_TP, counts.second_TP
    same_T = ((first_TP * (first_TP - 1) + second_TP * (second_TP - 1)) / 2).sum(axis=1)
    return same_T, same_T + (first_TP * second_TP).sum(axis=1)


def self_agreement(panel: Panel) -> list[Share]:
    """Returns by labeler the share of pairs ordered alike on a task and on its hidden repeat.

    A repeat may have its task's responses in another order.

    Raises: ValueError, naming the repeat, if it has other responses.
    """
    root_J = panel.root_T[panel.task_J]
    repeated = np.flatnonzero(root_J != panel.task_J)
    original = np.flatnonzero(np.isin(panel.task_J, root_J[repeated]))
    row_of = {(int(panel.task_J[row]), int(panel.labeler_J[row])): int(row) for row in original}
    root_rows = [row_of.get((int(root_J[row]), int(panel.labeler_J[row])), -1) for row in repeated]
    before = np.array(root_rows, dtype=np.int64)
    again, before = repeated[before >= 0], before[before >= 0]
    ranks_JK = panel.ranks_JK[again]
    for index, row in enumerate(again):
        repeat, root = panel.tasks[panel.task_J[row]], panel.tasks[root_J[row]]
        if repeat.responses != root.responses:
            order = _order_of_root(repeat, root)
            ranks_JK[index, : len(order)] = ranks_JK[index, order]
    now_JP, then_JP = pair_signs(ranks_JK), pair_signs(panel.ranks_JK[before])
    compared_JP = (np.abs(now_JP) == 1) & (np.abs(then_JP) == 1)
    same_J = (compared_JP & (now_JP == then_JP)).sum(axis=1).astype(np.float64)
    repeats = panel.of_answers(again)
    tally = _tally(repeats, repeats.labeler_J, same_J, compared_JP.sum(axis=1).astype(np.float64))
    return clustered_shares(tally, len(panel.labelers))


def gold_accuracy(panel: Panel) -> list[Share]:
    """Returns by labeler the share of gold tasks' ordered pairs that they order alike. A tie counts half.

    A tie is worth as much as a guess. If ties were left out, tying everything hard would raise a labeler's accuracy.
    """
    gold = np.array([bool(task.gold_ranks) for task in panel.tasks])
    tested = panel.of_tasks(gold)
    gold_JP = pair_signs(padded([tested.tasks[task].gold_ranks for task in tested.task_J], panel.ranks_JK.shape[1]))
    signs_JP = pair_signs(tested.ranks_JK)
    ordered_JP = np.abs(gold_JP) == 1
    right_JP = np.where(ordered_JP, (signs_JP == gold_JP) + 0.5 * (signs_JP == 0), 0.0)
    compared_J = ordered_JP.sum(axis=1).astype(np.float64)
    tally = _tally(tested, tested.labeler_J, right_JP.sum(axis=1), compared_J)
    return clustered_shares(tally, len(panel.labelers))


def screen(accuracy: Share, *, threshold: float, min_tasks: int) -> Verdict:
    """Decides whether a labeler's accuracy on gold tasks reaches a threshold, after at least `min_tasks` of them.

    "passed" at `threshold` or above; "failed" if the whole interval lies below it; otherwise "not yet": more gold tasks
    are needed. Call it once, at the end of a batch: a labeler who is tested after every answer passes sooner or later.

    Raises: ValueError for a threshold outside 0 to 1, and for less than one task.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold is {threshold}; a share from 0 to 1 was expected")
    if min_tasks < 1:
        raise ValueError(f"min_tasks is {min_tasks}; at least 1 was expected")
    if accuracy.num_tasks < min_tasks:
        return "not yet"
    if accuracy.mean >= threshold:
        return "passed"
    return "failed" if accuracy.high < threshold else "not yet"


def shown_first(panel: Panel) -> tuple[Share, list[Share]]:
    """Returns the share of untied pairs whose earlier response is preferred: overall, and by labeler.

    It is ½ with a random order and no bias. With two responses it is how often the first one wins.
    """
    signs_JP = _signs_as_shown(panel)
    earlier_J = (signs_JP == 1).sum(axis=1).astype(np.float64)
    compared_J = earlier_J + (signs_JP == -1).sum(axis=1)
    (overall,) = clustered_shares(_tally(panel, np.zeros_like(panel.labeler_J), earlier_J, compared_J), 1)
    by_labeler = clustered_shares(_tally(panel, panel.labeler_J, earlier_J, compared_J), len(panel.labelers))
    return overall, by_labeler


def ranks_by_position(panel: Panel) -> tuple[PositionRanks, ...]:
    """Returns mean ranks by position shown, for each number of responses that a task has."""
    signs_JP, width = _signs_as_shown(panel), panel.ranks_JK.shape[1]
    prompt_J = panel.prompt_T[panel.task_J]
    midranks_JK = np.ones((len(signs_JP), width))
    for column, (earlier, later) in enumerate(combinations(range(width), 2)):
        sign_J = signs_JP[:, column]
        midranks_JK[:, earlier] += (sign_J == -1) + 0.5 * (sign_J == 0)
        midranks_JK[:, later] += (sign_J == 1) + 0.5 * (sign_J == 0)
    found = []
    for num_responses in np.unique(panel.responses_J):
        rows = panel.responses_J == num_responses
        means = tuple(clustered_mean(midranks_JK[rows, column], prompt_J[rows]) for column in range(num_responses))
        found.append(PositionRanks(int(num_responses), int(rows.sum()), means))
    return tuple(found)


def _signs_as_shown(panel: Panel) -> Signs:
    """Returns [J, P]: the signs of pairs of positions, where the response shown earlier is the first of its pair."""
    return pair_signs(np.take_along_axis(panel.ranks_JK, panel.orders_JK.astype(np.int64), axis=1))


def _tally(panel: Panel, group_J: Ints, right_J: Floats, compared_J: Floats) -> Tally:
    """Tallies rows that compare each pair of an answer at most once."""
    prompt_J = panel.prompt_T[panel.task_J]
    return Tally(group_J, panel.task_J, prompt_J, right_J, compared_J, compared_J, panel.responses_J)


def _order_of_root(repeat: Task, root: Task) -> list[int]:
    """Returns the index of each of the root's responses in its repeat."""
    if sorted(repeat.responses) != sorted(root.responses):
        raise ValueError(
            f"task {repeat.task_id!r}: repeat_of is {root.task_id!r}, which has other responses; the same were expected"
        )
    return [repeat.responses.index(response) for response in root.responses]
