"""Reading from the label store: SQL over all tables, within the caller's transaction."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, Subquery, and_, case, func, or_, select

from preferences.assignment import IS_WANTED
from preferences.leases import Lease, display_order
from preferences.names import name_in
from preferences.rankings import current_judgments, ranking_of, why_excluded
from preferences.records import Coverage, Judgment, Message, Progress, Ranking, ShownTask, StoredTask
from preferences.rows import Values, as_judgment, as_task, messages, parts
from preferences.schema import assignments, judgments, labelers, tasks


@dataclass(frozen=True)
class PastEvent:
    """An event of a labeler, with what they may know about its task: the handle, the prompt and the warning."""

    judgment: Judgment
    handle: str
    prompt: tuple[Message, ...]
    warning: str


@dataclass(frozen=True)
class BatchCounts:
    """A batch's progress over all assignments, and how many each labeler has finished."""

    name: str
    num_tasks: int
    num_open: int  # tasks with fewer judgments than wanted
    num_wanted: int  # judgments
    num_judgments: int
    num_leased: int  # assignments with a live lease
    by_labeler: dict[str, int]


def batches(connection: Connection) -> list[str]:
    """Returns names in order of arrival. Every page calls it, so it walks the index by name instead of all tasks."""
    first: dict[str, int] = {}
    name = connection.scalar(select(func.min(tasks.c.batch)))
    while name is not None:
        first[name] = connection.scalar(select(func.min(tasks.c.position)).where(tasks.c.batch == name)) or 0
        name = connection.scalar(select(func.min(tasks.c.batch)).where(tasks.c.batch > name))
    return sorted(first, key=first.__getitem__)


def batches_of_single_responses(connection: Connection, names: Iterable[str]) -> list[str]:
    """Returns the batches among `names` whose tasks have a single response. A batch never mixes both kinds."""
    first = select(tasks.c.responses).limit(1)
    found = {name: connection.scalar(first.where(tasks.c.batch == name)) for name in names}
    return [name for name, responses in found.items() if responses is not None and len(responses) == 1]


def labelers_with_events(connection: Connection) -> list[str]:
    """Returns the names of all who have judged or skipped something, sorted."""
    said = select(judgments.c.judgment_id).where(judgments.c.labeler == labelers.c.pseudonym).correlate(labelers)
    name = func.coalesce(labelers.c.name, labelers.c.pseudonym)
    return sorted(connection.scalars(select(name).where(said.exists())))


def task_rows(connection: Connection, batch: str) -> dict[str, Values]:
    """Returns the batch's task rows by id, in order of arrival."""
    statement = select(tasks).where(tasks.c.batch == batch).order_by(tasks.c.position)
    return {row["task_id"]: dict(row) for row in connection.execute(statement).mappings()}


def stored_tasks(connection: Connection, batch: str) -> list[StoredTask]:
    """Returns the batch's tasks, in order of arrival."""
    wanted = _wanted(connection, batch)
    return [
        StoredTask(as_task(row), batch, wanted[row["position"]], row["handle"])
        for row in task_rows(connection, batch).values()
    ]


def _wanted(connection: Connection, batch: str, *, in_archive: bool = True) -> dict[int, int]:
    """Returns how many labelers each task of the batch wants by now, or has had if those are more.

    Without `in_archive`, archived tasks want no more than they have had.
    """
    is_wanted = IS_WANTED if in_archive else or_(assignments.c.is_done, and_(IS_WANTED, ~assignments.c.is_archived))
    counted = select(assignments.c.task, func.sum(case((is_wanted, 1), else_=0)))
    found = connection.execute(counted.where(assignments.c.batch == batch).group_by(assignments.c.task))
    return {row[0]: row[1] for row in found}


def judgments_of(connection: Connection, batch: str, *, with_names: bool = True) -> list[Judgment]:
    """Returns every event on the batch's tasks, in the order in which they were stored.

    Without names, labelers appear under their pseudonyms, which an erasure does not change. Use pseudonyms for anything
    that is written to other files.
    """
    statement = select_events(with_names=with_names).where(tasks.c.batch == batch).order_by(judgments.c.judgment_id)
    return as_judgments(connection.execute(statement).mappings())


def events_on(connection: Connection, task_id: str) -> list[Judgment]:
    """Returns every event on a task, in the order in which they were stored."""
    statement = select_events().where(tasks.c.task_id == task_id).order_by(judgments.c.judgment_id)
    return as_judgments(connection.execute(statement).mappings())


def events_of(connection: Connection, who: str) -> list[tuple[str, Judgment]]:
    """Returns every event of a labeler, given by their pseudonym, with its batch, in the order of storing."""
    statement = select_events(tasks.c.batch).where(judgments.c.labeler == who).order_by(judgments.c.judgment_id)
    return [(row["batch"], as_judgment(dict(row))) for row in connection.execute(statement).mappings()]


def shown_prompts(connection: Connection, task_ids: Sequence[str]) -> dict[str, tuple[tuple[Message, ...], str]]:
    """Returns the prompt and the content warning of each of these tasks that is stored."""
    wanted, found = select(tasks.c.task_id, tasks.c.prompt, tasks.c.warning), {}
    for part in parts(list(dict.fromkeys(task_ids))):
        for row in connection.execute(wanted.where(tasks.c.task_id.in_(part))):
            found[row.task_id] = (messages(row.prompt), row.warning)
    return found


def history(connection: Connection, who: str, limit: int) -> list[PastEvent]:
    """Returns the last events of a labeler, given by their pseudonym, newest first."""
    statement = select_events(tasks.c.handle, tasks.c.prompt, tasks.c.warning).where(judgments.c.labeler == who)
    rows = connection.execute(statement.order_by(judgments.c.judgment_id.desc()).limit(limit)).mappings()
    return [PastEvent(as_judgment(dict(row)), row["handle"], messages(row["prompt"]), row["warning"]) for row in rows]


def num_current_answers(connection: Connection, who: str) -> int:
    """Counts the current answers of a labeler, given by their pseudonym."""
    done = select(func.count()).where(assignments.c.labeler == who, assignments.c.is_done)
    return connection.scalar(done) or 0


def leases_of(
    connection: Connection, positions: Sequence[int], labeler: str, who: str, expires_at: float
) -> list[Lease]:
    """Returns the tasks at these positions as they are shown to this labeler, in order of arrival.

    `who` is the labeler's pseudonym, or "" if they have none yet.
    """
    num_events = select(func.count()).where(judgments.c.task == tasks.c.position, judgments.c.labeler == who)
    revision = num_events.correlate(tasks).scalar_subquery()
    own = select(func.max(assignments.c.given_at)).where(
        assignments.c.task == tasks.c.position, assignments.c.labeler == who
    )
    given_at = func.coalesce(own.where(~assignments.c.is_done).correlate(tasks).scalar_subquery(), 0.0)
    is_revealed = own.where(assignments.c.is_revealed).correlate(tasks).scalar_subquery().is_not(None)
    is_done = own.where(assignments.c.is_done).correlate(tasks).scalar_subquery().is_not(None)
    columns = (tasks.c.task_id, tasks.c.handle, tasks.c.prompt, tasks.c.responses, tasks.c.warning)
    state = (is_revealed.label("is_revealed"), is_done.label("is_done"))
    lease = (revision.label("revision"), given_at.label("given_at"), *state)
    wanted = select(*columns, *lease)
    found = []
    for part in parts(positions):
        for row in connection.execute(wanted.where(tasks.c.position.in_(part)).order_by(tasks.c.position)):
            order = display_order(row.task_id, labeler, len(row.responses))
            responses = tuple(row.responses[index] for index in order)
            shown = ShownTask(row.task_id, messages(row.prompt), responses, row.warning)
            found.append(
                Lease(
                    shown,
                    labeler,
                    order,
                    expires_at,
                    row.revision,
                    row.handle,
                    row.given_at,
                    row.is_revealed,
                    row.is_done,
                )
            )
    return found


def rankings(connection: Connection, batch: str) -> list[Ranking]:
    """Returns the training data: each labeler's current answer, or only the adjudication of an adjudicated task.

    They are in the tasks' order of arrival, then by labeler name. Leaves out gold tasks and hidden repeats, which
    measure labelers.
    """
    final: dict[str, list[Judgment]] = {}
    for judgment in current_judgments(judgments_of(connection, batch)).final:
        final.setdefault(judgment.task_id, []).append(judgment)
    return [
        ranking_of(stored.task, judgment)
        for stored in stored_tasks(connection, batch)
        if not why_excluded(stored.task)
        for judgment in sorted(final.get(stored.task.task_id, []), key=lambda judgment: judgment.labeler)
    ]


def coverage(connection: Connection, batch: str) -> list[Coverage]:
    """Returns who has judged each task of the batch, in order of arrival. Archived tasks want nobody else."""
    done = and_(assignments.c.task == tasks.c.position, assignments.c.is_done)
    wanted = _wanted(connection, batch, in_archive=False)
    statement = (
        select(tasks.c.task_id, tasks.c.position, name_in(assignments.c.labeler))
        .outerjoin(assignments, done)
        .where(tasks.c.batch == batch)
        .order_by(tasks.c.position)
    )
    quotas: dict[str, int] = {}
    judged_by: dict[str, list[str]] = {}
    for task_id, position, labeler in connection.execute(statement):
        quotas[task_id] = wanted[position]
        judged_by.setdefault(task_id, []).extend([] if labeler is None else [labeler])
    return [Coverage(task_id, quota, tuple(sorted(judged_by[task_id]))) for task_id, quota in quotas.items()]


def progress(connection: Connection, batch: str) -> Progress:
    """Counts one batch's tasks and judgments; all counts are 0 for a batch without tasks."""
    by_task = _by_task(batch)
    num_open = func.sum(case((by_task.c.done < by_task.c.wanted, 1), else_=0))
    sums = [func.coalesce(column, 0) for column in (num_open, func.sum(by_task.c.done))]
    num_tasks, num_open, num_judgments = connection.execute(select(func.count(by_task.c.task), *sums)).one()
    return Progress(num_tasks=num_tasks, num_judgments=num_judgments, num_open=num_open)


def batch_counts(connection: Connection, now: float) -> list[BatchCounts]:
    """Returns counts for each batch, in order of arrival. It reads only indexes, so it is quick.

    A wanted assignment is done, or it is neither done nor surplus; so a task is open if one of the latter is left.
    """
    batch, task = assignments.c.batch, assignments.c.task
    is_offered = and_(~assignments.c.is_done, ~assignments.c.is_surplus, ~assignments.c.is_archived)
    offered = select(batch, func.count(), func.count(task.distinct())).where(is_offered)
    missing = {name: (number, num_open) for name, number, num_open in connection.execute(offered.group_by(batch))}
    put_away = select(batch, func.count(task.distinct()), func.sum(case((assignments.c.is_done, 1), else_=0)))
    archived = {
        name: (number, num_done)
        for name, number, num_done in connection.execute(put_away.where(assignments.c.is_archived).group_by(batch))
    }
    counted = select(tasks.c.batch, func.count().label("number")).group_by(tasks.c.batch)
    num_tasks = {row.batch: row.number for row in connection.execute(counted)}
    leased = _num_leased(connection, now)
    by_labeler = _num_done(connection)
    found = []
    for name in batches(connection):
        num_archived, num_done_archived = archived.get(name, (0, 0))
        num_missing, num_open = missing.get(name, (0, 0))
        own = by_labeler.get(name, {})
        num_done = sum(own.values()) - num_done_archived
        num_kept = num_tasks[name] - num_archived
        numbers = (num_kept, num_open, num_done + num_missing, num_done, leased.get(name, 0))
        found.append(BatchCounts(name, *numbers, by_labeler=dict(sorted(own.items()))))
    return found


def _num_leased(connection: Connection, now: float) -> dict[str, int]:
    """Counts each batch's live leases."""
    is_held = and_(~assignments.c.is_done, assignments.c.labeler.is_not(None))
    live = and_(is_held, assignments.c.expires_at > now, ~assignments.c.is_archived)
    counted = select(assignments.c.batch, func.count().label("number")).where(live).group_by(assignments.c.batch)
    return {row.batch: row.number for row in connection.execute(counted)}


def _num_done(connection: Connection) -> dict[str, dict[str, int]]:
    """Counts the assignments that each labeler has finished, by batch and name."""
    done = select(assignments.c.batch, assignments.c.labeler, func.count().label("number"))
    counted = done.where(assignments.c.is_done).group_by(assignments.c.batch, assignments.c.labeler).subquery()
    found: dict[str, dict[str, int]] = {}
    for batch, labeler, number in connection.execute(
        select(counted.c.batch, name_in(counted.c.labeler), counted.c.number)
    ):
        found.setdefault(batch, {})[labeler] = number
    return found


def _by_task(batch: str) -> Subquery:
    """Counts the assignments of each of the batch's tasks: done and wanted. Leaves archived tasks out."""
    columns = (
        assignments.c.task,
        func.sum(case((assignments.c.is_done, 1), else_=0)).label("done"),
        func.sum(case((IS_WANTED, 1), else_=0)).label("wanted"),
    )
    own = select(*columns).where(assignments.c.batch == batch, ~assignments.c.is_archived)
    return own.group_by(assignments.c.task).subquery()


def content_hash(connection: Connection, batch: str) -> str:
    """Returns a SHA-256 over what was judged and how, sorted by (task_id, labeler), for the lineage.

    It covers each judged task's prompt, responses, sources and objective, and each current judgment's ranks, ratings,
    flags, note, order shown, labeler, instructions version and annotations. It leaves out creation times, milliseconds,
    client, order of arrival, and undone judgments. An erasure changes it, because it covers names and notes.
    """
    current = current_judgments(judgments_of(connection, batch))
    known = task_rows(connection, batch)
    digest = hashlib.sha256()
    for one in sorted((*current.answers, *current.adjudications), key=lambda one: (one.task_id, one.labeler)):
        task = known[one.task_id]
        what = [task[name] for name in ("task_id", "prompt", "responses", "sources", "objective")]
        how = [one.labeler, one.kind, one.ranks, one.ratings, one.flags, one.note, one.shown_order]
        more = [one.annotations.as_dict()] if one.annotations else []  # without any, hashes stay as they were
        digest.update(json.dumps([*what, *how, one.instructions_version, *more]).encode() + b"\n")
    return digest.hexdigest()


def select_events(*more: ColumnElement[Any], with_names: bool = True) -> Select[Any]:
    own = [column for column in judgments.c if column is not judgments.c.labeler]
    labeler = name_in(judgments.c.labeler) if with_names else judgments.c.labeler
    columns = (tasks.c.task_id, labeler.label("labeler"), *own, *more)
    return select(*columns).join(tasks, judgments.c.task == tasks.c.position)


def as_judgments(rows: Iterable[RowMapping]) -> list[Judgment]:
    return [as_judgment(dict(row)) for row in rows]
