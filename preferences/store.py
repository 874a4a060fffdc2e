"""The label store: tasks go in, labelers lease and answer them, rankings come out.

Guarantees: once a call returns, its event is on disk; nothing is stored twice, changed or deleted; no task gets more
labelers than it wants. Any number of processes may use one store at the same time. Each call is one transaction.
"""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar

from sqlalchemy import Connection, select

from preferences import assignment, leases, questions, recording, results, scripted
from preferences.database import open_engines
from preferences.leases import Lease
from preferences.names import known_pseudonym, num_erased, pseudonym_of
from preferences.questions import Thread, ThreadState
from preferences.recording import Import, ImportRows, stored
from preferences.records import NO_LOCATIONS, Answer, Judgment, Locations, Task
from preferences.results import BatchCounts, PastEvent
from preferences.rows import Values, answer_row, as_task, empty_row, parts, task_row
from preferences.schema import tasks

Parameters = ParamSpec("Parameters")
Found = TypeVar("Found")
UNDO_SECONDS = 3_600.0  # how long a task stays leased to the labeler who undid an answer


def _reading(
    read: Callable[Concatenate[Connection, Parameters], Found],
) -> Callable[Concatenate["LabelStore", Parameters], Found]:
    """Returns a method of the store that calls `read` in a transaction of its own."""

    def method(self: "LabelStore", /, *args: Parameters.args, **named: Parameters.kwargs) -> Found:
        with self.reading() as connection:
            return read(connection, *args, **named)

    method.__doc__ = read.__doc__
    return method


class LabelStore:
    """Tasks, assignments and judgments in SQLite (a path or a `sqlite:///` URL) or PostgreSQL (`postgresql://`).

    `clock` returns seconds since the epoch.
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

    @property
    def url(self) -> str:
        """The database's URL, with its password if it has one."""
        return self._reader.url.render_as_string(hide_password=False)

    def reading(self) -> AbstractContextManager[Connection]:
        """Returns a transaction that reads, for the functions of other modules."""
        return self._reader.begin()

    def writing(self) -> AbstractContextManager[Connection]:
        """Returns a transaction that writes. It ends when the context does; an error in it rolls it back."""
        return self._writer.begin()

    def now(self) -> float:
        """Returns the store's time, in seconds since the epoch."""
        return self._clock()

    # ---- tasks in ----

    def add_tasks(self, new_tasks: Sequence[Task], *, batch: str, num_labelers: int | Sequence[int]) -> None:
        """Adds tasks, each to be judged by `num_labelers` distinct labelers (one number, or one per task).

        Either all tasks are added or none. A task that is already stored with the same content is left alone, so a
        caller that was killed can repeat the call.

        Raises: ValueError, naming the task, if its id is already used for different content, a field is malformed, or
        the task that it repeats is neither stored nor earlier in `new_tasks`.
        """
        quotas = [num_labelers] * len(new_tasks) if isinstance(num_labelers, int) else list(num_labelers)
        if len(quotas) != len(new_tasks):
            raise ValueError(f"num_labelers has {len(quotas)} entries for {len(new_tasks)} tasks")
        wanted = [task_row(task, batch, quota) for task, quota in zip(new_tasks, quotas, strict=True)]
        with self._writer.begin() as connection:
            recording.add_tasks(connection, wanted)

    # ---- leases ----

    def lease(
        self, labeler: str, *, seconds: float, batch: str, is_random: bool = False, tags: Collection[str] = ()
    ) -> Lease | None:
        """Returns the task that `labeler` should judge next, leased for `seconds`, or None if none is open for them.

        A live lease of the labeler is renewed and returned again, with the responses in the same order. With
        `is_random` the next task is drawn at random for this labeler; otherwise tasks come in order of arrival. `tags`
        are the labeler's, for batches and tasks that require some.
        """
        granted = self.lease_many(labeler, 1, seconds=seconds, batch=batch, is_random=is_random, tags=tags)
        return granted[0] if granted else None

    def lease_many(
        self,
        labeler: str,
        num_tasks: int,
        *,
        seconds: float,
        batch: str,
        is_random: bool = False,
        tags: Collection[str] = (),
    ) -> list[Lease]:
        """Returns up to `num_tasks` leases: first the labeler's live ones, then new ones, ordered as in `lease`.

        A task is open for a labeler who has neither judged nor skipped it, as long as fewer labelers than it wants have
        judged it or hold a live lease. A repeat opens once the labeler has judged the task that it repeats. A closed
        batch gives no new leases, and neither do tasks that require tags which the labeler lacks.
        """
        _check_lease(labeler, seconds)
        if num_tasks < 1:
            raise ValueError(f"num_tasks is {num_tasks}; at least 1 was expected")
        with self._writer.begin() as connection:
            now = self._clock()
            leases.lock_labeler(connection, labeler)
            who = pseudonym_of(connection, labeler)
            granted = leases.live(connection, who, now, batch)[:num_tasks]
            leases.renew(connection, granted, now + seconds)
            fits = assignment.fitting(connection, batch, tags) if len(granted) < num_tasks else None
            if fits is not None:
                until = now + seconds
                for position in leases.drawn(connection, who, now, batch, fits) if is_random else ():
                    if len(granted) < num_tasks:
                        granted += leases.lease_open(
                            connection, who, now, until, batch=batch, limit=1, fits=fits, positions=[position]
                        )
                if len(granted) < num_tasks:
                    limit = num_tasks - len(granted)
                    granted += leases.lease_open(connection, who, now, until, batch=batch, limit=limit, fits=fits)
            return results.leases_of(connection, [task for task, _ in granted], labeler, who, now + seconds)

    def lease_these(self, labeler: str, task_ids: Sequence[str], *, seconds: float, batch: str) -> list[Lease]:
        """Leases these tasks of the batch, if open for the labeler or already leased by them, in order of arrival."""
        _check_lease(labeler, seconds)
        with self._writer.begin() as connection:
            now, until = self._clock(), self._clock() + seconds
            leases.lock_labeler(connection, labeler)
            who = pseudonym_of(connection, labeler)
            wanted = {row["position"] for row in stored(connection, task_ids).values()}
            granted = [one for one in leases.live(connection, who, now, batch) if one[0] in wanted]
            leases.renew(connection, granted, until)
            fits = assignment.fitting(connection, batch, ())
            if fits is not None:
                for part in parts(sorted(wanted)):
                    limit = len(part)
                    granted += leases.lease_open(
                        connection, who, now, until, batch=batch, limit=limit, fits=fits, positions=part
                    )
            return results.leases_of(connection, [task for task, _ in granted], labeler, who, until)

    # ---- what labelers do ----

    answer_all = scripted.answer_all

    def submit(self, lease: Lease, answer: Answer, *, client: str, instructions_version: str) -> None:
        """Stores one answer. On return it is on disk. See `submit_many`."""
        self.submit_many([lease], [answer], client=client, instructions_version=instructions_version)

    def submit_many(
        self, granted: Sequence[Lease], answers: Sequence[Answer], *, client: str, instructions_version: str
    ) -> None:
        """Stores one labeler's answers, all or none. Lists in `answers[i]` follow the order shown in `granted[i]`.

        An answer that is already stored (same task, labeler, revision and content) is accepted and not stored again.
        An answer with the next revision replaces the labeler's current one, which stays stored; the assignment is
        theirs throughout, so no other labeler gets the task in between.
        An answer whose lease ran out is still accepted while the task has a free assignment.

        Raises: ValueError for a malformed answer, an unknown task, or an answer that contradicts the labeler's stored
        one; LeaseLostError if the lease ran out and other labelers took the task's assignments.
        """
        if len(granted) != len(answers):
            raise ValueError(f"answers has {len(answers)} entries for {len(granted)} leases")
        for lease in granted[1:]:
            if lease.labeler != granted[0].labeler:
                raise ValueError(
                    f"leases of {granted[0].labeler!r} and {lease.labeler!r} in one call; one labeler was expected"
                )
        # Check everything that needs no database before taking the write lock.
        rows = [answer_row(lease, answer, "answer") for lease, answer in zip(granted, answers, strict=True)]
        if rows:
            self._record(granted[0].labeler, rows, client, instructions_version)

    def skip(self, lease: Lease, reason: str, milliseconds: int, *, client: str, instructions_version: str) -> None:
        """Leaves the task to other labelers, with a reason. Idempotent; raises what `submit_many` raises."""
        rows = [empty_row(lease, "skip", reason, milliseconds)]
        self._record(lease.labeler, rows, client, instructions_version)

    def reveal(self, lease: Lease) -> None:
        """Stores that the labeler has seen the warning and asked to see the task. Time on it counts from now."""
        with self._writer.begin() as connection:
            position = stored(connection, [lease.task_id])[lease.task_id]["position"]
            leases.reveal(connection, pseudonym_of(connection, lease.labeler), position, self._clock())

    def undo(self, lease: Lease, reason: str, *, client: str, act: str = "") -> None:
        """Takes back the labeler's last event on a task and leases the task to them again. The event stays stored.

        `lease` comes from `reopened`. The undo has the instructions' version of the event that it takes back. With
        `act`, the audit log says that the person did this to the task.

        Raises: ValueError if there is nothing to take back; LeaseLostError if other labelers took the skipped task.
        """
        self._record(lease.labeler, [empty_row(lease, "undo", reason, 0)], client, act=act)

    def adjudicate(
        self, lease: Lease, answer: Answer, *, client: str, instructions_version: str, act: str = ""
    ) -> None:
        """Stores a lead's answer, which overrides those of labelers and needs no assignment.

        `lease` comes from `reopened`; `act` is as for `undo`.
        """
        rows = [answer_row(lease, answer, "adjudication")]
        self._record(lease.labeler, rows, client, instructions_version, act)

    def void(self, task_id: str, labeler: str, revision: int, reason: str, *, by: str, client: str) -> None:
        """Takes a labeler's judgment out of everything, on behalf of the lead `by`. The judgment stays stored.

        The void has the instructions' version of the judgment. If the judgment counted toward the task's quota, the
        task is open again, even to the same labeler. The audit log records who voided whose judgment. Idempotent.

        Raises: ValueError for an unknown task or labeler, an empty reason, and a judgment that is not current.
        """
        with self._writer.begin() as connection:
            now, found = self._clock(), stored(connection, [task_id])
            who = known_pseudonym(connection, labeler)
            if task_id not in found or not who:
                field, value = ("labeler", labeler) if task_id in found else ("task_id", task_id)
                raise ValueError(f"{field} {value!r} is not in the store")
            lease = self._shown_to(connection, labeler, found[task_id]["position"])
            row = empty_row(replace(lease, revision=revision + 1), "void", reason, 0)
            shared = {"client": client, "created_at": now}
            if recording.record(connection, [row | shared], labeler, now, now):
                recording.log(connection, by, f"voided the judgment on task {task_id!r} of", who, now)

    def reopened(self, labeler: str, task_id: str) -> Lease:
        """Returns a task as it was, or would be, shown to this labeler, for events that need no live lease.

        Raises: ValueError for an unknown task.
        """
        with self._reader.begin() as connection:
            return self._shown_to(connection, labeler, _stored_task(connection, task_id)["position"])

    def by_handle(self, labeler: str, handle: str) -> Lease:
        """Like `reopened`, but by the task's handle. Raises: ValueError for an unknown handle."""
        with self._reader.begin() as connection:
            position = connection.scalar(select(tasks.c.position).where(tasks.c.handle == handle))
            if position is None:
                raise ValueError("no task in the store has this handle")
            return self._shown_to(connection, labeler, position)

    def with_history(self, labeler: str, handle: str) -> Lease | None:
        """Like `by_handle`, but returns None for a task that is unknown or that the labeler has no event on."""
        with self._reader.begin() as connection:
            position = connection.scalar(select(tasks.c.position).where(tasks.c.handle == handle))
            lease = None if position is None else self._shown_to(connection, labeler, position)
        return lease if lease is not None and lease.revision > 0 else None

    def _shown_to(self, connection: Connection, labeler: str, position: int) -> Lease:
        who = known_pseudonym(connection, labeler)
        return results.leases_of(connection, [position], labeler, who, self._clock())[0]

    def _record(
        self, labeler: str, rows: Sequence[Values], client: str, instructions_version: str = "", act: str = ""
    ) -> None:
        with self._writer.begin() as connection:
            now = self._clock()
            shared = {"client": client, "instructions_version": instructions_version, "created_at": now}
            num_stored = recording.record(connection, [row | shared for row in rows], labeler, now, now + UNDO_SECONDS)
            if act and num_stored:  # not for an event that is sent again
                recording.log(connection, labeler, act, rows[0]["task_id"], now)

    def import_judgments(self, batch: str, judgments: Sequence[Judgment]) -> None:
        """Stores external judgments of the batch's tasks, all or none. Judgments already stored are left alone.

        Raises: ValueError, naming task and labeler, for a task outside the batch, for a judgment that contradicts a
        stored one, and for more labelers than the task wants.
        """
        with self._writer.begin() as connection:
            known = results.task_rows(connection, batch)
            recording.record_external(connection, recording.judgment_rows(batch, judgments, known), self._clock())

    def import_all(
        self, coming: Sequence[Import], *, files: Locations = NO_LOCATIONS, only_check: bool = False
    ) -> None:
        """Stores tasks with external judgments, all in one transaction; see `import_judgments`.

        `files` says which file and line each comes from. `only_check` does the same and rolls back, so it refuses
        exactly what an import would refuse.

        Raises: ValueError, naming file and line, for rows that contradict the store or are malformed.
        """
        rows = [ImportRows.of(one, files) for one in coming]  # check what needs no database before the write lock
        with self._writer.connect() as connection, connection.begin() as transaction:
            recording.store_rows(connection, rows, files, self._clock())
            if only_check:
                transaction.rollback()

    # ---- questions to the leads ----

    def write_message(self, task_id: str, labeler: str, author: str, kind: ThreadState, text: str) -> None:
        """Appends a message to the labeler's thread on a task; see `preferences.questions`. Idempotent.

        Raises: ValueError for an unknown task or labeler, and what `questions.write` raises.
        """
        with self._writer.begin() as connection:
            found = stored(connection, [task_id])
            who = pseudonym_of(connection, labeler) if author == labeler else known_pseudonym(connection, labeler)
            if task_id not in found or not who:
                raise ValueError("this task has no question of this labeler")
            writer = pseudonym_of(connection, author)
            questions.write(connection, found[task_id]["position"], who, writer, kind, text, self._clock())

    def threads(self, *, labeler: str = "", task_id: str = "") -> list[Thread]:
        """Returns the threads of one labeler ("" = of all), or on one task; those with the newest message first."""
        with self._reader.begin() as connection:
            who = known_pseudonym(connection, labeler) if labeler else ""
            return questions.threads(connection, who=who, task_id=task_id) if who or not labeler else []

    def num_waiting(self, labeler: str = "") -> int:
        """Counts questions that wait for a reply, or a labeler's threads with a reply that they have not resolved."""
        with self._reader.begin() as connection:
            if not labeler:
                return questions.num_waiting(connection, "question")
            who = known_pseudonym(connection, labeler)
            return questions.num_waiting(connection, "reply", who=who) if who else 0

    # ---- results out ----

    batches = _reading(results.batches)
    labelers = _reading(results.labelers_with_events)
    tasks = _reading(results.stored_tasks)
    judgments = _reading(results.judgments_of)
    rankings = _reading(results.rankings)
    events_on = _reading(results.events_on)
    shown_prompts = _reading(results.shown_prompts)
    coverage = _reading(results.coverage)
    progress = _reading(results.progress)
    content_hash = _reading(results.content_hash)
    num_erased = _reading(num_erased)

    def single_response_batches(self) -> list[str]:
        """Returns the batches whose tasks have one response each, in order of arrival."""
        with self._reader.begin() as connection:
            return results.batches_of_single_responses(connection, results.batches(connection))

    def task(self, task_id: str) -> Task:
        """Returns one task. Raises: ValueError for an unknown id."""
        with self._reader.begin() as connection:
            return as_task(_stored_task(connection, task_id))

    def history(self, labeler: str, limit: int) -> list[PastEvent]:
        """Returns the labeler's last events, newest first."""
        with self._reader.begin() as connection:
            return results.history(connection, known_pseudonym(connection, labeler), limit)

    def num_current_answers(self, labeler: str) -> int:
        """Counts the labeler's current answers, without adjudications."""
        with self._reader.begin() as connection:
            return results.num_current_answers(connection, known_pseudonym(connection, labeler))

    def num_left(self, labeler: str, batch: str, *, limit: int, tags: Collection[str] = ()) -> int:
        """Counts the batch's tasks that are leased by the labeler or open for them, up to `limit`."""
        with self._reader.begin() as connection:
            who, fits = known_pseudonym(connection, labeler), assignment.fitting(connection, batch, tags)
            return leases.num_left(connection, who, self._clock(), batch, limit, fits)

    def batch_counts(self) -> list[BatchCounts]:
        """Returns each batch's progress and how much of it each labeler did, in order of arrival."""
        with self._reader.begin() as connection:
            return results.batch_counts(connection, self._clock())


def _stored_task(connection: Connection, task_id: str) -> Values:
    """Returns the row of a task. Raises: ValueError for an unknown id."""
    found = stored(connection, [task_id])
    if task_id not in found:
        raise ValueError(f"task {task_id!r}: task_id is not in the store")
    return found[task_id]


def _check_lease(labeler: str, seconds: float) -> None:
    if not labeler:
        raise ValueError("labeler is empty; a name was expected")
    if not seconds > 0:
        raise ValueError(f"seconds is {seconds}; a lease longer than 0 was expected")
