"""The analysis of a usability study, against numbers worked by hand and against plain loops."""

import math
from dataclasses import replace

import numpy as np
import pytest

from preferences.questionnaire import load_score, sus_score
from preferences.records import Judgment, Message, Task
from preferences.statistics.intervals import clustered_mean
from preferences.statistics.usability import (
    MAX_NEEDED,
    active_seconds,
    num_needed,
    order_slope,
    pseudo_values,
    usability_report,
)
from preferences.statistics.usability_tables import conclusions, usability_tables
from preferences.usability import NO_PREFERENCE, NOT_ASKED, Condition, Participant, QuestionnaireAnswer, Study

STUDY = Study("s", (Condition("plain", "b", "v0", {}), Condition("rich", "b", "v1", {})), 3, 1, 0)
TASKS = [
    Task(f"t{n}", (Message("user", f"{n}?"),), ("a", "b"), ("x", "y"), gold_ranks=(1, 2) if n in (1, 4) else ())
    for n in range(6)
]


def test_the_published_scores():
    assert load_score((55, 10, 40, 25, 60, 20)) == 35.0  # (55 + 10 + 40 + 25 + 60 + 20) / 6
    # Brooke's own example (1996): 4 0, 3 1, ... counts 22 points, so 55; here by hand for another row.
    assert sus_score((5, 4, 2, 1, 2, 3, 2, 4, 5, 2)) == 2.5 * (4 + 1 + 1 + 4 + 1 + 2 + 1 + 1 + 4 + 3)
    assert (sus_score((5, 1) * 5), sus_score((1, 5) * 5), sus_score((3,) * 10)) == (100.0, 0.0, 50.0)
    with pytest.raises(ValueError, match="6 numbers from 0 to 100 in steps of 5"):
        load_score((1, 2, 3, 4, 5, 6))
    with pytest.raises(ValueError, match="10 numbers from 1 to 5"):
        sus_score((0,) * 10)


def test_a_break_does_not_count_as_work():
    seconds = active_seconds([10_000, 20_000, 30_000, 0, 3_600_000])
    assert seconds.tolist() == [10.0, 20.0, 30.0, 125.0]  # 5 times the median of 25; 0 = not measured
    assert len(active_seconds([])) == 0


def answer(labeler, task, version, *, right=True, seconds=10.0, at=0.0, **fields):
    ranks = (1, 2) if right else (2, 1)
    judgment = Judgment(task, labeler, 0, "answer", ranks, (), (), "", (0, 1), version, 0, "page", at)
    return replace(judgment, milliseconds=int(seconds * 1_000), **fields)


def said(labeler, condition, load, praise, preferred=NOT_ASKED):
    return QuestionnaireAnswer(labeler, condition, (load,) * 6, (praise, 6 - praise) * 5, preferred)


PEOPLE = (Participant("a", (0, 1)), Participant("b", (1, 0)), Participant("c", (0, 1)), Participant("d", (1, 0)))
FIRST, SECOND = ("t0", "t1", "t2"), ("t3", "t4", "t5")


def whole_study():
    """Four labelers, two forms. Each labeler's first answer with each form is practice, and wrong."""
    events, answers = [], []
    for number, person in enumerate(PEOPLE):
        for place, condition in enumerate(person.conditions):
            for index, task in enumerate((FIRST, SECOND)[place]):
                seconds = 500.0 if index == 0 else (8.0 + 2 * number) * (1 + condition)
                is_right = index > 0 and not (condition == 1 and number == 3)
                at = 100.0 * place + index
                events.append(answer(person.labeler, task, f"v{condition}", right=is_right, seconds=seconds, at=at))
            last = NO_PREFERENCE if number == 0 else 0
            preferred = last if place == 1 else NOT_ASKED
            answers.append(said(person.labeler, condition, 30 + 5 * number + 20 * condition + 5 * place, 4, preferred))
    return events, answers


def report_of(events, answers, people=PEOPLE, tasks=TASKS, **options):
    return usability_report(STUDY, people, answers, {"b": tasks}, {"b": events}, **options)


def test_a_study_worked_by_hand():
    report = report_of(*whole_study())
    found = {one.measure.key: one for one in report.measures}
    # load of "plain": 30 + 5n, and 5 more if it came second, as for b and d
    plain, rich = [30, 40, 40, 50], [55, 55, 65, 65]
    load = found["load"]
    assert [one.interval.mean for one in load.by_condition] == [np.mean(plain), np.mean(rich)]
    expected = clustered_mean(np.array([25.0, 15.0, 25.0, 15.0]), np.arange(4))
    assert load.differences[0].found.interval == expected
    # the orders are balanced, so the difference is free of the 5 points per place
    assert (load.differences[0].first, load.differences[0].second, expected.mean) == ("plain", "rich", 20.0)
    assert load.order.interval.mean == pytest.approx(5.0)
    # every labeler takes twice as long with "rich", without the practice of 500 seconds
    seconds = found["seconds"]
    assert seconds.by_condition[0].interval.mean == pytest.approx(math.prod([8, 10, 12, 14]) ** 0.25)
    assert seconds.differences[0].found.interval.mean == pytest.approx(2.0)
    assert seconds.differences[0].found.reason == "alike for all 4 labelers: no interval"
    assert found["sus"].by_condition[0].interval.mean == 75.0
    # gold tasks t1 and t4, one per labeler and form: only d is wrong, with "rich"
    gold = found["gold"]
    assert [one.interval.mean for one in gold.by_condition] == [1.0, 0.75]
    assert gold.by_condition[1].interval.high == 1.0  # not beyond
    # Neither gold nor practice are t2 and t5. With "rich", b and d disagree about t2, a and c agree about t5. It is 0
    # without a or c, and 1 without b or d; the pseudo-values 2, -1, 2, -1 give an interval beyond both limits.
    agreement = found["agreement"]
    assert [one.interval.mean for one in agreement.by_condition] == [1.0, 0.5]
    assert agreement.by_condition[0].reason == "alike for all 4 labelers: no interval"
    assert (agreement.by_condition[1].interval.low, agreement.by_condition[1].interval.high) == (0.0, 1.0)
    pseudo = clustered_mean(np.array([2.0, -1.0, 2.0, -1.0]) - 1.0, np.arange(4))
    assert agreement.differences[0].found.interval.low == pytest.approx(pseudo.low)
    assert (report.preferred, report.num_without_preference) == ((3, 0), 1)
    assert dict(report.finished) == {("plain", "rich"): 2, ("rich", "plain"): 2}
    assert report.notes == ()
    assert "Load: rich is 20.0 above plain." in conclusions(report)
    tables = {table.title: table for table in usability_tables(report)}
    assert tables["Preferred"].rows == (("plain", "3"), ("rich", "0"), ("no preference", "1"))
    assert tables["By form (95% intervals over labelers)"].rows[0][-1] == "4"


def test_a_study_of_single_responses_compares_ratings():
    """The labelers of `whole_study` rate 7 what they ranked right, and 1 otherwise."""
    events, answers = whole_study()
    rated = [replace(one, ranks=(1,), shown_order=(0,), ratings=(7.0 if one.ranks == (1, 2) else 1.0,))
             for one in events]  # fmt: skip
    tasks = [
        replace(one, responses=("a",), sources=("x",), gold_ranks=(1,), details={"gold": {"rating": 7}})
        if one.gold_ranks else replace(one, responses=("a",), sources=("x",))
        for one in TASKS
    ]  # fmt: skip
    ranked = {one.measure.key: one for one in report_of(events, answers).measures}
    report = report_of(rated, answers, tasks=tasks)
    found = {one.measure.key: one for one in report.measures}
    assert (found["agreement"], found["gold"]) == (ranked["agreement"], ranked["gold"])
    assert [one.num_labelers for one in found["seconds_per_pair"].by_condition] == [0, 0]
    assert any(table.title.startswith("By form") for table in usability_tables(report))


def test_what_is_not_finished_does_not_count():
    events, answers = whole_study()
    report = report_of(events, [one for one in answers if one.labeler != "d" or one.condition != 0])
    load = next(one for one in report.measures if one.measure.key == "load")
    assert [one.num_labelers for one in load.by_condition] == [3, 4]
    assert load.differences[0].found.num_labelers == 3
    assert len(report.notes) == 2
    assert report.notes[0] == "1 of 4 labelers have not finished all forms; the forms that they have finished count."
    assert report.notes[1].startswith("The forms did not come equally often in each place")


def test_too_few_labelers_for_an_interval_is_said():
    events, answers = whole_study()
    report = report_of(events, [one for one in answers if one.labeler in "ab"])
    load = next(one for one in report.measures if one.measure.key == "load")
    assert load.differences[0].found.reason == "2 labelers: an interval needs at least 3"
    assert (load.differences[0].found.interval.mean, load.differences[0].num_needed) == (20.0, 0)
    rows = {row[0]: row for table in usability_tables(report) for row in table.rows}
    assert rows["Load (raw TLX, 0 to 100, lower is better): rich - plain"][1:] == (
        "20.0 (2 labelers: an interval needs at least 3)", "2", "-"
    )  # fmt: skip
    assert conclusions(report) == ["No difference between the forms was found."]
    empty = report_of([], [])
    assert usability_tables(empty) == []


def test_a_revised_answer_counts_once_and_practice_is_what_came_first():
    events, answers = whole_study()
    again = answer("a", "t0", "v0", right=True, seconds=700.0, at=900.0, revision=1)  # practice, revised at the end
    report, before = report_of([*events, again], answers), report_of(events, answers)
    assert report.labelers[0].values["seconds"] == before.labelers[0].values["seconds"]


def test_answers_with_other_forms_and_of_others_are_left_out():
    events, answers = whole_study()
    strange = [answer("a", "t3", "v9", right=False, revision=0), answer("z", "t2", "v0", right=False)]
    events = [one for one in events if (one.labeler, one.task_id) != ("a", "t3")]  # a's practice with "rich"
    report = report_of([*events, *strange], answers)
    agreement = next(one for one in report.measures if one.measure.key == "agreement")
    assert agreement.by_condition[0].interval.mean == 1.0


def test_answers_with_the_same_form_before_or_after_the_study_are_left_out():
    events, answers = whole_study()
    before, after = answer("a", "t6", "v0", at=-1.0, seconds=900), answer("a", "t7", "v1", at=901.0, seconds=900)
    skip = replace(answer("a", "t8", "v0", at=-2.0), kind="skip", ranks=(), note="no")
    study, tasks = (
        replace(STUDY, stopped_at=900.0),
        [*TASKS, *(replace(TASKS[0], task_id=name) for name in ("t6", "t7"))],
    )
    report = usability_report(study, PEOPLE, answers, {"b": tasks}, {"b": [before, skip, *events, after]})
    assert repr(report) == repr(report_of(events, answers))  # NaN differs from itself


def test_skips():
    events, answers = whole_study()
    skip = replace(answer("a", "t9", "v0", at=50.0), kind="skip", ranks=(), note="no")
    report = report_of([*events, skip], answers)
    assert report.labelers[0].values["skips"] == (0.25, 0.0)  # one skip and three answers, practice included


def test_the_slope_is_that_of_least_squares():
    rng = np.random.default_rng(0)
    place = np.array([rng.permutation(3) for _ in range(5)])
    value = rng.normal(size=(5, 3)) + 2 * place
    rows, columns = np.indices((5, 3)).reshape(2, -1)
    design = np.concatenate([np.eye(5)[rows], np.eye(3)[columns], place.reshape(-1, 1)], axis=1)
    expected = np.linalg.lstsq(design, value.ravel(), rcond=None)[0][-1]
    assert order_slope(value, place) == pytest.approx(expected)
    assert math.isnan(order_slope(value, np.tile([0, 1, 2], (5, 1))))


def test_pseudo_values_of_a_mean_are_the_values():
    values = np.array([3.0, 1.0, 4.0, 1.0, 5.0])
    assert pseudo_values(lambda rows: float(values[rows].mean()), 5).tolist() == pytest.approx(values.tolist())


def test_how_many_labelers_are_needed():
    # With s = 1: t(8)/sqrt(9) = 2.306/3 = .769 is too wide, and t(9)/sqrt(10) = 2.262/3.162 = .715 is not
    assert num_needed(1.0, 0.75) == 10
    assert num_needed(1e-3, 1.0) == 3
    assert num_needed(1e9, 1.0) == MAX_NEEDED
    assert num_needed(math.nan, 1.0) == 0
    assert num_needed(0.0, 1.0) == 0


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ({"speed": 1.0}, "half width of 'speed': one of load, sus, seconds"),
        ({"load": 0.0}, "half width of load: 0; a number above 0"),
        ({"seconds": 0.9}, "half width of seconds: 0.9; a factor above 1"),
    ],
)
def test_impossible_half_widths_are_refused(widths, message):
    with pytest.raises(ValueError, match=message):
        report_of(*whole_study(), half_widths=widths)
