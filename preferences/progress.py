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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Connection, and_, case, func, select

from preferences.schema import judgments, labelers, tasks

DAY_SECONDS = 86_400
DAYS = 14  # calendar days that the pace is taken from
MIN_ANSWERS, MIN_CELLS, MIN_DAYS = 20, 3, 3  # below these there is no estimate
MAX_TIMES_MEDIAN = 5
NUM_DRAWS = 400
RANGE = (10, 90)  # percentiles
MAX_DAYS_AHEAD = 3_650

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
class _Events:
    """Answers, skips, undos and voids so far, one entry each."""

    labeler: list[int] = field(default_factory=list)
    batch: list[int] = field(default_factory=list)
    day: list[int] = field(default_factory=list)
    milliseconds: list[int] = field(default_factory=list)
    change: list[int] = field(default_factory=list)  # of the number of answers: 1, 0 or -1


class PaceLog:
    """Keeps the times of all events in memory and reads only new ones from the store, so that a page stays quick."""

    def __init__(self) -> None:
        self._events, self._newest = _Events(), 0
        self._labelers: dict[str, int] = {}
        self._batches: dict[str, int] = {}
        self._lock = threading.Lock()
        self._active_at, self._known = -1, np.zeros((5, 0))

    def read(self, connection: Connection) -> None:
        """Reads the events that were stored since the last call."""
        is_answer, follows_answer = judgments.c.kind == "answer", _kind_before() == "answer"
        takes_back = and_(judgments.c.kind.in_(("undo", "void")), follows_answer)
        change = case((and_(is_answer, ~follows_answer), 1), (takes_back, -1), else_=0)
        times = (judgments.c.judgment_id, judgments.c.labeler, tasks.c.batch, judgments.c.created_at)
        statement = (
            select(*times, _own_time().label("milliseconds"), change.label("change"))
            .join(tasks, judgments.c.task == tasks.c.position)
            .where(judgments.c.kind != "adjudication")
            .order_by(judgments.c.judgment_id)
        )
        with self._lock:
            for row in connection.execute(statement.where(judgments.c.judgment_id > self._newest)):
                self._newest = row.judgment_id
                self._events.labeler.append(self._labelers.setdefault(row.labeler, len(self._labelers)))
                self._events.batch.append(self._batches.setdefault(row.batch, len(self._batches)))
                self._events.day.append(int(row.created_at // DAY_SECONDS))
                self._events.milliseconds.append(row.milliseconds)
                self._events.change.append(row.change)

    def estimate(self, batch: str, num_left: int, now: float) -> Estimate:
        """Returns when a batch with `num_left` open judgments may be finished."""
        with self._lock:
            if not num_left:
                return Estimate(0, reason="nothing is left")
            number = self._batches.get(batch, -1)
            labeler, batches, day, change, seconds = self._arrays()
            today = int(now // DAY_SECONDS)
            mine = (batches == number) & (day > today - DAYS) & (day <= today)
        cells, answers, active = _cells(labeler[mine], day[mine], change[mine], seconds[mine])
        num_answers = int(answers.sum())
        if num_answers < MIN_ANSWERS:
            reason = f"no estimate yet: {num_answers} answers in the last {DAYS} days, {MIN_ANSWERS} are needed"
            return Estimate(num_left, reason=reason)
        hours = _hours_left(answers, active, num_left) if len(cells) >= MIN_CELLS else None
        first = int(day[mine].min())
        per_day = np.bincount((day[mine] - first).astype(np.int64), weights=change[mine], minlength=today - first + 1)
        finished = _finished(per_day, num_left, today) if len(per_day) >= MIN_DAYS else None
        reason = "" if finished else f"no day yet: {len(per_day)} of {MIN_DAYS} days of labeling so far"
        return Estimate(num_left, hours, finished, len(per_day), reason)

    def report(self, connection: Connection, now: float) -> PaceReport:
        """Returns everybody's answers and active hours on the last days and in all, by name."""
        with self._lock:
            labeler, _, day, change, seconds = self._arrays()
            pseudonyms = list(self._labelers)
        names = _names(connection, pseudonyms)
        today = int(now // DAY_SECONDS)
        days = range(today - DAYS + 1, today + 1)
        people = []
        for number, pseudonym in enumerate(pseudonyms):
            mine = labeler == number
            recent = mine & (day >= days.start) & (day <= today)
            at = (day[recent] - days.start).astype(np.int64)
            per_day = np.bincount(at, weights=change[recent], minlength=DAYS)
            hours = np.bincount(at, weights=seconds[recent], minlength=DAYS) / 3_600
            totals = (int(change[mine].sum()), float(seconds[mine].sum()) / 3_600)
            people.append(PersonDays(names[pseudonym], tuple(map(int, per_day)), tuple(map(float, hours)), *totals))
        starts = tuple(one * DAY_SECONDS for one in days)
        return PaceReport(starts, tuple(sorted(people, key=lambda person: person.name)))

    def _arrays(self) -> Numbers:
        """Returns labelers, batches, days, changes and active seconds of all events, [5, events]."""
        own = self._events
        if self._active_at != self._newest:
            found = np.array([own.labeler, own.batch, own.day, own.change, own.milliseconds], dtype=np.float64)
            found[4] = _active(found[0], found[1], found[4]) / 1_000
            self._active_at, self._known = self._newest, found
        return self._known


def _kind_before() -> ColumnElement[str]:
    """Returns the kind of the same labeler's event before this one on the task; "" if it is the first."""
    before = judgments.alias("before")
    found = select(before.c.kind).where(
        before.c.task == judgments.c.task,
        before.c.labeler == judgments.c.labeler,
        before.c.revision == judgments.c.revision - 1,
    )
    return func.coalesce(found.correlate(judgments).scalar_subquery(), "")


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
    return case((is_again, own - before), (judgments.c.kind.in_(("answer", "skip")), own), else_=0)


def _active(labeler: Numbers, batch: Numbers, times: Numbers) -> Numbers:
    """Limits each time to MAX_TIMES_MEDIAN times the median of its labeler and batch."""
    found = times.copy()
    groups = labeler * (batch.max(initial=0) + 1) + batch
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    for rows in np.split(order, starts[1:]) if len(order) else ():
        measured = times[rows][times[rows] > 0]
        if len(measured):
            found[rows] = np.minimum(times[rows], MAX_TIMES_MEDIAN * np.median(measured))
    return found


def _cells(labeler: Numbers, day: Numbers, change: Numbers, seconds: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Sums answers and active seconds per (labeler, day). Returns the cells' numbers and both sums."""
    cells, inverse = np.unique(np.stack([labeler, day], axis=1), axis=0, return_inverse=True)
    at = inverse.reshape(-1)
    answers = np.bincount(at, weights=change, minlength=len(cells))
    return np.arange(len(cells)), answers, np.bincount(at, weights=seconds, minlength=len(cells))


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
