"""What happens between a labeler and the store, for the pages and the API alike.

A task's form carries a seal, which proves that this session was shown this task at that time. So nobody answers tasks
that they were not given, and nothing can be learned by answering tasks of one's choice.
"""

import hashlib
import hmac
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from preferences.accounts import Account, Accounts
from preferences.leases import Lease
from preferences.page.config import LabelingConfig
from preferences.records import Answer, Judgment
from preferences.results import PastEvent
from preferences.screening import screened
from preferences.store import LabelStore

NUM_HISTORY = 50
MAX_LEFT = 1_000  # tasks left that are counted for a page

Waiting = Literal["instructions", "nothing open", "screening", "closed"]


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
                return "screening"
            self.accounts.admit_screened(account.name)
        for batch in self.batches():
            lease = self._lease(account, batch)
            if lease is not None:
                return self._presented(lease, session)
        return "nothing open"

    def taken_back(self, account: Account, handle: str, session: str) -> PresentedTask | None:
        """Returns a task that the labeler took back and holds, by its handle; None for any other task, and as long as
        the labeler has not read these instructions."""
        if account.read_version != self.config.version:
            return None
        lease = self.store.with_history(account.name, handle)
        return self._presented(lease, session) if lease is not None and lease.given_at else None

    def earlier_answer(self, lease: Lease) -> Judgment | None:
        """Returns this person's last answer to a task, or adjudication of it, in case they give another one."""
        own = [event for event in self.store.events_on(lease.task_id) if event.labeler == lease.labeler and event.ranks]
        return own[-1] if own else None

    def num_left(self, account: Account) -> int:
        """Counts the tasks that are left for a labeler, with the one at hand, up to MAX_LEFT."""
        screening = self.config.screening
        batches = self.batches() if screening is None or account.state != "new" else [screening.batch]
        num = 0
        for batch in batches:
            num += self.store.num_left(account.name, batch, limit=MAX_LEFT - num)
            if num >= MAX_LEFT:
                break
        return num

    def batches(self) -> list[str]:
        """Returns the batches that labelers get tasks from, in order."""
        screening = self.config.screening.batch if self.config.screening is not None else None
        return [name for name in (self.config.batches or self.store.batches()) if name != screening]

    def reopened(self, account: Account, task_id: str, session: str) -> PresentedTask:
        """Returns a task again, for a lead who adjudicates it. Raises: ValueError for an unknown task."""
        return self._presented(self.store.reopened(account.name, task_id), session)

    def shown_again(self, account: Account, session: str, form: TaskForm) -> PresentedTask:
        """Returns the task of a form that came back, as it was shown. Raises: RefusedError for another session's."""
        lease, _ = self._sealed_lease(account, session, form)
        return PresentedTask(lease, form)

    def reveal(self, account: Account, session: str, form: TaskForm) -> None:
        """Stores that the labeler has seen the warning and asked for the task; its time counts from now.

        Raises: RefusedError for a form that was not made for this session.
        """
        lease, _ = self._sealed_lease(account, session, form)
        self.store.reveal(lease)

    def _lease(self, account: Account, batch: str) -> Lease | None:
        is_random = self.config.task_order == "random"
        return self.store.lease(account.name, seconds=self.config.lease_seconds, batch=batch, is_random=is_random)

    def _presented(self, lease: Lease, session: str) -> PresentedTask:
        """Adds the form. Time counts from when the task was leased, however often its page is reloaded."""
        shown_at = int((lease.given_at or self._clock()) * 1000)
        proof = seal(session, lease.handle, lease.revision, shown_at)
        return PresentedTask(lease, TaskForm(lease.handle, lease.revision, shown_at, proof))

    # ---- storing answers ----

    def answer(self, account: Account, session: str, form: TaskForm, answer: Answer, client: str) -> None:
        """Stores an answer; a lead's is an adjudication. `milliseconds` is measured here.

        Raises: RefusedError for a form that was not made for this session, and what `LabelStore.submit` raises.
        """
        lease, milliseconds = self._sealed_lease(account, session, form)
        submit = self.store.adjudicate if account.role == "lead" else self.store.submit
        timed = replace(answer, milliseconds=milliseconds)
        with _without_id(account, lease):
            submit(lease, timed, client=client, instructions_version=self.config.version)

    def skip(self, account: Account, session: str, form: TaskForm, reason: str, client: str) -> None:
        """Leaves a task to other labelers. Raises what `answer` raises."""
        lease, milliseconds = self._sealed_lease(account, session, form)
        with _without_id(account, lease):
            self.store.skip(lease, reason, milliseconds, client=client, instructions_version=self.config.version)

    def undo(self, account: Account, task: str, revision: int, client: str) -> None:
        """Takes one's own last event on a task, given by its handle, back. Raises what `LabelStore.undo` raises.

        An unknown task and one that the labeler did nothing on are refused with the same message.
        """
        lease = self.store.with_history(account.name, task)
        if lease is None:
            raise RefusedError("there is nothing of yours to take back on this task")
        lease = replace(lease, revision=revision)
        with _without_id(account, lease):
            self.store.undo(lease, "taken back", client=client, instructions_version=self.config.version)

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


@contextmanager
def _without_id(account: Account, lease: Lease) -> Iterator[None]:
    """Removes the task's id from error messages for labelers, because it may reveal what they must not know."""
    try:
        yield
    except ValueError as error:
        if account.role == "lead":
            raise
        raise ValueError(str(error).replace(repr(lease.task_id), "at hand")) from error
