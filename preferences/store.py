"""The label store: tasks go in, labelers lease and answer them, rankings come out.

Promises: an act that a call returned from is on disk; nothing is stored twice, changed or deleted; no task gets more
labelers than asked for. Any number of processes may use one store at a time; each call is one transaction.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from sqlalchemy import Connection, func, select

from preferences import acts, claims, importing, results
from preferences.database import open_engines
from preferences.importing import Import, ImportRows, stored
from preferences.leasing import Lease, display_order
from preferences.records import Answer, Judgment, Ranking, ShownTask, Task
from preferences.results import BatchCounts, Coverage, PastAct, Progress, StoredTask
from preferences.rows import NOWHERE, Places, Values, answer_row, empty_row, messages, parts, task_row
from preferences.schema import judgments, places, tasks

UNDO_SECONDS = 3_600.0  # how long a task stays with the labeler who took an answer back


class LabelStore:
    """Tasks, places and judgments in a SQLite file (a path, or a `sqlite:///` URL) or in PostgreSQL (`postgresql://`).

    `clock` gives epoch seconds.
    """

    def __init__(self, url_or_path: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._reader, self._writer = open_engines(url_or_path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._reader.dispose()

    # ---- tasks in ----

    def add_tasks(self, new_tasks: Sequence[Task], *, batch: str, num_labelers: int | Sequence[int]) -> None:
        """Add tasks, each to be judged by `num_labelers` distinct labelers (one number, or one per task).

        All or none are added. A task that is already there with the same content is left alone, so a killed caller
        can repeat the call.

        Raises ValueError, naming the task, if its id is taken by other content, a field is malformed, or what it
        repeats is neither there nor before it.
        """
        quotas = [num_labelers] * len(new_tasks) if isinstance(num_labelers, int) else list(num_labelers)
        if len(quotas) != len(new_tasks):
            raise ValueError(f"num_labelers has {len(quotas)} entries for {len(new_tasks)} tasks")
        wanted = [task_row(task, batch, quota) for task, quota in zip(new_tasks, quotas, strict=True)]
        with self._writer.begin() as connection:
            importing.add(connection, wanted)

    # ---- leases ----

    def lease(self, labeler: str, *, seconds: float, batch: str) -> Lease | None:
        """The task `labeler` should judge next, reserved for `seconds`; None when none is open for them.

        A lease that the labeler still holds is renewed and returned again, responses in the same order.
        """
        granted = self.lease_many(labeler, 1, seconds=seconds, batch=batch)
        return granted[0] if granted else None

    def lease_many(self, labeler: str, num_tasks: int, *, seconds: float, batch: str) -> list[Lease]:
        """Up to `num_tasks` leases: first those the labeler still holds, then new ones in order of arrival.

        A task is open for a labeler who has neither judged nor skipped it while fewer than the labelers asked for have
        judged it or hold a live lease; a repeat, once they have judged what it repeats.
        """
        _check_lease(labeler, seconds)
        if num_tasks < 1:
            raise ValueError(f"num_tasks is {num_tasks}; at least 1 was expected")
        with self._writer.begin() as connection:
            now = self._clock()
            claims.one_at_a_time(connection, labeler)
            granted = claims.held(connection, labeler, now, batch)[:num_tasks]
            claims.renew(connection, granted, now + seconds)
            if len(granted) < num_tasks:
                limit = num_tasks - len(granted)
                granted += claims.claim(connection, labeler, now, now + seconds, batch=batch, limit=limit)
            return _leases(connection, [task for task, _ in granted], labeler, now + seconds)

    def lease_these(self, labeler: str, task_ids: Sequence[str], *, seconds: float, batch: str) -> list[Lease]:
        """Leases on those of the batch's `task_ids` that are open for the labeler or held by them, in order of
        arrival.
        """
        _check_lease(labeler, seconds)
        with self._writer.begin() as connection:
            now, until = self._clock(), self._clock() + seconds
            claims.one_at_a_time(connection, labeler)
            wanted = {row["position"] for row in stored(connection, task_ids).values()}
            held = claims.held(connection, labeler, now, batch)
            granted = [place for place in held if place[0] in wanted]
            claims.renew(connection, granted, until)
            for part in parts(sorted(wanted)):
                granted += claims.claim(connection, labeler, now, until, batch=batch, limit=len(part), positions=part)
            return _leases(connection, [task for task, _ in granted], labeler, until)

    # ---- acts of labelers ----

    def submit(self, lease: Lease, answer: Answer, *, client: str, instructions_version: str) -> None:
        """Store one answer; on return it is on disk. See `submit_many`."""
        self.submit_many([lease], [answer], client=client, instructions_version=instructions_version)

    def submit_many(
        self, held: Sequence[Lease], answers: Sequence[Answer], *, client: str, instructions_version: str
    ) -> None:
        """Store one labeler's answers, all or none; lists in `answers[i]` follow the order that `held[i]` was shown in.

        An answer that is already stored (same task, labeler, revision and content) is accepted and not stored again.
        An answer whose lease ran out is still taken while the task has a place for it.

        Raises ValueError for a malformed answer, an unknown task, or one that contradicts the labeler's stored
        answer; LeaseLostError if the lease ran out and the task's places went to others.
        """
        if len(held) != len(answers):
            raise ValueError(f"answers has {len(answers)} entries for {len(held)} leases")
        for lease in held[1:]:
            if lease.labeler != held[0].labeler:
                raise ValueError(
                    f"leases of {held[0].labeler!r} and {lease.labeler!r} in one call; one labeler was expected"
                )
        # Everything that can be refused without the database is refused before the write lock is taken.
        rows = [answer_row(lease, answer, "answer") for lease, answer in zip(held, answers, strict=True)]
        if rows:
            self._record(held[0].labeler, rows, client, instructions_version)

    def skip(self, lease: Lease, reason: str, milliseconds: int, *, client: str, instructions_version: str) -> None:
        """The labeler leaves the task to others, and says why. Idempotent, and errors, as for `submit_many`."""
        rows = [empty_row(lease, "skip", reason, milliseconds)]
        self._record(lease.labeler, rows, client, instructions_version)

    def undo(self, lease: Lease, reason: str, *, client: str, instructions_version: str) -> None:
        """Take the labeler's last act on a task back; they hold the task again. What was said stays in the store.

        `lease` is as `reopened` gives it. Raises ValueError where nothing stands that could be taken back, and
        LeaseLostError where what was skipped went to others.
        """
        self._record(lease.labeler, [empty_row(lease, "undo", reason, 0)], client, instructions_version)

    def adjudicate(self, lease: Lease, answer: Answer, *, client: str, instructions_version: str) -> None:
        """A lead's answer, which stands over those of all labelers and takes no place. `lease` from `reopened`."""
        rows = [answer_row(lease, answer, "adjudication")]
        self._record(lease.labeler, rows, client, instructions_version)

    def reopened(self, labeler: str, task_id: str) -> Lease:
        """A task as this labeler was, or would be, shown it, for acts that need no live lease.

        Raises ValueError for an unknown task.
        """
        with self._reader.begin() as connection:
            found = stored(connection, [task_id])
            if task_id not in found:
                raise ValueError(f"task {task_id!r}: task_id is not in the store")
            return _leases(connection, [found[task_id]["position"]], labeler, self._clock())[0]

    def by_handle(self, labeler: str, handle: str) -> Lease:
        """As `reopened`, for what the labeler knows of the task. Raises ValueError for an unknown handle."""
        with self._reader.begin() as connection:
            position = connection.scalar(select(tasks.c.position).where(tasks.c.handle == handle))
            if position is None:
                raise ValueError("no task in the store has this handle")
            return _leases(connection, [position], labeler, self._clock())[0]

    def acted_on(self, labeler: str, handle: str) -> Lease | None:
        """As `by_handle`, for a task that the labeler did something on; None for any other."""
        with self._reader.begin() as connection:
            position = connection.scalar(select(tasks.c.position).where(tasks.c.handle == handle))
            if position is None:
                return None
            lease = _leases(connection, [position], labeler, self._clock())[0]
        return lease if lease.revision > 0 else None

    def _record(self, labeler: str, rows: Sequence[Values], client: str, instructions_version: str) -> None:
        with self._writer.begin() as connection:
            now = self._clock()
            shared = {
                "labeler": labeler,
                "client": client,
                "instructions_version": instructions_version,
                "created_at": now,
            }
            acts.record(connection, [row | shared for row in rows], labeler, now, now + UNDO_SECONDS)

    def import_judgments(self, batch: str, judgments: Sequence[Judgment]) -> None:
        """Store judgments of the batch's tasks that were made elsewhere, all or none; what is stored already is left.

        Raises ValueError, naming task and labeler, for a task that the batch lacks, for a judgment that contradicts a
        stored one, and for one more than the task wants.
        """
        with self._writer.begin() as connection:
            known = results.task_rows(connection, batch)
            sizes = {task_id: len(row["responses"]) for task_id, row in known.items()}
            importing.record(connection, importing.judgment_rows(batch, judgments, sizes), self._clock())

    def import_all(self, coming: Sequence[Import], *, files: Places = NOWHERE, only_check: bool = False) -> None:
        """Store tasks with judgments that were made elsewhere, all in one transaction; see `import_judgments`.

        `files` names where they come from. `only_check` does the same and takes it back, so whatever an import would
        refuse is refused.
        Raises ValueError, naming file and line, for what contradicts the store or is malformed.
        """
        rows = [ImportRows.of(one, files) for one in coming]  # whatever needs no database, before the write lock
        with self._writer.connect() as connection, connection.begin() as transaction:
            importing.store_rows(connection, rows, files, self._clock())
            if only_check:
                transaction.rollback()

    # ---- results out ----

    def batches(self) -> list[str]:
        """Names, in order of arrival."""
        with self._reader.begin() as connection:
            return results.batches(connection)

    def tasks(self, batch: str) -> list[StoredTask]:
        """In order of arrival."""
        with self._reader.begin() as connection:
            return results.stored_tasks(connection, batch)

    def judgments(self, batch: str) -> list[Judgment]:
        """Every act on the batch's tasks, in the order in which they were stored."""
        with self._reader.begin() as connection:
            return results.judgments_of(connection, batch)

    def rankings(self, batch: str) -> list[Ranking]:
        """What stands and is training data: each labeler's last answer, or of a task that was adjudicated that alone;
        in the tasks' order of arrival, then by labeler name. Gold tasks and hidden repeats are left out.
        """
        with self._reader.begin() as connection:
            return results.rankings(connection, batch)

    def history(self, labeler: str, limit: int) -> list[PastAct]:
        """The labeler's last acts, the newest first."""
        with self._reader.begin() as connection:
            return results.history(connection, labeler, limit)

    def num_standing(self, labeler: str) -> int:
        """How many of the labeler's answers stand, adjudications aside."""
        with self._reader.begin() as connection:
            return results.num_standing(connection, labeler)

    def coverage(self, batch: str) -> list[Coverage]:
        """Who has judged each task of the batch, in order of arrival."""
        with self._reader.begin() as connection:
            return results.coverage(connection, batch)

    def progress(self, batch: str) -> Progress:
        """Counts over one batch; all 0 for a batch without tasks."""
        with self._reader.begin() as connection:
            return results.progress(connection, batch)

    def batch_counts(self) -> list[BatchCounts]:
        """How far each batch is and who did what, in order of arrival."""
        with self._reader.begin() as connection:
            return results.batch_counts(connection, self._clock())

    def newest_judgment(self, batch: str) -> int:
        """A number that grows with every judgment of the batch; 0 = none."""
        with self._reader.begin() as connection:
            return results.newest_judgment(connection, batch)

    def content_hash(self, batch: str) -> str:
        """SHA-256 over what was judged and how; see `results.content_hash`."""
        with self._reader.begin() as connection:
            return results.content_hash(connection, batch)


def _leases(connection: Connection, positions: Sequence[int], labeler: str, expires_at: float) -> list[Lease]:
    num_acts = select(func.count()).where(judgments.c.task == tasks.c.position, judgments.c.labeler == labeler)
    revision = num_acts.correlate(tasks).scalar_subquery()
    own = select(func.max(places.c.given_at)).where(
        places.c.task == tasks.c.position, places.c.labeler == labeler, ~places.c.is_done
    )
    given_at = func.coalesce(own.correlate(tasks).scalar_subquery(), 0.0)
    columns = (tasks.c.task_id, tasks.c.handle, tasks.c.prompt, tasks.c.responses)
    wanted = select(*columns, revision.label("revision"), given_at.label("given_at"))
    leases = []
    for part in parts(positions):
        for row in connection.execute(wanted.where(tasks.c.position.in_(part)).order_by(tasks.c.position)):
            order = display_order(row.task_id, labeler, len(row.responses))
            shown = ShownTask(row.task_id, messages(row.prompt), tuple(row.responses[index] for index in order))
            leases.append(Lease(shown, labeler, order, expires_at, row.revision, row.handle, row.given_at))
    return leases


def _check_lease(labeler: str, seconds: float) -> None:
    if not labeler:
        raise ValueError("labeler is empty; a name was expected")
    if not seconds > 0:
        raise ValueError(f"seconds is {seconds}; a lease longer than 0 was expected")
