"""Usability studies: each labeler judges tasks with each of several forms, and rates each form afterwards.

A study follows the protocol of Henley & Piorkowski 2024 (arXiv 2403.07762): within subjects, with the time per task,
the perceived load and the usability of each form. Each condition is a batch of the store with a form. Conditions may
share a batch: a labeler never judges a task twice, so each form gets different tasks of it, drawn at random.

Each labeler works through all conditions. The orders are the rows of a Latin square in which each condition directly
follows every other equally often (Williams 1949, Australian Journal of Scientific Research 2(2)), so that practice and
fatigue affect all forms equally. A condition's tasks end after `tasks_per_condition` answers, or when none is left for
the labeler. The questionnaire of `preferences.questionnaire` then ends the condition.

While a study runs, its batches go only to its labelers, and they get no other tasks until they have finished.

All functions run within the caller's transaction; `who` is a labeler's pseudonym.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, RowMapping, func, insert, select, update

from preferences.names import known_pseudonym, name_in, pseudonym_of
from preferences.questionnaire import require_load, require_sus
from preferences.rows import require_text
from preferences.schema import (
    accounts,
    assignments,
    invitations,
    judgments,
    tasks,
    usability_answers,
    usability_batches,
    usability_participants,
    usability_studies,
)

MAX_COMMENT_CHARACTERS = 4_000
_STARTING = 7_243_004  # key of the advisory lock for starting studies; any number that only Heed uses
NO_PREFERENCE, NOT_ASKED = -1, -2


@dataclass(frozen=True)
class Condition:
    """A batch and a form. `form` holds the form's settings; `version` is its instructions' version, as in judgments."""

    name: str
    batch: str
    version: str
    form: Mapping[str, Any]


@dataclass(frozen=True)
class Study:
    """A stored study. Times are in seconds since the epoch; `stopped_at` is 0 while it runs."""

    name: str
    conditions: tuple[Condition, ...]
    tasks_per_condition: int
    practice_tasks: int
    seed: int
    started_at: float = 0.0
    stopped_at: float = 0.0

    def is_part(self, first_at: float) -> bool:
        """Whether a labeler's events on a task belong to the study, given the time of the first one.

        The same form may have been used on its batch before the study, and may be after it.
        """
        return self.started_at <= first_at and (not self.stopped_at or first_at <= self.stopped_at)


@dataclass(frozen=True)
class Participant:
    """A labeler of a study. `conditions` are indices of the study's conditions, in this labeler's order."""

    labeler: str
    conditions: tuple[int, ...]


@dataclass(frozen=True)
class QuestionnaireAnswer:
    """A labeler's answers after one condition.

    `preferred` is the condition that they would rather work with, NO_PREFERENCE, or NOT_ASKED before the last
    condition.
    """

    labeler: str
    condition: int
    load: tuple[int, ...]
    sus: tuple[int, ...]
    preferred: int = NOT_ASKED
    comment: str = ""
    created_at: float = 0.0
    study: str = ""


@dataclass(frozen=True)
class Stage:
    """Where a labeler is in a running study: their order, the place in it, and the answers with the form there."""

    study: Study
    conditions: tuple[int, ...]  # this labeler's order
    place: int  # 0, 1, ...
    num_answered: int
    num_skipped: int

    @property
    def condition(self) -> Condition:
        return self.study.conditions[self.conditions[self.place]]

    @property
    def is_last(self) -> bool:
        return self.place == len(self.conditions) - 1

    @property
    def num_left(self) -> int:
        """The number of answers left before the questionnaire."""
        return max(0, self.study.tasks_per_condition - self.num_answered)

    @property
    def has_begun(self) -> bool:
        """Whether the labeler has seen the form, and so can rate it, even after skipping every task."""
        return self.num_answered + self.num_skipped > 0


def latin_square(num_conditions: int) -> list[tuple[int, ...]]:
    """Returns Williams's orders: n of them for an even number n of conditions, 2n for an odd one.

    Over all of them, each condition is equally often in each place, and equally often directly after each other one.
    """
    first = [0]
    for step in range(1, num_conditions):
        first.append((first[-1] + (step if step % 2 else -step)) % num_conditions)
    rows = [tuple((entry + shift) % num_conditions for entry in first) for shift in range(num_conditions)]
    return rows if num_conditions % 2 == 0 else rows + [row[::-1] for row in rows]


# ---- starting and stopping ----


def start(connection: Connection, study: Study, names: Sequence[str], now: float) -> tuple[Participant, ...]:
    """Stores a study with its labelers, or adds labelers to a running one. Returns the new labelers.

    New labelers are shuffled with the study's seed; each gets the order that the fewest have so far. Repeating a call
    changes nothing.

    Raises: ValueError if a study of this name has other settings or was stopped; and as `_require_people` and
    `_require_tasks`.
    """
    if connection.dialect.name == "postgresql":  # a second `start` at the same time waits; SQLite has one writer anyway
        connection.execute(select(func.pg_advisory_xact_lock(_STARTING)))
    before = find(connection, study.name)
    if before is not None and before.stopped_at:
        raise ValueError(f"study {study.name!r} was stopped; another name was expected")
    if before is not None and _settings(before) != _settings(study):
        raise ValueError(
            f"study {study.name!r} runs with other settings; the same ones, or another name, were expected"
        )
    known = participants(connection, study.name)
    new = [name for name in names if name not in {one.labeler for one in known}]
    _require_people(connection, new)
    _require_tasks(connection, study, len(known) + len(new), is_new=before is None)
    if before is None:
        values = _settings(study) | {"started_at": now, "stopped_at": 0.0}
        connection.execute(insert(usability_studies).values(values))
        batches = dict.fromkeys(one.batch for one in study.conditions)
        connection.execute(insert(usability_batches), [{"batch": one, "study": study.name} for one in batches])
    added = tuple(_with_orders(study, known, new))
    for place, one in enumerate(added, len(known)):
        who = pseudonym_of(connection, one.labeler)
        row = {"study": study.name, "labeler": who, "place": place, "conditions": list(one.conditions)}
        connection.execute(insert(usability_participants).values(row))
    return added


def stop(connection: Connection, name: str, now: float) -> None:
    """Ends a study: its batches go to all labelers again. Raises: ValueError for an unknown study."""
    study = require(connection, name)
    if not study.stopped_at:
        ended = update(usability_studies).where(usability_studies.c.name == name)
        connection.execute(ended.values(stopped_at=now))


def _settings(study: Study) -> dict[str, Any]:
    values = asdict(study) | {"conditions": [asdict(one) for one in study.conditions]}
    return {name: value for name, value in values.items() if name not in ("started_at", "stopped_at")}


def _with_orders(study: Study, known: Sequence[Participant], names: Sequence[str]) -> list[Participant]:
    square = latin_square(len(study.conditions))
    taken = Counter(one.conditions for one in known)
    shuffled = sorted(names)
    random.Random(f"{study.seed} {study.name} {len(known)}").shuffle(shuffled)
    added = []
    for name in shuffled:
        order = min(square, key=lambda row: taken[row])  # the first of those that the fewest have
        taken[order] += 1
        added.append(Participant(name, order))
    return added


def _require_people(connection: Connection, names: Sequence[str]) -> None:
    """Raises: ValueError for somebody who is not a labeler of the store, or is in another running study."""
    roles = {row.name: row.role for row in connection.execute(select(invitations))}
    for row in connection.execute(select(accounts)):
        roles[row.name] = "closed" if row.state == "closed" else row.role
    for name in names:
        if roles.get(name) != "labeler":
            why = {"lead": "is a lead", "closed": "has a closed account"}
            found = why.get(roles.get(name, ""), "has no account and no link")
            raise ValueError(f"labelers: {name!r} {found}; somebody invited to label was expected (heed label invite)")
        other = _running_of(connection, known_pseudonym(connection, name))
        if other is not None:
            raise ValueError(f"labelers: {name!r} is in study {other[0].name!r}, which is running; stop that one first")


def _require_tasks(connection: Connection, study: Study, num_labelers: int, *, is_new: bool) -> None:
    """Raises: ValueError for a batch that is unknown, in another running study, or too small for the labelers."""
    taken = {} if not is_new else {batch: other for other, batch in _running_batches(connection)}
    uses = Counter(one.batch for one in study.conditions)
    for batch, num_conditions in uses.items():
        if batch in taken:
            raise ValueError(
                f"batch {batch!r} is used by study {taken[batch]!r}, which is running; stop that one first"
            )
        here = [assignments.c.batch == batch, ~assignments.c.is_surplus, ~assignments.c.is_archived]
        if is_new:  # later, the study's own answers are among those that are done
            here.append(~assignments.c.is_done)
        counted = select(func.count(func.distinct(assignments.c.task)), func.count()).where(*here)
        num_tasks, num_places = connection.execute(counted).one()
        each = study.tasks_per_condition * num_conditions
        if not num_tasks:
            raise ValueError(f"batch {batch!r} has no open tasks in the store")
        if num_tasks < each:
            raise ValueError(f"batch {batch!r} has {num_tasks} open tasks; {each} for each labeler were expected")
        if num_places < each * num_labelers:
            raise ValueError(
                f"batch {batch!r} wants {num_places} answers; {each * num_labelers} were expected, {each} for each"
                f" of {num_labelers} labelers: let more labelers judge each task, or add tasks"
            )


# ---- reading ----


def find(connection: Connection, name: str) -> Study | None:
    """Returns a study by its name, or None."""
    row = connection.execute(select(usability_studies).where(usability_studies.c.name == name)).mappings().one_or_none()
    return _as_study(row) if row is not None else None


def require(connection: Connection, name: str) -> Study:
    """Like `find`. Raises: ValueError for an unknown study, naming the studies that exist."""
    found = find(connection, name)
    if found is None:
        known = ", ".join(repr(one.name) for one in studies(connection)) or "none"
        raise ValueError(f"study {name!r} is not in the store; it has {known}")
    return found


def studies(connection: Connection) -> list[Study]:
    """Returns all studies, in the order in which they started."""
    rows = connection.execute(select(usability_studies).order_by(usability_studies.c.started_at)).mappings()
    return [_as_study(row) for row in rows]


def participants(connection: Connection, study: str, *, with_names: bool = True) -> tuple[Participant, ...]:
    """Returns a study's labelers in the order in which they were added, by name or pseudonym."""
    table = usability_participants
    labeler = name_in(table.c.labeler) if with_names else table.c.labeler
    wanted = select(labeler.label("name"), table.c.conditions).where(table.c.study == study).order_by(table.c.place)
    return tuple(Participant(row.name, tuple(row.conditions)) for row in connection.execute(wanted))


def answers(
    connection: Connection, study: str = "", *, who: str = "", with_names: bool = True
) -> tuple[QuestionnaireAnswer, ...]:
    """Returns the answers to the questionnaire of a study, a labeler or both, in the order in which they arrived."""
    table = usability_answers
    labeler = name_in(table.c.labeler) if with_names else table.c.labeler
    wanted = select(table, labeler.label("name")).order_by(table.c.answer_id)
    if study:
        wanted = wanted.where(table.c.study == study)
    if who:
        wanted = wanted.where(table.c.labeler == who)
    return tuple(
        QuestionnaireAnswer(
            row.name,
            row.condition,
            tuple(row.load),
            tuple(row.sus),
            row.preferred,
            row.comment,
            row.created_at,
            row.study,
        )
        for row in connection.execute(wanted)
    )


def _as_study(row: RowMapping) -> Study:
    conditions = tuple(Condition(**one) for one in row["conditions"])
    return Study(**{**row, "conditions": conditions})


def _running_of(connection: Connection, who: str) -> tuple[Study, tuple[int, ...]] | None:
    """Returns the running study that a labeler has not finished, and their order of its conditions."""
    table = usability_participants
    own = select(table.c.study, table.c.conditions).join(usability_studies, usability_studies.c.name == table.c.study)
    for row in connection.execute(own.where(table.c.labeler == who, usability_studies.c.stopped_at == 0)):
        given = select(func.count()).where(usability_answers.c.study == row.study, usability_answers.c.labeler == who)
        if (connection.scalar(given) or 0) < len(row.conditions):
            return require(connection, row.study), tuple(row.conditions)
    return None


def _running_batches(connection: Connection) -> list[tuple[str, str]]:
    """Returns (study, batch) of all batches of running studies."""
    named = usability_batches.join(usability_studies)
    wanted = select(usability_batches.c.study, usability_batches.c.batch).select_from(named)
    return [(row.study, row.batch) for row in connection.execute(wanted.where(usability_studies.c.stopped_at == 0))]


# ---- labelers ----


def batches_in_studies(connection: Connection) -> set[str]:
    """Returns the batches of running studies, which go only to the studies' labelers."""
    return {batch for _, batch in _running_batches(connection)}


def stage_of(connection: Connection, name: str) -> Stage | None:
    """Returns where a labeler, given by name, is in a running study; None if in none, or finished."""
    who = known_pseudonym(connection, name)
    found = _running_of(connection, who) if who else None
    if found is None:
        return None
    study, order = found
    place = sum(one.condition in order for one in answers(connection, study.name, who=who))
    condition = study.conditions[order[place]]
    judged = _judged(connection, who, study, condition)
    return Stage(study, order, place, judged["answer"], judged["skip"])


def _judged(connection: Connection, who: str, study: Study, condition: Condition) -> Counter[str]:
    """Counts the tasks that the labeler has judged with the condition's form, by the kind of their last event."""
    events = select(judgments.c.task, judgments.c.kind, judgments.c.instructions_version, judgments.c.created_at)
    own = events.join(tasks).where(judgments.c.labeler == who, tasks.c.batch == condition.batch)
    rows = list(connection.execute(own.order_by(judgments.c.revision)))
    first_at = {row.task: row.created_at for row in reversed(rows)}
    last = {row.task: row for row in rows if study.is_part(first_at[row.task])}
    return Counter(row.kind for row in last.values() if row.instructions_version == condition.version)


def condition_of(connection: Connection, task_id: str, name: str) -> Condition | None:
    """Returns the condition whose form a person gets on a task; None if the task's batch is in no study.

    It is the condition of their last answer to the task, or else the condition that they are in. For leads, and for
    labelers who have finished, it is the first condition on the batch, while the study runs. A labeler who is not in
    the study, and had leased the task before it started, keeps the server's form.
    """
    on_batch = _conditions_on(connection, task_id)
    if not on_batch:
        return None
    who = known_pseudonym(connection, name)
    versions = select(judgments.c.instructions_version).join(tasks)
    mine = versions.where(tasks.c.task_id == task_id, judgments.c.labeler == who, judgments.c.kind == "answer")
    given = list(connection.scalars(mine.order_by(judgments.c.revision)))
    stage = stage_of(connection, name)
    if given:
        return next((one for one, _ in on_batch if one.version == given[-1]), None)
    if stage is not None and stage.condition.batch == on_batch[0][0].batch:
        return stage.condition
    if _is_outsider(connection, who, name):
        return None
    return next((one for one, is_running in on_batch if is_running), None)


def _conditions_on(connection: Connection, task_id: str) -> list[tuple[Condition, bool]]:
    """Returns the conditions on a task's batch, earlier studies first, and whether their study is running."""
    joined = tasks.join(usability_batches, usability_batches.c.batch == tasks.c.batch).join(usability_studies)
    wanted = select(tasks.c.batch, usability_studies.c.conditions, usability_studies.c.stopped_at).select_from(joined)
    rows = connection.execute(wanted.where(tasks.c.task_id == task_id).order_by(usability_studies.c.started_at))
    return [
        (Condition(**one), not row.stopped_at) for row in rows for one in row.conditions if one["batch"] == row.batch
    ]


def _is_outsider(connection: Connection, who: str, name: str) -> bool:
    """Whether somebody is a labeler who takes part in no study."""
    own = select(usability_participants.c.study).where(usability_participants.c.labeler == who).limit(1)
    role = connection.scalar(select(accounts.c.role).where(accounts.c.name == name))
    return role == "labeler" and connection.scalar(own) is None


def store_answer(connection: Connection, name: str, answer: QuestionnaireAnswer, now: float) -> bool:
    """Stores a labeler's answers to the questionnaire that is due. Returns False if they are already stored.

    Raises: ValueError if no questionnaire is due for this condition, and for malformed answers.
    """
    require_load(answer.load)
    require_sus(answer.sus)
    if len(answer.comment) > MAX_COMMENT_CHARACTERS:
        raise ValueError(
            f"comment has {len(answer.comment):,} characters; at most {MAX_COMMENT_CHARACTERS:,} were expected"
        )
    require_text("the questionnaire", "comment", [answer.comment])
    who = known_pseudonym(connection, name)
    own = select(usability_participants.c.study).where(usability_participants.c.labeler == who)
    connection.execute(own.with_for_update())  # a form that is sent twice at once waits here, and is then known
    stage = stage_of(connection, name)
    if stage is None or stage.conditions[stage.place] != answer.condition or not stage.has_begun:
        running = "" if stage is None else stage.study.name
        if any(one.condition == answer.condition for one in answers(connection, running, who=who)):
            return False
        raise ValueError("no questionnaire about this form is due")
    num = len(stage.conditions)
    if answer.preferred not in ((NO_PREFERENCE, *range(num)) if stage.is_last else (NOT_ASKED,)):
        raise ValueError(f"preferred is {answer.preferred}; a form or no preference was expected at the end only")
    values = {
        "study": stage.study.name,
        "labeler": who,
        "condition": answer.condition,
        "load": list(answer.load),
        "sus": list(answer.sus),
        "preferred": answer.preferred,
        "comment": answer.comment,
        "created_at": now,
    }
    connection.execute(insert(usability_answers).values(values))
    return True
