"""The service layer between people and the store, shared by the pages and the API.

Labelers get tasks, judge them and are screened; leads see progress, statistics and exports.

A task's form carries a seal, which proves that this session was shown this task at that time. So people can answer only
tasks that they were given, and cannot learn anything by choosing tasks to answer.
"""

import hashlib
import hmac
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from sqlalchemy import Connection

from preferences import assignment, results
from preferences.accounts import Account, Accounts
from preferences.formats.annotated import by_criterion
from preferences.formats.parts import Report, RowWarning
from preferences.formats.registry import format_to_write
from preferences.leases import Lease
from preferences.names import known_pseudonym
from preferences.page.config import LabelCriterion, LabelingConfig, Screening
from preferences.page.quality_reports import QualityReports
from preferences.progress import PaceLog
from preferences.rankings import criteria_in, current_judgments
from preferences.records import MAX_MILLISECONDS, Answer, Judgment, assistant_turns
from preferences.results import BatchCounts, PastEvent
from preferences.statistics.panel import Panel
from preferences.statistics.quality import gold_accuracy, screen
from preferences.statistics.summary import LabelReport
from preferences.store import LabelStore

NUM_HISTORY = 50
MAX_LEFT = 1_000  # a page counts at most this many remaining tasks
# linked on the Progress page
EXPORTS = (
    "heed", "rankings", "consensus", "trl", "trl_unpaired", "hh", "criteria", "turns", "grouped", "edits",
    "demonstrations",
)  # fmt: skip
EXAMPLES_PER_KIND = 5  # shown on the page for each kind of warning of an export; the report's file has all

Waiting = Literal["instructions", "nothing open", "screening", "daily quota", "batches closed", "no fitting task"]


# ---- for labelers ----


class RefusedError(ValueError):
    """The request is not allowed in this session."""


@dataclass(frozen=True)
class TaskForm:
    """What a form sends back about its task, which it identifies by its handle.

    `shown_at` is in milliseconds since the epoch.
    """

    task: str
    revision: int
    shown_at: int
    seal: str


@dataclass(frozen=True)
class PresentedTask:
    """A task shown to a labeler, with what its form must send back."""

    lease: Lease
    form: TaskForm


def seal(session: str, *parts: object) -> str:
    """Returns an HMAC that only this server can compute for this session."""
    return hmac.new(
        session.encode(), "\x1f".join(map(str, parts)).encode("utf-8", "replace"), hashlib.sha256
    ).hexdigest()


class LabelingService:
    """Gives tasks to signed-in labelers and stores their answers."""

    def __init__(
        self, store: LabelStore, accounts: Accounts, config: LabelingConfig, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.store, self.accounts, self.config, self._clock = store, accounts, config, clock
        accounts.store_instructions(config.version, config.instructions, config.flags)

    # ---- giving tasks ----

    def next_task(self, account: Account, session: str) -> PresentedTask | Waiting:
        """Returns the next task for a labeler, or why there is none."""
        if account.read_version != self.config.version:
            return "instructions"
        if account.state == "new" and self.config.screening is not None:
            lease = self._lease(account, self.config.screening.batch)
            if lease is not None:
                return self._presented(lease, session)
            if not screened(self.store, account.name, self.config.screening):
                return self._why_not_screened(account, self.config.screening.batch)
            self.accounts.admit_screened(account.name)
            return self.next_task(replace(account, state="admitted"), session)
        if has_met_quota(self.store, self.config, account, self._clock()):
            return "daily quota"
        for batch in self.batches():
            lease = self._lease(account, batch)
            if lease is not None:
                return self._presented(lease, session)
        return self._why_nothing(account, self.batches())

    def _why_nothing(self, account: Account, batches: Sequence[str]) -> Waiting:
        with self.store.reading() as connection:
            who = known_pseudonym(connection, account.name)
            return assignment.why_nothing(connection, who, batches, self._clock())

    def _why_not_screened(self, account: Account, batch: str) -> Waiting:
        """Returns "screening" if the labeler has judged all that they get of the screening batch."""
        if batch not in self.store.batches():
            return "nothing open"
        why = self._why_nothing(account, [batch])
        has_judged = any(judgment.labeler == account.name for judgment in self.store.judgments(batch))
        return "screening" if why == "nothing open" and has_judged else why

    def own_task(self, account: Account, handle: str, session: str) -> PresentedTask | None:
        """Returns a task, by its handle, that the labeler has answered, or took back and still has leased.

        Returns None for any other task, and until the labeler has read the current instructions.
        """
        if account.read_version != self.config.version:
            return None
        lease = self.store.with_history(account.name, handle)
        return self._presented(lease, session) if lease is not None and (lease.given_at or lease.is_done) else None

    def earlier_answer(self, lease: Lease) -> Judgment | None:
        """Returns this person's last answer or adjudication of a task, with which the form for a new one is prefilled.

        After a lead has voided it, the form stays empty.
        """
        own = [event for event in self.store.events_on(lease.task_id) if event.labeler == lease.labeler]
        if own and own[-1].kind == "void":
            return None
        return next((event for event in reversed(own) if event.ranks), None)

    def num_left(self, account: Account) -> int:
        """Counts the tasks that are left for a labeler, including the current one, up to MAX_LEFT."""
        screening = self.config.screening
        batches = self.batches() if screening is None or account.state != "new" else [screening.batch]
        num = 0
        for batch in batches:
            num += self.store.num_left(account.name, batch, limit=MAX_LEFT - num, tags=account.tags)
            if num >= MAX_LEFT:
                break
        return num

    def batches(self) -> list[str]:
        """Returns the batches that labelers get tasks from after the screening, in order."""
        left_out = "" if self.config.screening is None else self.config.screening.batch
        return [name for name in (self.config.batches or self.store.batches()) if name != left_out]

    def reopened(self, account: Account, task_id: str, session: str) -> PresentedTask:
        """Returns a task for a lead to adjudicate. Raises: ValueError for an unknown task."""
        return self._presented(self.store.reopened(account.name, task_id), session)

    def shown_again(self, account: Account, session: str, form: TaskForm) -> PresentedTask:
        """Returns a submitted form's task, as it was shown. Raises: RefusedError for another session's form."""
        lease, _ = self._sealed_lease(account, session, form)
        return PresentedTask(lease, form)

    def reveal(self, account: Account, session: str, form: TaskForm) -> None:
        """Stores that the labeler has seen the warning and asked to see the task; its time counts from now.

        Raises: RefusedError for a form that was not made for this session.
        """
        lease, _ = self._sealed_lease(account, session, form)
        self.store.reveal(lease)

    def _lease(self, account: Account, batch: str) -> Lease | None:
        """Leases a batch's next task, in the configured order."""
        is_random, seconds = self.config.task_order == "random", self.config.lease_seconds
        return self.store.lease(account.name, seconds=seconds, batch=batch, is_random=is_random, tags=account.tags)

    def _presented(self, lease: Lease, session: str) -> PresentedTask:
        """Adds the form. Time counts from when the task was leased, however often its page is reloaded."""
        shown_at = int((lease.given_at or self._clock()) * 1000)
        proof = seal(session, lease.handle, lease.revision, shown_at)
        return PresentedTask(lease, TaskForm(lease.handle, lease.revision, shown_at, proof))

    # ---- storing answers ----

    def answer(self, account: Account, session: str, form: TaskForm, answer: Answer, client: str) -> None:
        """Stores an answer; a lead's answer is an adjudication. `milliseconds` is measured here.

        The time of an answer that replaces an earlier one includes the earlier one's, because statistics read it as
        the time that the labeler needed for the task.

        Raises: RefusedError for a form that was not made for this session, ValueError if some turns are not rated or
        none should be, and what `LabelStore.submit` raises.
        """
        lease, milliseconds = self._sealed_lease(account, session, form)
        _require_turns(lease, answer, self.config.turn_criteria)
        earlier = self.earlier_answer(lease) if account.role == "labeler" and lease.revision else None
        total = min(milliseconds + (earlier.milliseconds if earlier is not None else 0), MAX_MILLISECONDS)
        timed, version = replace(answer, milliseconds=total), self.config.version
        with _without_id(account, lease):
            if account.role == "lead":
                self.store.adjudicate(lease, timed, client=client, instructions_version=version, act="adjudicated")
            else:
                self.store.submit(lease, timed, client=client, instructions_version=version)

    def skip(self, account: Account, session: str, form: TaskForm, reason: str, client: str) -> None:
        """Leaves a task to other labelers. Raises what `answer` raises."""
        lease, milliseconds = self._sealed_lease(account, session, form)
        with _without_id(account, lease):
            self.store.skip(lease, reason, milliseconds, client=client, instructions_version=self.config.version)

    def ask(self, account: Account, lease: Lease, text: str) -> None:
        """Stores a labeler's question about a task that they were shown. Raises: ValueError for an unusable text."""
        with _without_id(account, lease):
            self.store.write_message(lease.task_id, account.name, account.name, "question", text)

    def undo(self, account: Account, task: str, revision: int, client: str) -> None:
        """Takes back this person's last event on a task, given by its handle. Raises what `LabelStore.undo` raises.

        An unknown task and one without an event of this person are refused with the same message.
        """
        lease = self.store.with_history(account.name, task)
        if lease is None:
            raise RefusedError("there is nothing of yours to take back on this task")
        lease = replace(lease, revision=revision)
        with _without_id(account, lease):
            act = "took back the adjudication of" if account.role == "lead" else ""
            self.store.undo(lease, "taken back", client=client, act=act)

    def void(self, lead: Account, task_id: str, labeler: str, revision: int, reason: str, client: str) -> None:
        """Voids a labeler's judgment. Raises: as `LabelStore.void`."""
        self.store.void(task_id, labeler, revision, reason, by=lead.name, client=client)

    def _sealed_lease(self, account: Account, session: str, form: TaskForm) -> tuple[Lease, int]:
        """Returns the form's lease and the milliseconds since it was shown. Raises: RefusedError for a wrong seal."""
        expected = seal(session, form.task, form.revision, form.shown_at)
        if not hmac.compare_digest(expected.encode(), form.seal.encode("utf-8", "replace")):
            raise RefusedError("this form was not made for this session; open the task again")
        lease = replace(self.store.by_handle(account.name, form.task), revision=form.revision)
        shown_at = int(lease.given_at * 1000) or form.shown_at
        return lease, max(0, int(self._clock() * 1000) - shown_at)

    # ---- history ----

    def history(self, account: Account) -> list[tuple[PastEvent, bool]]:
        """Returns the labeler's last events, newest first, and whether each is current and so can be taken back."""
        seen: set[str] = set()
        found = []
        for event in self.store.history(account.name, NUM_HISTORY):
            is_current = event.handle not in seen and event.judgment.kind in ("answer", "skip", "adjudication")
            seen.add(event.handle)
            found.append((event, is_current))
        return found


def _require_turns(lease: Lease, answer: Answer, criteria: Sequence[LabelCriterion]) -> None:
    """Raises: ValueError unless the answer rates each turn of the assistant by each of these criteria."""
    turns, given = assistant_turns(lease.shown.prompt), [(one.name, one.turn) for one in answer.annotations.turns]
    if sorted(given) != sorted((one.name, turn) for one in criteria for turn in turns):
        names = ", ".join(one.name for one in criteria)
        expected = f"one per turn of the assistant (it has {len(turns)}) by {names}" if names else "none"
        raise ValueError(f"turns: {len(given)} ratings of earlier turns were given; {expected} was expected")


@contextmanager
def _without_id(account: Account, lease: Lease) -> Iterator[None]:
    """Removes the task's id from error messages for labelers, because it may reveal what they must not know."""
    try:
        yield
    except ValueError as error:
        if account.role == "lead":
            raise
        raise ValueError(str(error).replace(repr(lease.task_id), "at hand")) from error


def warning_of(config: LabelingConfig, connection: Connection) -> str:
    """Returns warnings for leads about a configuration that does not fit the store; "" if there are none."""
    batches = results.batches(connection)
    alone = results.batches_of_single_responses(connection, batches)
    return config.warning(batches, alone)


def has_met_quota(store: LabelStore, config: LabelingConfig, account: Account, now: float) -> bool:
    """Whether a labeler has given as many answers since midnight, UTC, as they may per day."""
    quota = account.daily_quota or config.daily_quota
    if not quota:
        return False
    with store.reading() as connection:
        who = known_pseudonym(connection, account.name)
        return assignment.num_answered_today(connection, who, now) >= quota


def why_no_answer(
    store: LabelStore, config: LabelingConfig, account: Account, batch: str, now: float
) -> Waiting | Literal[""]:
    """Returns why somebody may not add an answer to a batch that has no task for it yet, as the arena does; "" if they
    may. The same limits apply as for tasks, except to leads.
    """
    if account.role == "lead":
        return ""
    if account.read_version != config.version:
        return "instructions"
    if account.state == "new" and config.screening is not None:
        return "screening"
    with store.reading() as connection:
        settings = assignment.settings_of(connection, batch)
    if settings.is_closed:
        return "batches closed"
    if not set(settings.requires) <= set(account.tags):
        return "no fitting task"
    return "daily quota" if has_met_quota(store, config, account, now) else ""


def screened(store: LabelStore, labeler: str, screening: Screening) -> bool:
    """Whether a new labeler agrees with gold tasks often enough. Call it when the batch has no more tasks for them."""
    own = [judgment for judgment in store.judgments(screening.batch) if judgment.labeler == labeler]
    answers = current_judgments(own).answers
    if not answers:
        return False
    tasks = [stored.task for stored in store.tasks(screening.batch)]
    (accuracy,) = gold_accuracy(Panel.of(tasks, answers, [labeler]))
    return screen(accuracy, threshold=screening.min_accuracy, min_tasks=screening.min_tasks) == "passed"


# ---- for leads ----


@dataclass(frozen=True)
class Exported:
    """A batch in a format, with a report of what the format cannot hold."""

    rows: list[dict[str, Any]]
    report: Report
    criteria: tuple[str, ...] = ()  # that the batch could be exported by

    @property
    def lines(self) -> Iterator[str]:
        """The rows as lines of JSON, made while they are sent: all of them together may be larger than the store."""
        return _as_lines(self.rows)

    @property
    def report_lines(self) -> Iterator[str]:
        """Everything that was left out or changed, as lines of JSON."""
        return _as_lines([dict(vars(warning)) for warning in self.report.warnings])

    @property
    def examples(self) -> Mapping[str, list[RowWarning]]:
        """The first few warnings of each kind, most frequent kind first."""
        found: dict[str, list[RowWarning]] = {kind: [] for kind in self.report.counts()}
        for warning in self.report.warnings:
            if len(found[warning.kind]) < EXAMPLES_PER_KIND:
                found[warning.kind].append(warning)
        return found


class LeadView:
    """Reads the store for leads."""

    def __init__(self, store: LabelStore) -> None:
        self.store = store
        self._pace = PaceLog()
        self._quality = QualityReports(store, self._pace)

    def batches(self) -> list[BatchCounts]:
        return self.store.batch_counts()

    def pace(self, batches: Sequence[BatchCounts]) -> dict[str, Any]:
        """Returns what the progress page shows besides counts: settings and estimates by batch, and people's hours."""
        now = self.store.now()
        with self.store.reading() as connection:
            self._pace.read(connection)
            settings = {one.name: assignment.settings_of(connection, one.name) for one in batches}
            estimates = {
                one.name: self._pace.estimate(one.name, one.num_wanted - one.num_judgments, now) for one in batches
            }
            return {"settings": settings, "estimates": estimates, "pace": self._pace.report(connection, now)}

    def report(self, batch: str) -> LabelReport:
        """Returns a batch's statistics. Raises: ValueError for an unknown batch."""
        return self._quality.of(batch).report

    def quality(self, batch: str) -> dict[str, Any]:
        """Returns what the quality page shows, for the first batch if none is named."""
        batches = self.store.batches()
        chosen = batch or next(iter(batches), "")
        found, is_newest = self._quality.latest(chosen) if chosen else (None, True)
        is_judged = found is not None and found.report.num_answers > 0
        report, plots = (found.report, found.plots) if found is not None and is_judged else (None, [])
        shown = {"older": None if is_newest else found, "is_coming": not is_newest}
        return {"batches": batches, "batch": chosen, "report": report, "plots": plots, **shown}

    def export(self, batch: str, form: str, *, with_names: bool = False, criterion: str = "") -> Exported:
        """Returns a batch in a format, with the labelers' pseudonyms or names, and by one criterion if it is given.

        Raises: ValueError for an unknown batch, format or criterion; CriterionNeededError for a format that needs one.
        """
        chosen = format_to_write(form)
        assert chosen.write is not None, f"{form} is not written"
        stored = self.store.tasks(batch)
        if not stored:
            raise ValueError(f"batch {batch!r} is not in the store")
        report = Report()
        judgments = self.store.judgments(batch, with_names=with_names)
        names = criteria_in(judgments)
        if criterion:
            stored, judgments = by_criterion(chosen, stored, judgments, criterion, report)
        rows = list(chosen.write(stored, judgments, report))
        report.num_rows = len(rows)
        return Exported(rows, report, names)


def exported_what(batch: str, what: str, *, with_names: bool) -> str:
    """Returns the subject of an export in the audit log."""
    return f"{batch} ({what}{', with names' if with_names else ''})"


def _as_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    return (json.dumps(row) + "\n" for row in rows)
