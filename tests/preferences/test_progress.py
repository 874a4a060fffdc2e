"""Pace: active hours by hand, counts by day, and ranges that hold what happens."""

import numpy as np
import pytest

from preferences import recording
from preferences.progress import DAY_SECONDS, MIN_ANSWERS, PaceLog, _Work
from preferences.records import Judgment, Message, Task
from preferences.store import LabelStore

DAY = 20_000
NOW = (DAY + 0.5) * DAY_SECONDS


@pytest.fixture
def store(new_database):
    with LabelStore(new_database()) as opened:
        yield opened


def make_task(name):
    return Task(name, (Message("user", "?"),), ("a", "b"), ("x", "y"))


def said(name, labeler, day, seconds, kind="answer", revision=0):
    ranks, order = ((1, 2), (0, 1)) if kind == "answer" else ((), (0, 1))
    at = day * DAY_SECONDS + 60.0
    return Judgment(name, labeler, revision, kind, ranks, (), (), "", order, "1", int(seconds * 1000), "t", at)


def fill(store, events, batch="b"):
    names = sorted({event.task_id for event in events})
    store.add_tasks([make_task(name) for name in names], batch=batch, num_labelers=9)
    store.import_judgments(batch, events)


def read(store, log=None):
    log = log or PaceLog()
    with store.reading() as connection:
        log.read(connection)
        return log, log.report(connection, NOW)


def test_hours_and_answers_by_hand(store):
    events = [
        said("t1", "unknown 1", DAY - 1, 100),
        said("t2", "unknown 1", DAY - 1, 100),
        said("t3", "unknown 1", DAY, 100),
        said("t4", "unknown 1", DAY, 9_000),  # over lunch: 5 times the median of 100 counts
        said("t5", "unknown 1", DAY, 50, "skip"),
        said("t1", "unknown 2", DAY - 20, 36),  # before the days that are shown
        said("t2", "unknown 2", DAY, 36),
        said("t2", "unknown 2", DAY, 0, "undo", revision=1),
    ]
    fill(store, events)
    log, report = read(store)
    first, second = report.people
    assert (first.name, first.total_answers, first.answers[-2:]) == ("unknown 1", 4, (2, 2))
    assert first.hours[-2:] == pytest.approx((200 / 3_600, (100 + 500 + 50) / 3_600))
    assert first.total_hours == pytest.approx(850 / 3_600)
    assert (second.total_answers, sum(second.answers)) == (1, 0)
    assert second.total_hours == pytest.approx(72 / 3_600)
    assert report.days[-1] == DAY * DAY_SECONDS
    fill(store, [said("t6", "unknown 1", DAY, 100)])
    assert read(store, log)[1].people[0].total_answers == 5  # only what is new is read


def test_a_taken_back_skip_is_no_answer_taken_back(store):
    fill(store, [said("t1", "unknown 1", DAY, 5, "skip"), said("t1", "unknown 1", DAY, 0, "undo", revision=1)])
    assert read(store)[1].people[0].total_answers == 0


def test_a_changed_answer_counts_once_and_as_time_only_what_it_adds(store):
    fill(
        store,
        [
            said("t1", "unknown 1", DAY, 100),
            said("t1", "unknown 1", DAY, 130, revision=1),  # a change in place: 30 more seconds
            said("t1", "unknown 1", DAY, 0, "undo", revision=2),
            said("t1", "unknown 1", DAY, 150, revision=3),  # given again: 20 more
            said("t2", "unknown 1", DAY, 60),
            said("t2", "unknown 1", DAY, 0, "void", revision=1),
            said("t2", "unknown 1", DAY, 70, revision=2),  # after a void, the time begins again
        ],
    )
    (person,) = read(store)[1].people
    assert (person.total_answers, person.answers[-1]) == (2, 2)
    assert person.total_hours == pytest.approx((100 + 30 + 20 + 60 + 70) / 3_600)


def test_too_little_gives_a_reason_instead_of_an_estimate(store):
    log, _ = read(store)
    assert log.estimate("b", 0, NOW).reason == "nothing is left"
    estimate = log.estimate("b", 9, NOW)
    assert (estimate.hours, estimate.finished_at) == (None, None)
    assert estimate.reason.startswith(f"no estimate yet: 0 answers in the last 14 days, {MIN_ANSWERS}")
    fill(store, [said(f"t{number}", f"unknown {number % 4}", DAY, 60) for number in range(24)])
    log, _ = read(store)
    estimate = log.estimate("b", 60, NOW)
    assert estimate.hours == pytest.approx((1.0, 1.0))  # 60 answers of a minute
    assert estimate.finished_at is None
    assert estimate.reason == "no day yet: 1 of 3 days of labeling so far"
    assert log.estimate("other", 60, NOW).reason.startswith("no estimate yet")


def test_a_steady_pace_is_extrapolated_exactly(store):
    events = [
        said(f"t{day}-{number}", f"unknown {number % 3}", DAY - day, 120) for day in range(5) for number in range(12)
    ]
    fill(store, events)
    log, _ = read(store)
    estimate = log.estimate("b", 30, NOW)
    assert estimate.hours == pytest.approx((1.0, 1.0))
    assert estimate.finished_at == ((DAY + 3) * DAY_SECONDS, (DAY + 3) * DAY_SECONDS)  # 12 per day: 30 in three days
    assert (estimate.num_days, estimate.reason) == (5, "")


def add_uncommitted(connection, event):
    """Stores an event in the transaction of this connection, which the test ends."""
    rows = recording.judgment_rows("b", [event], {event.task_id: {"prompt": [], "responses": ["a", "b"]}})
    recording.record_external(connection, rows, NOW)


@pytest.fixture
def on_postgres(postgres, postgres_tables):
    with LabelStore(postgres.new_database(postgres_tables)) as opened:
        opened.add_tasks([make_task(f"t{number}") for number in range(4)], batch="b", num_labelers=9)
        yield opened


def test_an_answer_that_commits_after_a_later_one_is_read_once(on_postgres):
    """Two connections to PostgreSQL: numbers are taken in one order, and become visible in the other."""
    log = PaceLog()
    with on_postgres.writing() as slow:
        add_uncommitted(slow, said("t0", "unknown 1", DAY, 60))
        on_postgres.import_judgments("b", [said("t1", "unknown 2", DAY, 60)])
        assert [person.name for person in read(on_postgres, log)[1].people] == ["unknown 2"]
    for _ in range(2):
        report = read(on_postgres, log)[1]
        assert {one.name: one.total_answers for one in report.people} == {"unknown 1": 1, "unknown 2": 1}
    on_postgres.import_judgments("b", [said("t2", "unknown 1", DAY, 60)])
    assert read(on_postgres, log)[0].num_events("b") == 3


@pytest.mark.parametrize("num_days", [14, 5])
def test_ranges_hold_about_as_often_as_they_say(num_days):
    """80% ranges of the last day, over 200 teams whose days vary a lot: 154 hold after 14 days, 161 after 5."""
    rng, held = np.random.default_rng(num_days), 0
    for _ in range(200):
        per_day = rng.poisson(rng.gamma(2.0, 5.0, size=60)) * (rng.random(60) > 2 / 7)
        per_day[0] = max(per_day[0], MIN_ANSWERS)
        days = np.repeat(np.arange(DAY - num_days + 1, DAY + 1), per_day[:num_days])
        log, work = PaceLog(), _Work()
        for day in map(int, days):
            work.add(day, 1_000, 1)
        log._work = {("unknown", "b"): work}
        estimate = log.estimate("b", 60, NOW)
        assert estimate.finished_at is not None
        low, high = (at / DAY_SECONDS - DAY for at in estimate.finished_at)
        held += low <= np.argmax(np.cumsum(per_day[num_days:]) >= 60) + 1 <= high
    assert 145 <= held <= 175
