"""What happens between a labeler and the store, for the page and the API alike.

A task's form carries a seal, which proves that this session was shown this task at that time: nobody answers what they
were not given, and nothing can be learned from answering tasks of one's choice.
"""

import hashlib
import hmac
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from labeling.config import LabelingConfig
from preferences.leasing import Lease
from preferences.people import Account, People
from preferences.records import Answer
from preferences.results import PastAct
from preferences.screening import screened
from preferences.store import LabelStore

NUM_HISTORY = 50

Waiting = Literal["instructions", "nothing open", "screening", "closed"]


class RefusedError(ValueError):
    """What somebody asked for is not theirs to have."""


@dataclass(frozen=True)
class ShownForm:
    """What a form brings back of the task it was made for, which it names by its handle.

    `shown_at` is in milliseconds since the epoch.
    """

    task: str
    revision: int
    shown_at: int
    seal: str


@dataclass(frozen=True)
class Asked:
    """A task before a labeler, with what its form has to bring back."""

    lease: Lease
    form: ShownForm


def seal(session: str, *parts: object) -> str:
    """What only this server, in this session, can have written."""
    return hmac.new(
        session.encode(), "\x1f".join(map(str, parts)).encode("utf-8", "replace"), hashlib.sha256
    ).hexdigest()


class Labeling:
    """Offers tasks to signed-in labelers and takes what they say."""

    def __init__(
        self, store: LabelStore, people: People, config: LabelingConfig, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.store, self.people, self.config, self._clock = store, people, config, clock
        people.keep_instructions(config.version, config.instructions, config.flags)

    # ---- being asked ----

    def next_task(self, account: Account, session: str) -> Asked | Waiting:
        """The next task for a labeler, or why there is none."""
        if account.read_version != self.config.version:
            return "instructions"
        if account.state == "new" and self.config.screening is not None:
            lease = self._lease(account, self.config.screening.batch)
            if lease is not None:
                return self._asked(lease, session)
            if not screened(self.store, account.name, self.config.screening):
                return "screening"
            self.people.admit_screened(account.name)
        for batch in self.batches():
            lease = self._lease(account, batch)
            if lease is not None:
                return self._asked(lease, session)
        return "nothing open"

    def batches(self) -> list[str]:
        """What labelers are offered, in order."""
        screening = self.config.screening.batch if self.config.screening is not None else None
        return [name for name in (self.config.batches or self.store.batches()) if name != screening]

    def reopened(self, account: Account, task_id: str, session: str) -> Asked:
        """A task again, for a lead who adjudicates it. Raises ValueError for an unknown task."""
        return self._asked(self.store.reopened(account.name, task_id), session)

    def shown_again(self, account: Account, session: str, form: ShownForm) -> Asked:
        """The task of a form that came back, as it was shown. Raises RefusedError for a form of another session."""
        lease, _ = self._held(account, session, form)
        return Asked(lease, form)

    def _lease(self, account: Account, batch: str) -> Lease | None:
        return self.store.lease(account.name, seconds=self.config.lease_seconds, batch=batch)

    def _asked(self, lease: Lease, session: str) -> Asked:
        """A task with its form. Time counts from when the task was given, however often it is loaded again."""
        shown_at = int((lease.given_at or self._clock()) * 1000)
        proof = seal(session, lease.handle, lease.revision, shown_at)
        return Asked(lease, ShownForm(lease.handle, lease.revision, shown_at, proof))

    # ---- being answered ----

    def answer(self, account: Account, session: str, form: ShownForm, answer: Answer, client: str) -> None:
        """Store an answer; of a lead, an adjudication. Its `milliseconds` are counted here.

        Raises RefusedError for a form that this session was not given, and what `LabelStore.submit` raises.
        """
        lease, milliseconds = self._held(account, session, form)
        submit = self.store.adjudicate if account.role == "lead" else self.store.submit
        timed = replace(answer, milliseconds=milliseconds)
        with _unnamed(account, lease):
            submit(lease, timed, client=client, instructions_version=self.config.version)

    def skip(self, account: Account, session: str, form: ShownForm, reason: str, client: str) -> None:
        """Leave a task to others. Errors as for `answer`."""
        lease, milliseconds = self._held(account, session, form)
        with _unnamed(account, lease):
            self.store.skip(lease, reason, milliseconds, client=client, instructions_version=self.config.version)

    def undo(self, account: Account, task: str, revision: int, client: str) -> None:
        """Take one's own last act on a task, named by its handle, back. Raises what `LabelStore.undo` raises.

        A task that is not there, and one that the labeler did nothing on, are refused in the same words.
        """
        lease = self.store.acted_on(account.name, task)
        if lease is None:
            raise RefusedError("there is nothing of yours to take back on this task")
        lease = replace(lease, revision=revision)
        with _unnamed(account, lease):
            self.store.undo(lease, "taken back", client=client, instructions_version=self.config.version)

    def _held(self, account: Account, session: str, form: ShownForm) -> tuple[Lease, int]:
        expected = seal(session, form.task, form.revision, form.shown_at)
        if not hmac.compare_digest(expected.encode(), form.seal.encode("utf-8", "replace")):
            raise RefusedError("this form was not given to this session; open the task again")
        lease = replace(self.store.by_handle(account.name, form.task), revision=form.revision)
        shown_at = int(lease.given_at * 1000) or form.shown_at
        return lease, max(0, int(self._clock() * 1000) - shown_at)

    # ---- looking back ----

    def history(self, account: Account) -> list[tuple[PastAct, bool]]:
        """The labeler's last acts, the newest first, and whether each stands, so that it can be taken back."""
        seen: set[str] = set()
        found = []
        for act in self.store.history(account.name, NUM_HISTORY):
            stands = act.handle not in seen and act.judgment.kind in ("answer", "skip", "adjudication")
            seen.add(act.handle)
            found.append((act, stands))
        return found


@contextmanager
def _unnamed(account: Account, lease: Lease) -> Iterator[None]:
    """Take a task's id out of what a labeler is told: it may say what they must not know."""
    try:
        yield
    except ValueError as error:
        if account.role == "lead":
            raise
        raise ValueError(str(error).replace(repr(lease.task_id), "at hand")) from error
