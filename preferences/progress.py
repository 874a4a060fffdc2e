"""Pace of labeling: active hours and answers per person and day, and when a batch may be finished.

Active time is the stored time from when a labeler got a task until they answered or skipped it. A task that was left
open over a break would count the break too, so each counts for at most MAX_TIMES_MEDIAN times the person's median time
in that batch. An answer that was taken back or voided counts as time, but not as an answer. An answer that replaces an
earlier one counts no further answer, and as time only what it adds: its stored time includes the earlier one's.

The estimate has two parts. The work left, in labeler-hours, is the number of judgments left times the active time per
judgment so far; its range is the central 80% of a bootstrap over (person, day) cells, which vary more than single
answers do. The day of the end comes from the judgments per calendar day, days off included, in the last DAYS days: from
them histories as long as the one seen are drawn with replacement, and from each history days until they add up to what
is left; the range is the central 80% of these draws. Both assume that the next days are like the last ones. With too
little to go by there is no estimate, but a reason.
"""

import math
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Connection, Select, and_, case, func, select

from preferences.schema import judgments, labelers, tasks

DAY_SECONDS = 86_400
DAYS = 14  # calendar days that the pace is taken from
MIN_ANSWERS, MIN_CELLS, MIN_DAYS = 20, 3, 3  # below these there is no estimate
MAX_TIMES_MEDIAN = 5
NUM_DRAWS = 400
RANGE = (10, 90)  # percentiles
MAX_DAYS_AHEAD = 3_650
FAR_DAYS = 10**9  # from 1970; an impossible time of an old store counts as so far off, because arrays hold 64 bits

Numbers = NDArray[Any]


@dataclass(frozen=True)
class Estimate:
    """What is left of a batch. Ranges are (low, high); `reason` says why there is none, "" if there is one.

    `hours` is in labeler-hours of active work, `finished_at` in seconds since the epoch, on whole days (UTC).
    `num_days` is the number of calendar days that the pace comes from.
    """

    num_left: int
    hours: tuple[float, float] | None = None
    finished_at: tuple[float, float] | None = None
    num_days: int = 0
    reason: str = ""


@dataclass(frozen=True)
class PersonDays:
    """One person's answers and active hours on each of the report's days, and in all."""

    name: str
    answers: tuple[int, ...]
    hours: tuple[float, ...]
    total_answers: int
    total_hours: float


@dataclass(frozen=True)
class PaceReport:
    """Everybody's answers and active hours; `days` are the starts of the last DAYS days, in seconds since the epoch."""

    days: tuple[int, ...]
    people: tuple[PersonDays, ...]


@dataclass
class _Work:
    """One labeler's events in one batch, in any order, and what they add up to per day."""

    days: "array[int]" = field(default_factory=lambda: array("q"))
    milliseconds: "array[int]" = field(default_factory=lambda: array("q"))
    changes: "array[int]" = field(default_factory=lambda: array("q"))  # of the number of answers: 1, 0 or -1
    summed: tuple[Numbers, Numbers, Numbers] | None = None

    def add(self, day: int, milliseconds: int, change: int) -> None:
        self.days.append(day)
        self.milliseconds.append(milliseconds)
        self.changes.append(change)
        self.summed = None

    def per_day(self) -> tuple[Numbers, Numbers, Numbers]:
        """Returns the days with events, in order, and the answers and active seconds of each."""
        if self.summed is None:
            days, inverse = np.unique(np.array(self.days), return_inverse=True)
            answers = np.bincount(inverse, weights=np.array(self.changes))
            self.summed = days, answers, np.bincount(inverse, weights=_active(np.array(self.milliseconds)) / 1_000)
        return self.summed


class PaceLog:
    """Keeps the times of all events in memory and reads only new ones from the store, so that a page stays quick.

    On PostgreSQL, transactions may commit in another order than their events' numbers. If events are stored that were
    not there when a newer one was read, all of them are read again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._work: dict[tuple[str, str], _Work] = {}  # by labeler and batch, in order of their first events
        self._num_events: dict[str, int] = {}
        self._newest = 0

    def read(self, connection: Connection) -> None:
        """Reads the events that were stored since the last call."""
        with self._lock:
            self._add_newer(connection)
            num_stored = connection.scalar(select(func.count()).where(judgments.c.judgment_id <= self._newest))
            if num_stored != sum(self._num_events.values()):
                self._forget()
                self._add_newer(connection)

    def _add_newer(self, connection: Connection) -> None:
        for row in connection.execute(_EVENTS.where(judgments.c.judgment_id > self._newest)):
            self._newest = row.judgment_id
            self._num_events[row.batch] = self._num_events.get(row.batch, 0) + 1
            if row.kind != "adjudication":
                work = self._work.setdefault((row.labeler, row.batch), _Work())
                day = min(max(row.created_at // DAY_SECONDS, -FAR_DAYS), FAR_DAYS)
                work.add(int(day), row.milliseconds, row.change)

    def num_events(self, batch: str) -> int:
        """Counts a batch's events so far, adjudications included."""
        with self._lock:
            return self._num_events.get(batch, 0)

    def estimate(self, batch: str, num_left: int, now: float) -> Estimate:
        """Returns when a batch with `num_left` open judgments may be finished."""
        if not num_left:
            return Estimate(0, reason="nothing is left")
        today = int(now // DAY_SECONDS)
        with self._lock:
            known = [work.per_day() for (_, its_batch), work in self._work.items() if its_batch == batch]
        nothing = (np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
        days, answers, active = (np.concatenate(columns) for columns in zip(nothing, *known, strict=True))
        is_recent = (days > today - DAYS) & (days <= today)
        days, answers, active = days[is_recent], answers[is_recent], active[is_recent]  # one entry per person and day
        num_answers = int(answers.sum())
        if num_answers < MIN_ANSWERS:
            reason = f"no estimate yet: {num_answers} answers in the last {DAYS} days, {MIN_ANSWERS} are needed"
            return Estimate(num_left, reason=reason)
        hours = _hours_left(answers, active, num_left) if len(days) >= MIN_CELLS else None
        first = int(days.min())
        per_day = np.bincount(days - first, weights=answers, minlength=today - first + 1)
        finished = _finished(per_day, num_left, today) if len(per_day) >= MIN_DAYS else None
        reason = "" if finished else f"no day yet: {len(per_day)} of {MIN_DAYS} days of labeling so far"
        return Estimate(num_left, hours, finished, len(per_day), reason)

    def report(self, connection: Connection, now: float) -> PaceReport:
        """Returns everybody's answers and active hours on the last days and in all, by name."""
        with self._lock:
            works: dict[str, list[tuple[Numbers, Numbers, Numbers]]] = {}
            for (pseudonym, _), work in self._work.items():
                works.setdefault(pseudonym, []).append(work.per_day())
        names = _names(connection, list(works))
        first = int(now // DAY_SECONDS) - DAYS + 1
        people = []
        for pseudonym, own in works.items():
            days, answers, seconds = (np.concatenate(columns) for columns in zip(*own, strict=True))
            is_recent = (days >= first) & (days < first + DAYS)
            at = days[is_recent] - first
            per_day = np.bincount(at, weights=answers[is_recent], minlength=DAYS)
            hours = np.bincount(at, weights=seconds[is_recent], minlength=DAYS) / 3_600
            totals = (int(answers.sum()), float(seconds.sum()) / 3_600)
            people.append(PersonDays(names[pseudonym], tuple(map(int, per_day)), tuple(map(float, hours)), *totals))
        starts = tuple(day * DAY_SECONDS for day in range(first, first + DAYS))
        return PaceReport(starts, tuple(sorted(people, key=lambda person: person.name)))


def _kind_before() -> ColumnElement[str]:
    """Returns the kind of the same labeler's event before this one on the task; "" if it is the first."""
    before = judgments.alias("before")
    found = select(before.c.kind).where(
        before.c.task == judgments.c.task,
        before.c.labeler == judgments.c.labeler,
        before.c.revision == judgments.c.revision - 1,
    )
    before_it = func.coalesce(found.correlate(judgments).scalar_subquery(), "")
    return case((judgments.c.revision == 0, ""), else_=before_it)  # nearly all events are somebody's first on a task


def _own_time() -> ColumnElement[int]:
    """Returns the milliseconds of an answer or a skip, without those of the labeler's earlier answers to the task.

    `LabelingService.answer` adds the earlier time, unless a lead voided the answer. Imported answers may lack it.
    """
    earlier = judgments.alias("earlier")
    known = select(func.max(earlier.c.milliseconds)).where(
        earlier.c.task == judgments.c.task,
        earlier.c.labeler == judgments.c.labeler,
        earlier.c.revision < judgments.c.revision,
        earlier.c.kind == "answer",
    )
    own, before = judgments.c.milliseconds, func.coalesce(known.correlate(judgments).scalar_subquery(), 0)
    is_again = and_(judgments.c.kind == "answer", judgments.c.revision > 0, _kind_before() != "void", own > before)
    takes_time = judgments.c.kind.in_(("answer", "skip"))
    is_first = and_(takes_time, judgments.c.revision == 0)  # nearly all of them, so no subquery runs
    return case((is_first, own), (is_again, own - before), (takes_time, own), else_=0)


def _select_events() -> Select[Any]:
    """Returns the query for events in order, each with its own time and how it changes the number of answers."""
    is_answer, follows_answer = judgments.c.kind == "answer", _kind_before() == "answer"
    takes_back = and_(judgments.c.kind.in_(("undo", "void")), follows_answer)
    change = case((and_(is_answer, ~follows_answer), 1), (takes_back, -1), else_=0)
    columns = (judgments.c.judgment_id, judgments.c.labeler, judgments.c.kind, judgments.c.created_at, tasks.c.batch)
    return (
        select(*columns, _own_time().label("milliseconds"), change.label("change"))
        .join(tasks, judgments.c.task == tasks.c.position)
        .order_by(judgments.c.judgment_id)
    )


_EVENTS = _select_events()


def _active(milliseconds: Numbers) -> Numbers:
    """Limits each of a person's times in a batch to MAX_TIMES_MEDIAN times their median."""
    measured = milliseconds[milliseconds > 0]
    return np.minimum(milliseconds, MAX_TIMES_MEDIAN * np.median(measured)) if len(measured) else milliseconds


def _hours_left(answers: Numbers, active: Numbers, num_left: int) -> tuple[float, float] | None:
    draws = np.random.default_rng(0).integers(len(answers), size=(NUM_DRAWS, len(answers)))
    num, seconds = answers[draws].sum(axis=1), active[draws].sum(axis=1)
    pace = seconds[num > 0] / num[num > 0]
    if not active.sum():
        return None  # imported answers have no times
    low, high = np.percentile(pace, RANGE) * num_left / 3_600
    return float(low), float(high)


def _finished(per_day: Numbers, num_left: int, today: int) -> tuple[float, float] | None:
    """Draws days until they add up to `num_left`. Returns the range of the day of the end, as seconds at its end."""
    mean = per_day.mean()
    if mean <= 0:
        return None
    rng, length = np.random.default_rng(0), min(MAX_DAYS_AHEAD, math.ceil(4 * num_left / mean) + 4 * len(per_day))
    # First a history like the one seen, then days of it: the few days seen are themselves a draw.
    history = per_day[rng.integers(len(per_day), size=(NUM_DRAWS, len(per_day)))]
    coming = np.take_along_axis(history, rng.integers(len(per_day), size=(NUM_DRAWS, length)), axis=1)
    reached = np.cumsum(coming, axis=1) >= num_left
    num_days = np.where(reached.any(axis=1), reached.argmax(axis=1) + 1, MAX_DAYS_AHEAD)
    low, high = np.percentile(num_days, RANGE, method="nearest")
    return float((today + low) * DAY_SECONDS), float((today + high) * DAY_SECONDS)


def _names(connection: Connection, pseudonyms: Sequence[str]) -> dict[str, str]:
    """Returns the name behind each pseudonym, or the pseudonym if it has none."""
    found = connection.execute(select(labelers.c.pseudonym, labelers.c.name))
    known = {row.pseudonym: row.name for row in found}
    return {pseudonym: known.get(pseudonym) or pseudonym for pseudonym in pseudonyms}
