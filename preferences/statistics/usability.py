"""The results of a usability study: load, usability, seconds per task, accuracy and agreement of each form.

Labelers are the sample, and the tasks are fixed: intervals describe other labelers on these tasks. Each labeler has one
value per form and measure. A form's estimate is the mean of these values, with Student's interval over labelers
(`clustered_mean`). The difference of two forms is the mean of the differences within labelers who finished both, so
differences between labelers cancel. Times are analysed as logarithms, since a few slow labelers would dominate a mean:
a form's time is the geometric mean over labelers, and two forms differ by a factor (Sauro & Lewis 2010, "Average task
times in usability tests: what to report?", CHI).

Agreement between labelers is not a mean over labelers, because each comparison belongs to two of them. Its interval
comes from the jackknife over labelers: with θ the agreement of all n labelers and θ_l that without labeler l, the
pseudo-values n·θ - (n - 1)·θ_l take the place of the labelers' values (Efron & Tibshirani 1993, ch. 11). The effect of
order, which is the slope of a measure on the place (1st, 2nd, ...) given labeler and form, has the same interval.

Each labeler's first `practice_tasks` answers with a form are left out (but not for skips), and so are forms whose
questionnaire is missing.

Shape letters: L labelers, C conditions, J answers.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import scipy
from sqlalchemy import Connection

from preferences import results, usability
from preferences.progress import MAX_TIMES_MEDIAN
from preferences.questionnaire import LOAD, load_score, sus_score
from preferences.rankings import current_judgments
from preferences.records import Judgment, Task
from preferences.statistics.estimates import LEVEL, Floats, Interval, Ints
from preferences.statistics.intervals import clustered_mean
from preferences.statistics.panel import Panel, pair_signs
from preferences.statistics.quality import compared_alone, gold_accuracy
from preferences.usability import NO_PREFERENCE, Participant, QuestionnaireAnswer, Study

MIN_LABELERS = 3  # with fewer, Student's interval is too wide to be of use
MAX_NEEDED = 10_000


@dataclass(frozen=True)
class Measure:
    """What is measured. With `is_ratio`, values are logarithms, and two forms differ by a factor.

    `half_width` is the half width of a sufficiently narrow interval, in the measure's unit or as a factor. All values
    are within `limits`.
    """

    key: str
    title: str
    half_width: float
    digits: int = 1
    is_ratio: bool = False
    limits: tuple[float, float] = (-math.inf, math.inf)


LOAD_MEASURE = Measure("load", "Load (raw TLX, 0 to 100, lower is better)", 5.0, limits=(0, 100))
MEASURES = (
    LOAD_MEASURE,
    Measure("sus", "Usability (SUS, 0 to 100, higher is better)", 5.0, limits=(0, 100)),
    Measure("seconds", "Active seconds per task", 1.1, is_ratio=True),
    Measure("seconds_per_pair", "Active seconds per pair of responses", 1.1, is_ratio=True),
    Measure("skips", "Skips per task", 0.05, 2, limits=(0, 1)),
    Measure("gold", "Agreement with gold tasks", 0.05, 2, limits=(0, 1)),
    Measure("agreement", "Agreement between labelers", 0.05, 2, limits=(0, 1)),
)
SCALES = tuple(
    replace(LOAD_MEASURE, key=f"load_{index}", title=f"{scale.name} (0 {scale.low}, 100 {scale.high})")
    for index, scale in enumerate(LOAD)
)
HALF_WIDTHS = {measure.key: measure.half_width for measure in MEASURES}


@dataclass(frozen=True)
class Session:
    """What a labeler did with one form. `place` is 0 for their first form. `answers` exclude practice."""

    labeler: str
    condition: int
    place: int
    questionnaire: QuestionnaireAnswer | None
    answers: tuple[Judgment, ...]
    num_practice: int
    num_skips: int


@dataclass(frozen=True)
class Estimate:
    """A number with its 95% interval over labelers. `reason` says why there is none, "" if there is one."""

    interval: Interval
    num_labelers: int
    reason: str = ""


@dataclass(frozen=True)
class Difference:
    """How the second form differs from the first: `found` is second - first, or second / first for times.

    `num_needed` labelers give an interval of `half_width` if they vary as much as these do; 0 = unknown.
    """

    first: str
    second: str
    found: Estimate
    half_width: float
    num_needed: int


@dataclass(frozen=True)
class MeasureReport:
    """One measure of all forms. `order` is what each later place adds (a factor for times), whichever form is there."""

    measure: Measure
    by_condition: tuple[Estimate, ...]
    differences: tuple[Difference, ...]
    order: Estimate


@dataclass(frozen=True)
class LabelerValues:
    """One labeler's order of the forms, and their values by measure and condition; NaN = unknown."""

    labeler: str
    conditions: tuple[str, ...]
    values: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class UsabilityReport:
    """A study's results. `finished` counts the labelers who finished each order of the forms."""

    study: str
    conditions: tuple[str, ...]
    num_labelers: int
    finished: tuple[tuple[tuple[str, ...], int], ...]
    measures: tuple[MeasureReport, ...]
    scales: tuple[MeasureReport, ...]
    preferred: tuple[int, ...]  # labelers who prefer each form
    num_without_preference: int
    labelers: tuple[LabelerValues, ...]
    notes: tuple[str, ...]


# ---- from the store to the report ----


def read_report(
    connection: Connection, name: str, *, with_names: bool = False, half_widths: Mapping[str, float] = HALF_WIDTHS
) -> UsabilityReport:
    """Returns the results of a stored study, with the labelers' pseudonyms or names.

    Raises: ValueError for an unknown study.
    """
    study = usability.require(connection, name)
    batches = dict.fromkeys(one.batch for one in study.conditions)
    return usability_report(
        study,
        usability.participants(connection, name, with_names=with_names),
        usability.answers(connection, name, with_names=with_names),
        {batch: [one.task for one in results.stored_tasks(connection, batch)] for batch in batches},
        {batch: results.judgments_of(connection, batch, with_names=with_names) for batch in batches},
        half_widths=half_widths,
    )


# ---- one value per labeler and form ----


def sessions_of(
    study: Study,
    people: Sequence[Participant],
    said: Sequence[QuestionnaireAnswer],
    judgments: Mapping[str, Sequence[Judgment]],
) -> list[Session]:
    """Returns a session for each labeler and form. `judgments` are all events of each batch; names as in `people`."""
    by_labeler = {(one.labeler, one.condition): one for one in said}
    found: dict[tuple[str, str, str], list[Judgment]] = {}
    skips: Counter[tuple[str, str, str]] = Counter()
    first_at: dict[tuple[str, str], float] = {}
    for batch, events in judgments.items():
        current = current_judgments(events)
        for event in events:
            key = (event.task_id, event.labeler)
            first_at[key] = min(event.created_at, first_at.get(key, math.inf))
        for answer in current.answers:
            if study.is_part(first_at[answer.task_id, answer.labeler]):
                found.setdefault((answer.labeler, batch, answer.instructions_version), []).append(answer)
        own_skips = [skip for skip in current.skips if study.is_part(first_at[skip.task_id, skip.labeler])]
        skips.update((skip.labeler, batch, skip.instructions_version) for skip in own_skips)
    sessions = []
    for person in people:
        for place, index in enumerate(person.conditions):
            condition = study.conditions[index]
            key3 = (person.labeler, condition.batch, condition.version)
            answers = sorted(found.get(key3, []), key=lambda one: first_at[one.task_id, one.labeler])
            counted = tuple(answers[study.practice_tasks :])
            questionnaire = by_labeler.get((person.labeler, index))
            num_practice = len(answers) - len(counted)
            sessions.append(Session(person.labeler, index, place, questionnaire, counted, num_practice, skips[key3]))
    return sessions


def active_seconds(milliseconds: Sequence[int]) -> Floats:
    """Returns the seconds of each answer with a measured time, for one labeler and form.

    The time runs from when the task was first shown until the answer, so it would include a break. Each task therefore
    counts for at most MAX_TIMES_MEDIAN times the median of these times, as on the leads' pages.
    """
    seconds_J = np.array([one for one in milliseconds if one > 0], dtype=np.float64) / 1_000
    return np.minimum(seconds_J, MAX_TIMES_MEDIAN * np.median(seconds_J)) if len(seconds_J) else seconds_J


def _values_of(session: Session) -> dict[str, float]:
    """Returns the values that need this session only."""
    said, values = session.questionnaire, dict[str, float]()
    if said is None:
        return values
    values |= {"load": load_score(said.load), "sus": sus_score(said.sus)}
    values |= {f"load_{index}": float(rating) for index, rating in enumerate(said.load)}
    seconds_J = active_seconds([one.milliseconds for one in session.answers])
    timed = [one for one in session.answers if one.milliseconds > 0]
    if timed:
        num_pairs = sum(len(one.ranks) * (len(one.ranks) - 1) // 2 for one in timed)
        values["seconds"] = math.log(float(seconds_J.mean()))
        values["seconds_per_pair"] = math.log(float(seconds_J.sum()) / num_pairs) if num_pairs else math.nan
    num_tasks = session.num_skips + session.num_practice + len(session.answers)
    values["skips"] = session.num_skips / num_tasks if num_tasks else math.nan
    return values


@dataclass(frozen=True)
class _Table:
    """Values by measure, [L, C]; each labeler's place of each form, [L, C]; and agreement's counts, [C, L, L]."""

    labelers: tuple[str, ...]
    value_LC: Mapping[str, Floats]
    place_LC: Ints
    same_CLL: Floats
    compared_CLL: Floats


def _table(
    study: Study, people: Sequence[Participant], sessions: Sequence[Session], tasks: Mapping[str, Sequence[Task]]
) -> _Table:
    labelers = tuple(person.labeler for person in people)
    row = {name: index for index, name in enumerate(labelers)}
    num, num_conditions = len(labelers), len(study.conditions)
    keys = [measure.key for measure in (*MEASURES, *SCALES)]
    value_LC = {key: np.full((num, num_conditions), math.nan) for key in keys}
    place_LC = np.zeros((num, num_conditions), dtype=np.int64)
    same_CLL, compared_CLL = np.zeros((2, num_conditions, num, num))
    for session in sessions:
        place_LC[row[session.labeler], session.condition] = session.place
        for key, value in _values_of(session).items():
            value_LC[key][row[session.labeler], session.condition] = value
    for index, condition in enumerate(study.conditions):
        finished = [one for one in sessions if one.condition == index and one.questionnaire is not None]
        answers = [answer for one in finished for answer in one.answers]
        panel = Panel.of(tasks[condition.batch], answers, labelers)
        value_LC["gold"][:, index] = [share.mean for share in gold_accuracy(panel)]
        same_CLL[index], compared_CLL[index] = _agreement_counts(panel)
        with np.errstate(invalid="ignore"):
            value_LC["agreement"][:, index] = same_CLL[index].sum(axis=1) / compared_CLL[index].sum(axis=1)
    return _Table(labelers, value_LC, place_LC, same_CLL, compared_CLL)


def _agreement_counts(panel: Panel) -> tuple[Floats, Floats]:
    """Returns two [L, L]: how many pairs of responses two labelers order alike, and how many both order; no ties.

    Of a single response, what they say alike, and what both say (`preferences.disagreement.compare_alone`).
    """
    is_ordinary = np.array([not task.gold_ranks and not task.repeat_of for task in panel.tasks], dtype=bool)
    ordinary, num = panel.of_tasks(is_ordinary), len(panel.labelers)
    signs_JP = pair_signs(ordinary.ranks_JK).astype(np.float64)
    signs_JP[np.abs(signs_JP) != 1] = 0
    same_LL, compared_LL = np.zeros((2, num, num))
    order = np.argsort(ordinary.task_J, kind="stable")
    starts = np.flatnonzero(np.diff(ordinary.task_J[order], prepend=-1))[1:]
    for rows in np.split(order, starts) if len(order) else ():
        signs, who = signs_JP[rows], ordinary.labeler_J[rows]
        both = np.abs(signs) @ np.abs(signs).T
        compared_LL[np.ix_(who, who)] += both
        same_LL[np.ix_(who, who)] += (both + signs @ signs.T) / 2
    for one, other, same, compared in compared_alone(ordinary):
        who = ordinary.labeler_J[[one, other]]
        same_LL[who, who[::-1]] += same
        compared_LL[who, who[::-1]] += compared
    for counts_LL in (same_LL, compared_LL):
        np.fill_diagonal(counts_LL, 0)
    return same_LL, compared_LL


# ---- estimates over labelers ----


def _over_labelers(value_L: Floats) -> Estimate:
    """Returns the mean of the labelers' known values, with Student's interval."""
    known_L = value_L[np.isfinite(value_L)]
    interval = clustered_mean(known_L, np.arange(len(known_L)))
    return _checked(interval, len(known_L))


def _checked(interval: Interval, num: int) -> Estimate:
    """Replaces the interval by a reason if there are too few labelers for one, or all have the same value."""
    people = "1 labeler" if num == 1 else f"{num} labelers"
    if num < MIN_LABELERS:
        reason = f"{people}: an interval needs at least {MIN_LABELERS}" if num else "nothing measured"
    elif not math.isfinite(interval.low):
        reason = "unknown without one of the labelers"
    elif interval.high - interval.low <= 1e-9:
        reason = f"alike for all {people}: no interval"
    else:
        return Estimate(interval, num)
    return Estimate(Interval(interval.mean, math.nan, math.nan), num, reason)


def pseudo_values(statistic: Callable[[Ints], float], num: int) -> Floats:
    """Returns [L]: n·θ - (n - 1)·θ_l of a statistic of labelers' indices; NaN where θ_l is unknown."""
    everybody_L = np.arange(num)
    whole = statistic(everybody_L)
    without_L = np.array([statistic(np.delete(everybody_L, one)) for one in range(num)])
    return num * whole - (num - 1) * without_L


def _jackknifed(statistic: Callable[[Ints], float], num: int) -> tuple[Estimate, float]:
    """Returns a statistic with its interval, and the standard deviation of its pseudo-values."""
    value = statistic(np.arange(num)) if num else math.nan
    pseudo_L = pseudo_values(statistic, num) if num >= MIN_LABELERS else np.full(num, math.nan)
    half = math.nan
    if num >= MIN_LABELERS and np.isfinite(pseudo_L).all():
        spread = clustered_mean(pseudo_L, np.arange(num))
        half = spread.high - spread.mean
    deviation = float(pseudo_L.std(ddof=1)) if num >= MIN_LABELERS else math.nan
    return _checked(Interval(value, value - half, value + half), num if math.isfinite(value) else 0), deviation


def num_needed(deviation: float, half_width: float) -> int:
    """Returns the fewest labelers n with t(n - 1)·s/√n <= half_width for the standard deviation s.

    Returns 0, for unknown, if the deviation is 0 or not known.
    """
    if not math.isfinite(deviation) or deviation <= 1e-9:
        return 0
    low, high = MIN_LABELERS, MAX_NEEDED

    def is_enough(num: int) -> bool:
        return float(scipy.special.stdtrit(num - 1, (1 + LEVEL) / 2)) * deviation / math.sqrt(num) <= half_width

    if not is_enough(high):
        return MAX_NEEDED
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
    return low


def order_slope(value_LC: Floats, place_LC: Ints) -> float:
    """Returns the least-squares slope of the values on the place, with an effect per labeler and per form.

    NaN if all had the same order, because place and form then cannot be told apart.
    """
    value, place = _centred(value_LC), _centred(place_LC.astype(np.float64))
    squares = float((place**2).sum())
    return float((value * place).sum()) / squares if squares > 1e-9 else math.nan


def _centred(value_LC: Floats) -> Floats:
    """Subtracts the effects of labeler and form."""
    return value_LC - value_LC.mean(axis=1, keepdims=True) - value_LC.mean(axis=0, keepdims=True) + value_LC.mean()


# ---- the report ----


def usability_report(
    study: Study,
    people: Sequence[Participant],
    said: Sequence[QuestionnaireAnswer],
    tasks: Mapping[str, Sequence[Task]],
    judgments: Mapping[str, Sequence[Judgment]],
    *,
    half_widths: Mapping[str, float] = HALF_WIDTHS,
) -> UsabilityReport:
    """Returns a study's results. `tasks` and `judgments` are those of each batch, with all events.

    `half_widths` overrides some measures' half widths, for `Difference.num_needed`.

    Raises: ValueError for a half width of an unknown measure, or one that is not positive (not above 1 for a factor).
    """
    _require_half_widths(half_widths)
    sessions = sessions_of(study, people, said, judgments)
    table = _table(study, people, sessions, tasks)
    names = tuple(one.name for one in study.conditions)
    widths = HALF_WIDTHS | {scale.key: scale.half_width for scale in SCALES} | dict(half_widths)
    reports = {
        measure.key: _report_of(replace(measure, half_width=widths[measure.key]), table, names)
        for measure in (*MEASURES, *SCALES)
    }
    done = Counter(one.labeler for one in sessions if one.questionnaire is not None)
    orders = Counter(
        tuple(names[index] for index in one.conditions) for one in people if done[one.labeler] == len(names)
    )
    preferred = Counter(one.preferred for one in said)
    return UsabilityReport(
        study=study.name,
        conditions=names,
        num_labelers=len(people),
        finished=tuple(sorted(orders.items())),
        measures=tuple(reports[measure.key] for measure in MEASURES),
        scales=tuple(reports[measure.key] for measure in SCALES),
        preferred=tuple(preferred[index] for index in range(len(names))),
        num_without_preference=preferred[NO_PREFERENCE],
        labelers=tuple(
            LabelerValues(
                person.labeler,
                tuple(names[index] for index in person.conditions),
                {m.key: tuple(_shown(m, table.value_LC[m.key][row])) for m in (*MEASURES, *SCALES)},
            )
            for row, person in enumerate(people)
        ),
        notes=_notes(study, people, orders),
    )


def _require_half_widths(half_widths: Mapping[str, float]) -> None:
    by_key = {measure.key: measure for measure in MEASURES}
    for key, width in half_widths.items():
        if key not in by_key:
            raise ValueError(f"half width of {key!r}: one of {', '.join(by_key)} was expected")
        least, what = (1.0, "a factor above 1") if by_key[key].is_ratio else (0.0, "a number above 0")
        if not width > least or not math.isfinite(width):
            raise ValueError(f"half width of {key}: {width:g}; {what} was expected")


def _report_of(measure: Measure, table: _Table, names: Sequence[str]) -> MeasureReport:
    if measure.key == "agreement":
        return _agreement_report(measure, table, names)
    value_LC = table.value_LC[measure.key]
    differences = []
    for first, second in combinations(range(len(names)), 2):
        change_L = value_LC[:, second] - value_LC[:, first]
        known_L = change_L[np.isfinite(change_L)]
        deviation = float(known_L.std(ddof=1)) if len(known_L) >= MIN_LABELERS else math.nan
        found = _over_labelers(change_L)
        differences.append(_difference(measure, names[first], names[second], found, deviation))
    whole_L = np.isfinite(value_LC).all(axis=1)
    value, place = value_LC[whole_L], table.place_LC[whole_L]
    order, _ = _jackknifed(lambda rows: order_slope(value[rows], place[rows]) if len(rows) else math.nan, len(value))
    by_condition = tuple(_within(measure, _over_labelers(value_LC[:, index])) for index in range(len(names)))
    return MeasureReport(measure, by_condition, tuple(differences), _in_unit(measure, order))


def _agreement_report(measure: Measure, table: _Table, names: Sequence[str]) -> MeasureReport:
    is_known_LC = np.isfinite(table.value_LC["agreement"])

    def agreement(index: int, rows: Ints) -> float:
        square = np.ix_(rows, rows)
        compared = float(table.compared_CLL[index][square].sum())
        return float(table.same_CLL[index][square].sum()) / compared if compared else math.nan

    by_condition, differences = [], []
    for index in range(len(names)):
        own = np.flatnonzero(is_known_LC[:, index])

        def share(rows: Ints, index: int = index, own: Ints = own) -> float:
            return agreement(index, own[rows])

        found, _ = _jackknifed(share, len(own))
        by_condition.append(_within(measure, found))
    for first, second in combinations(range(len(names)), 2):
        both = np.flatnonzero(is_known_LC[:, first] & is_known_LC[:, second])

        def change(rows: Ints, a: int = first, b: int = second, both: Ints = both) -> float:
            return agreement(b, both[rows]) - agreement(a, both[rows])

        found, deviation = _jackknifed(change, len(both))
        differences.append(_difference(measure, names[first], names[second], found, deviation))
    unknown = Estimate(Interval(math.nan, math.nan, math.nan), 0, "not estimated: comparisons belong to two labelers")
    return MeasureReport(measure, tuple(by_condition), tuple(differences), unknown)


def _difference(measure: Measure, first: str, second: str, found: Estimate, deviation: float) -> Difference:
    half = math.log(measure.half_width) if measure.is_ratio else measure.half_width
    needed = num_needed(deviation, half)
    return Difference(first, second, _in_unit(measure, found), measure.half_width, needed)


def _within(measure: Measure, estimate: Estimate) -> Estimate:
    """Returns a form's estimate in the measure's unit; its interval ends at the measure's limits."""
    found = _in_unit(measure, estimate)
    own, (lowest, highest) = found.interval, measure.limits
    return replace(found, interval=Interval(own.mean, max(own.low, lowest), min(own.high, highest)))


def _in_unit(measure: Measure, estimate: Estimate) -> Estimate:
    own = estimate.interval
    if not measure.is_ratio:
        return estimate
    return replace(estimate, interval=Interval(math.exp(own.mean), math.exp(own.low), math.exp(own.high)))


def _shown(measure: Measure, value_C: Floats) -> list[float]:
    return [float(value) for value in (np.exp(value_C) if measure.is_ratio else value_C)]


def _notes(study: Study, people: Sequence[Participant], orders: Counter[tuple[str, ...]]) -> tuple[str, ...]:
    """Returns what a reader of the numbers has to know about this study."""
    notes = []
    num_finished = sum(orders.values())
    if num_finished < len(people):
        left = len(people) - num_finished
        notes.append(
            f"{left} of {len(people)} labelers have not finished all forms; the forms that they have finished count."
        )
    places = [
        sum(num for order, num in orders.items() if order[place] == one.name)
        for one in study.conditions
        for place in range(len(study.conditions))
    ]
    if len(set(places)) > 1:
        notes.append(
            "The forms did not come equally often in each place, so differences include a part of the effect of order."
        )
    batches = {one.batch for one in study.conditions}
    if len(batches) > 1:
        notes.append(
            "The forms were tried on different batches, so differences of accuracy, agreement and time include how the"
            " batches differ; no interval covers that."
        )
    return tuple(notes)
