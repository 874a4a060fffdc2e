"""Converts rows to tasks and judgments, and judgments to final rankings and pairs of responses.

Rows about the same task and labeler are merged. Pairs are for formats with two responses per row.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from files.fields import shown
from files.rows import InvalidRows
from preferences.formats.parts import UNKNOWN, Format, JudgedTask, Report, Row, Vote
from preferences.rankings import current_judgments, ranking_of, why_excluded
from preferences.records import MAX_LABELERS, NO_LOCATIONS, Judgment, Ranking, StoredTask, Task, named

UNFORESEEN = "not readable as"  # in the message about an error that a format's reader does not handle


# ---- merging rows ----


@dataclass
class Found:
    """The result of an import: tasks in order of appearance, their judgments, and a report.

    `batches` has the batch that each task's row names ("" = none), and `quotas` the number of labelers each task wants.
    `locations` has the file and line of each judgment by (task id, labeler, revision), and of each task by (task id,
    "", 0). `by_labeler` has judgments in order, by task id and labeler. `invalid` has the rows that were refused or
    skipped.
    """

    report: Report
    invalid: InvalidRows
    tasks: dict[str, Task] = field(default_factory=dict)
    batches: dict[str, str] = field(default_factory=dict)
    quotas: dict[str, int] = field(default_factory=dict)
    by_labeler: dict[str, dict[str, list[Judgment]]] = field(default_factory=dict)
    locations: dict[tuple[str, str, int], str] = field(default_factory=dict)

    @property
    def places(self) -> dict[str, str]:
        """File and line of each task, by its id."""
        return {task_id: self.locations[task_id, "", 0] for task_id in self.tasks}

    @property
    def judgments(self) -> list[Judgment]:
        return [judgment for task in self.by_labeler.values() for own in task.values() for judgment in own]

    @property
    def rankings(self) -> list[Ranking]:
        """The final rankings that are training data. `report_excluded` reports the others."""
        return [ranking for _, ranking in final_rankings(self.tasks.values(), self.judgments, Report())]


def collect(
    form: Format,
    rows: Iterable[tuple[str, Row]],
    *,
    strict: bool = False,
    objective: str = "",
    invalid: InvalidRows | None = None,
) -> Iterator[Found]:
    """Reads rows into tasks and judgments. Yields the same growing result before the first and after every row.

    A labeler's judgment that appears in two rows counts once. A different judgment by a named labeler is a revision; a
    different judgment by an unknown labeler is attributed to another unknown labeler. `invalid` counts rows that are
    malformed or contradict an earlier one, and these rows are dropped; without `invalid` the first one is an error.

    Raises: ValueError naming file, line and field; in a strict import, for the first warning.
    """
    found = Found(Report(strict=strict), invalid or InvalidRows(""))
    yield found
    for where, row in rows:
        found.report.num_rows += 1
        found.invalid.num_rows += 1
        num_before = len(found.report.warnings)
        try:
            judged = _read(form, where, row, found.report, objective)
            for one in judged:
                _refuse_contradiction(found, one)
        except ValueError as error:  # a mistake in the file, with its line
            if invalid is None:
                raise
            invalid.add(error)
            del found.report.warnings[num_before:]
            if invalid.has_counted_enough:
                break
            continue
        for one in judged:
            _merge(found, one, form.name)
        is_reported = len(found.report.warnings) > num_before
        assert judged or is_reported, f"{where}: the row gave neither a task nor a warning"
        yield found
    found.invalid.finish()


def collect_all(form: Format, rows: Iterable[tuple[str, Row]], invalid: InvalidRows | None = None) -> Found:
    """Runs `collect` to the end."""
    return deque(collect(form, rows, invalid=invalid), maxlen=1).pop()


def _read(form: Format, where: str, row: Row, report: Report, objective: str) -> list[JudgedTask]:
    """Reads one row. Readers refuse malformed rows; their unexpected errors are raised with the row's location too.

    Raises: ValueError naming file and line.
    """
    assert form.read is not None, f"{form.name} is not read"
    try:
        return list(form.read(where, row, report, objective))
    except Exception as error:  # a bug in a reader must not hide which row caused it
        if isinstance(error, ValueError) and str(error).startswith(where):
            raise
        raise ValueError(f"{where}: {UNFORESEEN} {form.name}: {type(error).__name__}: {error}") from error


def _merge(found: Found, judged: JudgedTask, name: str) -> None:
    task, task_id = judged.task, judged.task.task_id
    is_known = task_id in found.tasks
    if is_known:
        _refuse_contradiction(found, judged)  # check again: another task of the same row may contradict this one
        _report_differences(found, judged, found.locations[task_id, "", 0])
    else:
        found.tasks[task_id], found.batches[task_id] = task, judged.batch
        found.locations[task_id, "", 0] = judged.where
    by_labeler = found.by_labeler.setdefault(task_id, {})
    for vote in judged.votes:
        judgment = _add_vote(by_labeler, task_id, vote, name, judged.where, found.report)
        found.locations.setdefault((task_id, judgment.labeler, judgment.revision), judged.where)
    for judgment in judged.judgments:
        _add_judgment(by_labeler.setdefault(judgment.labeler, []), judgment, judged.where, found.report)
        found.locations.setdefault((task_id, judgment.labeler, judgment.revision), judged.where)
    if is_known and not judged.votes and not judged.judgments:
        found.report.add("row seen twice", judged.where, "an earlier row has the task; nobody judged it", "left out")
    if len(by_labeler) > MAX_LABELERS:
        raise ValueError(
            f"{judged.where}: {named(NO_LOCATIONS, task_id)}: judged by more than {MAX_LABELERS:,} labelers"
        )
    found.quotas[task_id] = judged.num_labelers or max(len(by_labeler), 1)


def _refuse_contradiction(found: Found, judged: JudgedTask) -> None:
    """Raises: ValueError if the row contradicts an earlier one, or itself."""
    task_id = judged.task.task_id
    if task_id in found.tasks:
        _refuse_other_task(found, judged, found.locations[task_id, "", 0])
    by_labeler = found.by_labeler.get(task_id, {})
    known = {
        (judgment.labeler, judgment.revision): judgment
        for labeler in {judgment.labeler for judgment in judged.judgments}
        for judgment in by_labeler.get(labeler, ())
    }
    for judgment in judged.judgments:
        if known.setdefault((judgment.labeler, judgment.revision), judgment) != judgment:
            where = f"{judged.where}: {named(NO_LOCATIONS, task_id, judgment.labeler)}"
            raise ValueError(
                f"{where}: revision {judgment.revision} appears twice with different content; one judgment per revision"
                " was expected"
            )


def _refuse_other_task(found: Found, judged: JudgedTask, first: str) -> None:
    """Raises: ValueError if two rows give one id to different prompts or responses, or contradict each other."""
    known, task = found.tasks[judged.task.task_id], judged.task
    where = named(NO_LOCATIONS, task.task_id)
    now = {"batch": judged.batch, "num_labelers": judged.num_labelers or found.quotas[task.task_id]}
    before = {"batch": found.batches[task.task_id], "num_labelers": found.quotas[task.task_id]}
    for name in ("gold_ranks", "repeat_of"):
        now[name], before[name] = getattr(task, name), getattr(known, name)
    for name, value in now.items():
        if value != before[name]:
            raise ValueError(f"{judged.where}: {where}: {name} is {shown(value)}, but {shown(before[name])} in {first}")
    for name in ("prompt", "responses"):
        if getattr(known, name) != getattr(task, name):
            raise ValueError(
                f"{judged.where}: {where}: field {name!r} differs from that in {first}; all rankings of a task must"
                " have the same prompt and responses"
            )
    if known.objective != task.objective:
        raise ValueError(
            f"{judged.where}: {where}: objective {shown(task.objective)} differs from {shown(known.objective)}"
            f" in {first}; a task judged by another objective needs an id of its own"
        )


def _report_differences(found: Found, judged: JudgedTask, first: str) -> None:
    known, task = found.tasks[judged.task.task_id], judged.task
    others = [name for name in ("sources", "details", "warning") if getattr(known, name) != getattr(task, name)]
    if others:
        found.report.add(
            "task described differently", judged.where, f"{', '.join(others)} differ from {first}", "kept as there"
        )


def _add_vote(
    by_labeler: dict[str, list[Judgment]], task_id: str, vote: Vote, name: str, where: str, report: Report
) -> Judgment:
    """Adds a vote as a judgment and returns it, or returns the labeler's earlier judgment if it is the same."""
    labeler = vote.labeler
    if labeler == UNKNOWN:  # nothing says that it was the same person who judged differently
        number = 1
        while labeler in by_labeler and not _same(by_labeler[labeler], vote):
            number += 1
            labeler = f"{UNKNOWN} {number}"
    own = by_labeler.setdefault(labeler, [])
    if same := _same(own, vote):
        report.add("row seen twice", where, f"{labeler} gave this task the same judgment before", "counted once")
        return same
    if labeler != vote.labeler:
        report.add("judged differently", where, "an unknown labeler judged this task before", f"kept as {labeler!r}")
    elif own:
        report.add("judged again", where, f"{labeler} judged this task before", "kept as a revision; the last counts")
    own.append(
        Judgment(
            task_id=task_id,
            labeler=labeler,
            revision=len(own),
            kind="answer",
            ranks=vote.ranks,
            ratings=vote.ratings,
            flags=vote.flags,
            note=vote.note,
            shown_order=vote.shown_order,
            instructions_version="",
            milliseconds=0,
            client=f"import {name}",
            created_at=vote.created_at,
        )
    )
    return own[-1]


def _same(own: Sequence[Judgment], vote: Vote) -> Judgment | None:
    content = (vote.ranks, vote.ratings, vote.flags, vote.note, vote.created_at)
    return next((one for one in own if (one.ranks, one.ratings, one.flags, one.note, one.created_at) == content), None)


def _add_judgment(own: list[Judgment], judgment: Judgment, where: str, report: Report) -> None:
    if judgment in own:
        report.add("row seen twice", where, f"revision {judgment.revision} of {judgment.labeler}", "counted once")
    else:
        own.append(judgment)


# ---- final rankings ----


def final_rankings(
    tasks: Iterable[Task], judgments: Iterable[Judgment], report: Report
) -> Iterator[tuple[Task, Ranking]]:
    """Yields the final rankings that are training data, in the order of the tasks.

    It reports judgments that are not final and those that are excluded (`preferences.rankings.why_excluded`).
    """
    current = current_judgments(judgments)
    for judgment in current.replaced:
        _report_not_final(report, judgment, "superseded", "was revised")
    for judgment in (*current.skips, *current.undos, *current.voids):
        _report_not_final(report, judgment, judgment.kind, judgment.note)
    final: dict[str, list[Judgment]] = {}
    for judgment in current.final:
        final.setdefault(judgment.task_id, []).append(judgment)
    for judgment in current.answers:
        if judgment not in final[judgment.task_id]:
            _report_not_final(report, judgment, "superseded", "the task was adjudicated")
    for task in tasks:
        why = why_excluded(task)
        for judgment in final.get(task.task_id, []):
            if why:
                _report_excluded(report, judgment, why)
            else:
                yield task, ranking_of(task, judgment)


def report_excluded(found: Found) -> None:
    """Reports the judgments of an import that training leaves out because they measure labelers."""
    reasons = {task_id: why_excluded(task) for task_id, task in found.tasks.items()}
    for judgment in current_judgments(found.judgments).final:
        if reasons[judgment.task_id]:
            _report_excluded(found.report, judgment, reasons[judgment.task_id])


def _report_excluded(report: Report, judgment: Judgment, why: str) -> None:
    where = f"task {judgment.task_id!r}, labeler {judgment.labeler!r}"
    report.add(why, where, "it measures labelers and is not training data", "left out")


def _report_not_final(report: Report, judgment: Judgment, kind: str, why: str) -> None:
    where = f"task {judgment.task_id!r}, labeler {judgment.labeler!r}"
    found = f"{judgment.kind} {judgment.revision}: {why or 'no reason given'}"
    report.add(kind, where, found, "it gives no ranking")


# ---- pairs of final rankings ----


@dataclass(frozen=True)
class Pair:
    """Two responses of a ranking, by canonical index, the better one first unless they are tied."""

    task: Task
    ranking: Ranking
    first: int
    second: int

    @property
    def where(self) -> str:
        return f"task {self.task.task_id!r}, labeler {self.ranking.labeler!r}"

    @property
    def is_tie(self) -> bool:
        return self.ranking.ranks[self.first] == self.ranking.ranks[self.second]

    @property
    def better(self) -> str:
        return self.task.responses[self.first]

    @property
    def worse(self) -> str:
        return self.task.responses[self.second]


def all_pairs(stored: Sequence[StoredTask], judgments: Sequence[Judgment], report: Report) -> Iterator[Pair]:
    """Yields every pair of every final ranking, ties in canonical order."""
    for task, ranking in final_rankings([one.task for one in stored], judgments, report):
        for first, second in combinations(range(len(task.responses)), 2):
            swapped = ranking.ranks[first] > ranking.ranks[second]
            yield Pair(task, ranking, *((second, first) if swapped else (first, second)))


def untied_pairs(stored: Sequence[StoredTask], judgments: Sequence[Judgment], report: Report) -> Iterator[Pair]:
    """Yields every pair with a better response. Reports ties."""
    for pair in all_pairs(stored, judgments, report):
        if pair.is_tie:
            report.add("tie", pair.where, f"responses {pair.first + 1} and {pair.second + 1} are tied", "left out")
        else:
            yield pair


def single_turn(pair: Pair, report: Report) -> str:
    """Returns the text of a prompt with a single user turn, or "" and a warning for any other prompt."""
    if len(pair.task.prompt) == 1 and pair.task.prompt[0].role == "user":
        return pair.task.prompt[0].content
    roles = ", ".join(message.role for message in pair.task.prompt)
    report.add("prompt of several turns", pair.where, f"the prompt's turns are {roles}", "left out")
    return ""
