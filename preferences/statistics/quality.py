"""Statistics about each labeler: the quality of their answers, how they work, and how much they did.

Quality is agreement with others, with themselves and with gold tasks, and position bias. Each metric is a share of
comparisons of two responses (`estimates.Share`). Prompts are treated as a sample and labelers as fixed, so intervals
describe other prompts like these, not other labelers. Pairs that either side ties are left out, except a labeler's ties
on gold tasks, which count half.

Time, flags, reasons to skip and ratings are numbers to look at, not verdicts: a fast labeler may be good, and a slow
one may be at lunch.

Shape letters as in `panel`: J answers, T tasks, L labelers, K responses, P pairs of responses; and N ratings.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Literal

import numpy as np

from preferences.rankings import CurrentJudgments, compare_alone
from preferences.records import MIN_RESPONSES, GoldAnswer, Judgment, Task
from preferences.statistics.estimates import Floats, Interval, Ints, Share
from preferences.statistics.intervals import Tally, clustered_mean, clustered_shares
from preferences.statistics.panel import Panel, Signs, count_pairs, padded, pair_signs

# Adults read English non-fiction silently at 238 words per minute on average, most at 175 to 300 (Brysbaert 2019,
# Journal of Memory and Language 109, 104047), and understand less above about 400 (Rayner et al. 2016, Psychological
# Science in the Public Interest 17(1)). Three times the average is skimming at best, and the measured time includes
# deciding and clicking too.
TOO_FAST_WORDS_PER_MINUTE = 700.0

MILLISECONDS_PER_MINUTE = 60_000

Verdict = Literal["passed", "failed", "not yet"]


# ---- quality ----


def agreement_with_others(panel: Panel) -> list[Share]:
    """Returns, for each labeler, the share of comparisons with other labelers of the same task that agree.

    A pair counts once for each other labeler, unless one of the two ties it. About a single response, labelers are
    compared by question (`preferences.rankings.compare_alone`).
    """
    signs_JP = pair_signs(panel.ranks_JK)
    counts = count_pairs(panel, signs_JP)
    first_JP, second_JP = counts.first_TP[panel.task_J], counts.second_TP[panel.task_J]
    same_JP = np.where(signs_JP == 1, first_JP - 1, 0) + np.where(signs_JP == -1, second_JP - 1, 0)
    compared_JP = np.where(np.abs(signs_JP) == 1, first_JP + second_JP - 1, 0)
    same_J, compared_J = same_JP.sum(axis=1).astype(np.float64), compared_JP.sum(axis=1).astype(np.float64)
    pairs_J = (compared_JP > 0).sum(axis=1).astype(np.float64)
    for one, other, same, compared in compared_alone(panel):
        for row in (one, other):
            same_J[row] += same
            compared_J[row] += compared
            pairs_J[row] = 1  # as in `_tally`
    tally = Tally(
        group_R=panel.labeler_J,
        task_R=panel.task_J,
        prompt_R=panel.prompt_T[panel.task_J],
        right_R=same_J,
        compared_R=compared_J,
        pairs_R=pairs_J,
        responses_R=_as_trials(panel.responses_J),
    )
    return clustered_shares(tally, len(panel.labelers))


def agreement_counts(panel: Panel) -> tuple[Floats, Floats]:
    """Returns two arrays [T]: comparisons of two labelers that agree, and all. Counts like `pairwise_agreement`."""
    counts = count_pairs(panel, pair_signs(panel.ranks_JK))
    first_TP, second_TP = counts.first_TP, counts.second_TP
    same_T = ((first_TP * (first_TP - 1) + second_TP * (second_TP - 1)) / 2).sum(axis=1)
    compared_T = same_T + (first_TP * second_TP).sum(axis=1)
    for one, _, same, compared in compared_alone(panel):
        same_T[panel.task_J[one]] += same
        compared_T[panel.task_J[one]] += compared
    return same_T, compared_T


def compared_alone(panel: Panel) -> Iterator[tuple[int, int, int, int]]:
    """Yields each pair of answers about a single response, as rows, and how many questions they answer alike, and
    both.
    """
    for rows in panel.rows_alone().values():
        said = {row: panel.said_alone(row) for row in rows} if len(rows) > 1 else {}
        for one, other in combinations(said, 2):
            yield (one, other, *compare_alone(said[one], said[other]))


def _as_trials(responses_J: Ints) -> Ints:
    """Counts a single response as two, whose pair is one trial."""
    return np.maximum(responses_J, MIN_RESPONSES)


def self_agreement(panel: Panel) -> list[Share]:
    """Returns, for each labeler, the share of pairs ordered alike on a task and on its hidden repeat.

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
    compared_J = compared_JP.sum(axis=1).astype(np.float64)
    for index in np.flatnonzero(panel.responses_J[again] == 1).tolist():
        said_now, said_then = panel.said_alone(int(again[index])), panel.said_alone(int(before[index]))
        same_J[index], compared_J[index] = compare_alone(said_now, said_then)
    repeats = panel.of_answers(again)
    tally = _tally(repeats, repeats.labeler_J, same_J, compared_J)
    return clustered_shares(tally, len(panel.labelers))


def gold_accuracy(panel: Panel) -> list[Share]:
    """Returns, for each labeler, the share of gold tasks' untied pairs that they order alike. A tie counts half.

    A tie is worth as much as a guess. If ties were left out, tying everything hard would raise a labeler's accuracy. Of
    a single response, each rating and the marks for which the task says what is right count as one comparison.
    """
    gold = np.array([bool(task.gold_ranks) for task in panel.tasks])
    tested = panel.of_tasks(gold)
    gold_JP = pair_signs(padded([tested.tasks[task].gold_ranks for task in tested.task_J], panel.ranks_JK.shape[1]))
    signs_JP = pair_signs(tested.ranks_JK)
    ordered_JP = np.abs(gold_JP) == 1
    right_JP = np.where(ordered_JP, (signs_JP == gold_JP) + 0.5 * (signs_JP == 0), 0.0)
    right_J, compared_J = right_JP.sum(axis=1), ordered_JP.sum(axis=1).astype(np.float64)
    for task, rows in tested.rows_alone().items():
        right_answer = GoldAnswer.of(f"task {tested.tasks[task].task_id!r}", tested.tasks[task].details)
        for row in rows:
            right_J[row], compared_J[row] = _right_alone(tested.answers[row], right_answer)
    return clustered_shares(_tally(tested, tested.labeler_J, right_J, compared_J), len(panel.labelers))


def _right_alone(answer: Judgment, right: GoldAnswer) -> tuple[int, int]:
    """Returns how many of the right ratings and marks of a single response the answer has, and how many there are."""
    given = {one.name: one.ratings[0] for one in answer.annotations.criteria}
    given |= {"": answer.ratings[0]} if answer.ratings else {}
    results = [low <= given[name] <= high for name, (low, high) in right.ratings.items() if name in given]
    if right.flags is not None:
        results.append({*answer.flags[0]} == right.flags if answer.flags else not right.flags)
    return sum(results), len(results)


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
    """Returns the share of untied pairs in which the response shown earlier is preferred: overall, and by labeler.

    It is ½ with a random order and no bias. With two responses it is how often the first one wins. Answers whose order
    is not known do not count.
    """
    panel = panel.of_answers(np.flatnonzero([bool(answer.shown_order) for answer in panel.answers]))
    signs_JP = _signs_as_shown(panel)
    earlier_J = (signs_JP == 1).sum(axis=1).astype(np.float64)
    compared_J = earlier_J + (signs_JP == -1).sum(axis=1)
    (overall,) = clustered_shares(_tally(panel, np.zeros_like(panel.labeler_J), earlier_J, compared_J), 1)
    by_labeler = clustered_shares(_tally(panel, panel.labeler_J, earlier_J, compared_J), len(panel.labelers))
    return overall, by_labeler


def _signs_as_shown(panel: Panel) -> Signs:
    """Returns [J, P]: the signs of pairs of positions, where the response shown earlier is the first of its pair."""
    return pair_signs(np.take_along_axis(panel.ranks_JK, panel.orders_JK.astype(np.int64), axis=1))


def _tally(panel: Panel, group_J: Ints, right_J: Floats, compared_J: Floats) -> Tally:
    """Tallies rows that compare each pair of an answer at most once.

    All questions about one response are one piece of evidence, because their answers depend on each other.
    """
    prompt_J = panel.prompt_T[panel.task_J]
    pairs_J = np.where(panel.responses_J == 1, np.minimum(compared_J, 1.0), compared_J)
    return Tally(group_J, panel.task_J, prompt_J, right_J, compared_J, pairs_J, _as_trials(panel.responses_J))


def _order_of_root(repeat: Task, root: Task) -> list[int]:
    """Returns the index of each of the root's responses in its repeat."""
    if sorted(repeat.responses) != sorted(root.responses):
        raise ValueError(
            f"task {repeat.task_id!r}: repeat_of is {root.task_id!r}, which has other responses; the same were expected"
        )
    return [repeat.responses.index(response) for response in root.responses]


# ---- time, flags, skips and ratings ----


@dataclass(frozen=True)
class Pace:
    """A labeler's time per task. Rates are words of the prompt and all responses per minute of that time.

    `too_fast` is the share of answers above the threshold; its `num_pairs` counts answers.
    """

    milliseconds: float  # median; NaN without answers
    words_per_minute: float  # median; NaN without answers
    too_fast: Share


@dataclass(frozen=True)
class Ratings:
    """A labeler's ratings: how often each was given, and their mean, in points of the scale.

    `mean` counts an answer's mean rating as one number.
    """

    counts: Mapping[float, int]
    mean: Interval


def num_words(task: Task) -> int:
    """Counts the space-separated words of prompt and responses: for scripts without spaces too few, never too many."""
    return len(" ".join((*(message.text for message in task.prompt), *task.responses)).split())


def words_per_minute(panel: Panel) -> Floats:
    """Returns [J]: the words of each answer's task per minute (inf if it took no time)."""
    answered = np.unique(panel.task_J)
    words_T = np.zeros(len(panel.tasks))
    words_T[answered] = [num_words(panel.tasks[task]) for task in answered]
    with np.errstate(divide="ignore", invalid="ignore"):
        rate_J = words_T[panel.task_J] * MILLISECONDS_PER_MINUTE / _milliseconds(panel)
    return np.nan_to_num(rate_J, nan=0.0, posinf=np.inf)


def paces(panel: Panel, rate_J: Floats, *, threshold: float = TOO_FAST_WORDS_PER_MINUTE) -> list[Pace]:
    """Returns every labeler's pace. `rate_J` comes from `words_per_minute`; `threshold` is in words per minute."""
    milliseconds_J, ones_J = _milliseconds(panel), np.ones(len(rate_J))
    pairs_of_two_J = np.full(len(rate_J), 2)  # an answer is one trial, like one pair of responses
    fast_J = (rate_J > threshold).astype(np.float64)
    tally = Tally(panel.labeler_J, panel.task_J, panel.prompt_T[panel.task_J], fast_J, ones_J, ones_J, pairs_of_two_J)
    shares = clustered_shares(tally, len(panel.labelers))
    found = []
    for labeler, share in enumerate(shares):
        rows = panel.labeler_J == labeler
        time, rate = (np.median(of[rows]) if rows.any() else math.nan for of in (milliseconds_J, rate_J))
        found.append(Pace(float(time), float(rate), share))
    return found


def ratings_of(panel: Panel) -> list[Ratings]:
    """Returns every labeler's ratings."""
    rated = np.array([row for row, answer in enumerate(panel.answers) if answer.ratings], dtype=np.int64)
    lengths = np.array([len(panel.answers[row].ratings) for row in rated], dtype=np.int64)
    rating_N = np.fromiter(chain.from_iterable(panel.answers[row].ratings for row in rated), np.float64, lengths.sum())
    answer_N = np.repeat(np.arange(len(rated)), lengths)
    mean_J = np.bincount(answer_N, rating_N, len(rated)) / lengths
    found = []
    for labeler in range(len(panel.labelers)):
        is_theirs = panel.labeler_J[rated] == labeler
        values, nums = np.unique(rating_N[is_theirs[answer_N]], return_counts=True)
        found.append(
            Ratings(
                counts=dict(zip(values.tolist(), nums.tolist(), strict=True)),
                mean=clustered_mean(mean_J[is_theirs], panel.prompt_T[panel.task_J[rated[is_theirs]]]),
            )
        )
    return found


def flag_counts(answers: Sequence[Judgment]) -> dict[str, int]:
    """Returns how many responses got each flag, most common first."""
    by_response = chain.from_iterable(answer.flags for answer in answers)
    return dict(Counter(chain.from_iterable(by_response)).most_common())


def skip_reasons(skips: Sequence[Judgment]) -> dict[str, int]:
    """Returns how often each reason was given, most common first."""
    return dict(Counter(skip.note for skip in skips).most_common())


def _milliseconds(panel: Panel) -> Floats:
    return np.array([answer.milliseconds for answer in panel.answers], dtype=np.float64)


# ---- amount of work ----


@dataclass(frozen=True)
class LabelerCount:
    """What a labeler did. All undos and voids are counted. `last_at` is the time of the last event, epoch seconds."""

    labeler: str
    num_answers: int
    num_skips: int
    num_undone: int
    num_voided: int  # by leads
    num_revised: int  # answers that replaced an earlier answer or skip
    last_at: float


def labeler_counts(judgments: Sequence[Judgment], current: CurrentJudgments) -> tuple[LabelerCount, ...]:
    """Returns what each labeler did, by name. `current` are the current ones among `judgments`."""
    answers = Counter(answer.labeler for answer in current.answers)
    skips = Counter(skip.labeler for skip in current.skips)
    undone, voided = (
        Counter(judgment.labeler for judgment in judgments if judgment.kind == kind) for kind in ("undo", "void")
    )
    done_again = {(old.task_id, old.labeler) for old in current.replaced if old.kind not in ("undo", "void")}
    revised = Counter(answer.labeler for answer in current.answers if (answer.task_id, answer.labeler) in done_again)
    last_at: dict[str, float] = {}
    for judgment in judgments:
        if judgment.kind != "void" and judgment.created_at > last_at.get(judgment.labeler, -math.inf):
            last_at[judgment.labeler] = judgment.created_at
    return tuple(
        LabelerCount(name, answers[name], skips[name], undone[name], voided[name], revised[name], last_at[name])
        for name in sorted(last_at)
    )
