"""How labelers work: their time, what they flag, why they skip, and how they rate.

These are numbers to look at, not verdicts: a fast labeler may be good, and a slow one may be at lunch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from preferences.records import Judgment, Task
from preferences.statistics.clustered import Tally, clustered_mean, clustered_shares
from preferences.statistics.estimates import Floats, Interval, Share
from preferences.statistics.independent import difference_of_means, median_interval
from preferences.statistics.panel import Panel

# Adults read English non-fiction silently at 238 words per minute on average, most at 175 to 300 (Brysbaert 2019,
# Journal of Memory and Language 109, 104047), and understand less above about 400 (Rayner et al. 2016, Psychological
# Science in the Public Interest 17(1)). Three times the average is skimming at best, and the measured time includes
# deciding and clicking too.
TOO_FAST_WORDS_PER_MINUTE = 700.0

MILLISECONDS_PER_MINUTE = 60_000


@dataclass(frozen=True)
class Pace:
    """A labeler's time per task. Rates are words of the prompt and all responses per minute of that time.

    `too_fast` is the share of answers above the threshold; its `num_pairs` counts answers.
    """

    milliseconds: Interval  # median, with its interval
    words_per_minute: float  # median; NaN without answers
    too_fast: Share


@dataclass(frozen=True)
class FastAnswer:
    """An answer given faster than its task can be read."""

    task_id: str
    labeler: str
    num_words: int
    milliseconds: int
    words_per_minute: float


@dataclass(frozen=True)
class Ratings:
    """A labeler's ratings: how often each was given, their mean, and how the mean moved.

    `drift` is the mean of the later half of the rated answers minus that of the earlier half, by time. `mean` and
    `drift` count an answer's mean rating as one number and are in points of the scale.
    """

    counts: Mapping[float, int]
    mean: Interval
    drift: Interval


def num_words(task: Task) -> int:
    """Counts words of prompt and responses, separated by spaces. Scripts without spaces get too few, never too many."""
    return len(" ".join((*(message.content for message in task.prompt), *task.responses)).split())


def words_per_minute(panel: Panel) -> tuple[Floats, Floats]:
    """Returns [J] each: the words of an answer's task, and words per minute of its time (inf if it took no time)."""
    answered = np.unique(panel.task_J)
    words_T = np.zeros(len(panel.tasks))
    words_T[answered] = [num_words(panel.tasks[task]) for task in answered]
    words_J = words_T[panel.task_J]
    with np.errstate(divide="ignore", invalid="ignore"):
        rate_J = words_J * MILLISECONDS_PER_MINUTE / _milliseconds(panel)
    return words_J, np.nan_to_num(rate_J, nan=0.0, posinf=np.inf)


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
        rate = float(np.median(rate_J[rows])) if rows.any() else float("nan")
        found.append(Pace(median_interval(milliseconds_J[rows]), rate, share))
    return found


def fast_answers(
    panel: Panel, words_J: Floats, rate_J: Floats, *, limit: int, threshold: float = TOO_FAST_WORDS_PER_MINUTE
) -> tuple[FastAnswer, ...]:
    """Returns the `limit` fastest answers above the threshold, fastest first."""
    fast = np.flatnonzero(rate_J > threshold)
    chosen = fast[np.argsort(-rate_J[fast], kind="stable")][:limit]
    return tuple(
        FastAnswer(answer.task_id, answer.labeler, int(words_J[row]), answer.milliseconds, float(rate_J[row]))
        for row, answer in ((row, panel.answers[row]) for row in chosen)
    )


def ratings_of(panel: Panel) -> list[Ratings]:
    """Returns every labeler's ratings."""
    created_J = np.array([answer.created_at for answer in panel.answers])
    rated = np.array([row for row, answer in enumerate(panel.answers) if answer.ratings], dtype=np.int64)
    rated = rated[np.argsort(created_J[rated], kind="stable")]
    lengths = np.array([len(panel.answers[row].ratings) for row in rated], dtype=np.int64)
    rating_N = np.fromiter(chain.from_iterable(panel.answers[row].ratings for row in rated), np.float64, lengths.sum())
    answer_N = np.repeat(np.arange(len(rated)), lengths)
    mean_J = np.bincount(answer_N, rating_N, len(rated)) / lengths
    found = []
    for labeler in range(len(panel.labelers)):
        is_theirs = panel.labeler_J[rated] == labeler
        values, nums = np.unique(rating_N[is_theirs[answer_N]], return_counts=True)
        means, half = mean_J[is_theirs], int(is_theirs.sum()) // 2
        found.append(
            Ratings(
                counts=dict(zip(values.tolist(), nums.tolist(), strict=True)),
                mean=clustered_mean(means, panel.prompt_T[panel.task_J[rated[is_theirs]]]),
                drift=difference_of_means(means[:half], means[half:]),
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
