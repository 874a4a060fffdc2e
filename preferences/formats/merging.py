"""Rows that speak of one task and one labeler come together; out of judgments come the rankings that stand."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from preferences.current import current_judgments, ranking_of, why_excluded
from preferences.formats.parts import UNKNOWN, Format, Judged, Report, Row, Vote
from preferences.records import MAX_LABELERS, Judgment, Ranking, Task
from preferences.rows import NO_LOCATIONS, named
from reading.fields import shown

UNFORESEEN = "not readable as"  # what the reader of a format ran into without foreseeing it


@dataclass
class Found:
    """What an import found: tasks in order of appearance, their judgments, and what is to be told.

    `batches` are the batches that rows name themselves ("" = none), `quotas` how many labelers each task is for,
    `places` file and line of each judgment, by task, labeler and revision; of a task itself under ("task", "", 0).
    """

    report: Report
    tasks: dict[str, Task] = field(default_factory=dict)
    batches: dict[str, str] = field(default_factory=dict)
    quotas: dict[str, int] = field(default_factory=dict)
    acts: dict[str, dict[str, list[Judgment]]] = field(default_factory=dict)  # task id -> labeler -> acts in order
    locations: dict[tuple[str, str, int], str] = field(default_factory=dict)

    @property
    def judgments(self) -> list[Judgment]:
        return [act for by_labeler in self.acts.values() for acts in by_labeler.values() for act in acts]

    @property
    def rankings(self) -> list[Ranking]:
        """Those that stand and are training data; `report_excluded` counts the others."""
        return [ranking for _, ranking in final_rankings(self.tasks.values(), self.judgments, Report())]


def collect(
    form: Format, rows: Iterable[tuple[str, Row]], *, strict: bool = False, objective: str = ""
) -> Iterator[Found]:
    """Read rows into tasks and judgments, yielding the same, growing result before the first and after every row.

    The same judgment of one labeler in two rows counts once; another one of a labeler whose name is known is a
    revision; another one of an unknown labeler is somebody else's. Errors: ValueError naming file, line and field, or,
    of a strict import, the first warning.
    """
    found = Found(Report(strict=strict))
    yield found
    for where, row in rows:
        found.report.num_rows += 1
        num_before = len(found.report.warnings)
        judged = _read(form, where, row, found.report, objective)
        for one in judged:
            _merge(found, one, form.name)
        told = len(found.report.warnings) > num_before
        assert judged or told, f"{where}: the row left neither a task nor an warning"
        yield found


def collect_all(form: Format, rows: Iterable[tuple[str, Row]]) -> Found:
    """`collect`, to the end."""
    return deque(collect(form, rows), maxlen=1).pop()


def _read(form: Format, where: str, row: Row, report: Report, objective: str) -> list[Judged]:
    """Read one row. Readers refuse malformed rows themselves; what they stumble over is reported with the row too.

    Raises: ValueError naming file and line.
    """
    assert form.read is not None, f"{form.name} is not read"
    try:
        return list(form.read(where, row, report, objective))
    except Exception as error:  # the last line of defence: a reader's mistake must not hide the row
        if isinstance(error, ValueError) and str(error).startswith(where):
            raise
        raise ValueError(f"{where}: {UNFORESEEN} {form.name}: {type(error).__name__}: {error}") from error


def _merge(found: Found, judged: Judged, name: str) -> None:
    task, task_id = judged.task, judged.task.task_id
    is_known = task_id in found.tasks
    if is_known:
        _compare(found, judged, found.locations[task_id, "", 0])
    else:
        found.tasks[task_id], found.batches[task_id] = task, judged.batch
        found.locations[task_id, "", 0] = judged.where
    by_labeler = found.acts.setdefault(task_id, {})
    for vote in judged.votes:
        act = _add_vote(by_labeler, task_id, vote, name, judged.where, found.report)
        found.locations.setdefault((task_id, act.labeler, act.revision), judged.where)
    for act in judged.whole:
        _add_act(by_labeler.setdefault(act.labeler, []), act, judged.where, found.report)
        found.locations.setdefault((task_id, act.labeler, act.revision), judged.where)
    if is_known and not judged.votes and not judged.whole:
        found.report.add("row seen twice", judged.where, "the task is there already, and nobody judged it", "left out")
    if len(by_labeler) > MAX_LABELERS:
        raise ValueError(
            f"{judged.where}: {named(NO_LOCATIONS, task_id)}: judged by more than {MAX_LABELERS:,} labelers"
        )
    found.quotas[task_id] = judged.num_labelers or max(len(by_labeler), 1)


def _compare(found: Found, judged: Judged, first: str) -> None:
    """Errors: ValueError where two rows give one id to different prompts or responses, or contradict each other."""
    known, task = found.tasks[judged.task.task_id], judged.task
    where = named(NO_LOCATIONS, task.task_id)
    told = {"batch": judged.batch, "num_labelers": judged.num_labelers or found.quotas[task.task_id]}
    before = {"batch": found.batches[task.task_id], "num_labelers": found.quotas[task.task_id]}
    for name in ("gold_ranks", "repeat_of"):
        told[name], before[name] = getattr(task, name), getattr(known, name)
    for name, value in told.items():
        if value != before[name]:
            raise ValueError(f"{judged.where}: {where}: {name} is {shown(value)}, but {shown(before[name])} in {first}")
    for name in ("prompt", "responses"):
        if getattr(known, name) != getattr(task, name):
            raise ValueError(
                f"{judged.where}: {where}: field {name!r} differs from that in {first}; rankings of one"
                " task are of the same responses"
            )
    if known.objective != task.objective:
        raise ValueError(
            f"{judged.where}: {where}: objective {shown(task.objective)} differs from {shown(known.objective)}"
            f" in {first}; what is judged by another objective is another task and needs an id of its own"
        )
    others = [name for name in ("sources", "details") if getattr(known, name) != getattr(task, name)]
    if others:
        found.report.add(
            "task told differently", judged.where, f"{', '.join(others)} differ from {first}", "kept as told there"
        )


def _add_vote(
    by_labeler: dict[str, list[Judgment]], task_id: str, vote: Vote, name: str, where: str, report: Report
) -> Judgment:
    """The vote as a judgment: the one that is there already where the labeler said the same before."""
    labeler = vote.labeler
    if labeler == UNKNOWN:  # nobody says that the same one judged differently
        number = 1
        while labeler in by_labeler and not _told(by_labeler[labeler], vote):
            number += 1
            labeler = f"{UNKNOWN} {number}"
    acts = by_labeler.setdefault(labeler, [])
    if same := _told(acts, vote):
        report.add("row seen twice", where, f"{labeler} judged this task the same before", "counted once")
        return same
    if labeler != vote.labeler:
        report.add("judged differently", where, "an unknown labeler judged this task before", f"kept as {labeler!r}")
    elif acts:
        report.add("judged again", where, f"{labeler} judged this task before", "kept as a revision; the last stands")
    acts.append(
        Judgment(
            task_id=task_id,
            labeler=labeler,
            revision=len(acts),
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
    return acts[-1]


def _told(acts: Sequence[Judgment], vote: Vote) -> Judgment | None:
    told = (vote.ranks, vote.ratings, vote.flags, vote.note, vote.created_at)
    return next((act for act in acts if (act.ranks, act.ratings, act.flags, act.note, act.created_at) == told), None)


def _add_act(acts: list[Judgment], act: Judgment, where: str, report: Report) -> None:
    """Errors: ValueError for two different judgments of one labeler under one revision."""
    same = next((other for other in acts if other.revision == act.revision), None)
    if same is None:
        acts.append(act)
    elif same == act:
        report.add("row seen twice", where, f"revision {act.revision} of {act.labeler}", "counted once")
    else:
        raise ValueError(
            f"{where}: {named(NO_LOCATIONS, act.task_id, act.labeler)}: revision {act.revision} is there twice and"
            " differs; one judgment a revision was expected"
        )


def final_rankings(
    tasks: Iterable[Task], judgments: Iterable[Judgment], report: Report
) -> Iterator[tuple[Task, Ranking]]:
    """The rankings that stand and are training data, in the order of the tasks.

    What does not stand is reported, and what is held back (`preferences.current.why_excluded`).
    """
    stands = current_judgments(judgments)
    for act in stands.replaced:
        _report_not_current(report, act, "superseded", "was revised")
    for act in (*stands.skips, *stands.undos):
        _report_not_current(report, act, act.kind, act.note)
    settled: dict[str, list[Judgment]] = {}
    for act in stands.final:
        settled.setdefault(act.task_id, []).append(act)
    for act in stands.answers:
        if act not in settled[act.task_id]:
            _report_not_current(report, act, "superseded", "the task was adjudicated")
    for task in tasks:
        why = why_excluded(task)
        for act in settled.get(task.task_id, []):
            if why:
                _report_excluded(report, act, why)
            else:
                yield task, ranking_of(task, act)


def report_excluded(found: Found) -> None:
    """Report, of an import that is trained on, the judgments that are left out because they measure labelers."""
    kept = {task_id: why_excluded(task) for task_id, task in found.tasks.items()}
    for act in current_judgments(found.judgments).final:
        if kept[act.task_id]:
            _report_excluded(found.report, act, kept[act.task_id])


def _report_excluded(report: Report, act: Judgment, why: str) -> None:
    where = f"task {act.task_id!r}, labeler {act.labeler!r}"
    report.add(why, where, "it measures labelers and is no training data", "left out")


def _report_not_current(report: Report, act: Judgment, kind: str, why: str) -> None:
    where = f"task {act.task_id!r}, labeler {act.labeler!r}"
    report.add(kind, where, f"{act.kind} {act.revision}: {why or 'no reason given'}", "no ranking of it stands")
