"""Converts rows to tasks and judgments, and judgments to final rankings and pairs of responses.

Rows about the same task and labeler are merged. Pairs are for formats with two responses per row.
"""

import os
import pickle
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise

from files.fields import shown
from files.rows import InvalidRows
from preferences.formats.parts import UNKNOWN, Format, JudgedTask, Report, Row, Vote
from preferences.rankings import current_judgments, ranking_of, why_excluded
from preferences.records import MAX_LABELERS, NO_LOCATIONS, Judgment, Message, Ranking, StoredTask, Task, named

RECENT_TASKS = 4096  # kept in memory while rows are read; rows about the same task are usually close together
TAKES_BACK = ("undo", "void")  # kinds of events that are no judgments, but end the one before them
UNFORESEEN = "not readable as"  # in the message about an error that a format's reader does not handle


# ---- merging rows ----


@dataclass
class ImportedTask:
    """A task with everything that the rows read so far say about it.

    `quota` is the number of labelers that the task wants, and `batch` is the batch that its row names ("" = none).
    `by_labeler` has its judgments in order. `places` has each judgment's file and line by (labeler, revision).
    """

    task: Task
    batch: str
    where: str
    quota: int = 0
    by_labeler: dict[str, list[Judgment]] = field(default_factory=dict)
    places: dict[tuple[str, int], str] = field(default_factory=dict)

    @property
    def judgments(self) -> list[Judgment]:
        return [judgment for own in self.by_labeler.values() for judgment in own]

    @property
    def rankings(self) -> list[Ranking]:
        """The final rankings that are training data; [] for a task that measures labelers."""
        return [ranking for _, ranking in final_rankings([self.task], self.judgments, Report())]


class ImportedTasks:
    """Tasks by id, in order of appearance. Tasks that no row has mentioned for a while move to a temporary file; about
    200 bytes of each stay in memory.
    """

    def __init__(self) -> None:
        self._recent: dict[str, ImportedTask] = {}  # the most recently used one is last
        self._starts: dict[str, int] = {}  # each task's offset in the file; -1 = not there yet
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it closes with this object
        weakref.finalize(self, self._file.close)

    def __len__(self) -> int:
        return len(self._starts)

    def get(self, task_id: str) -> ImportedTask | None:
        """Returns a task. The caller may change it."""
        found = self._recent.pop(task_id, None)
        if found is None:
            if task_id not in self._starts:
                return None
            found = self._read(task_id)
        self._keep(task_id, found)
        return found

    def add(self, found: ImportedTask) -> None:
        """Adds a task with a new id."""
        self._starts[found.task.task_id] = -1
        self._keep(found.task.task_id, found)

    def __iter__(self) -> Iterator[ImportedTask]:
        """Yields all tasks. The caller must not change them."""
        for task_id in self._starts:
            yield self._recent.get(task_id) or self._read(task_id)

    def _read(self, task_id: str) -> ImportedTask:
        self._file.seek(self._starts[task_id])
        found: ImportedTask = pickle.load(self._file)
        return found

    def _keep(self, task_id: str, found: ImportedTask) -> None:
        self._recent[task_id] = found
        if len(self._recent) > RECENT_TASKS:
            oldest = next(iter(self._recent))
            self._starts[oldest] = self._file.seek(0, os.SEEK_END)
            pickle.dump(self._recent.pop(oldest), self._file, protocol=pickle.HIGHEST_PROTOCOL)


@dataclass
class ImportedLabels:
    """The result of an import: the tasks and a report. `invalid` lists the rows that were refused or skipped."""

    report: Report
    invalid: InvalidRows
    found_tasks: ImportedTasks = field(default_factory=ImportedTasks)

    @property
    def tasks(self) -> dict[str, Task]:
        return {found.task.task_id: found.task for found in self.found_tasks}

    @property
    def batches(self) -> dict[str, str]:
        """The batch that each task's row names, by task id."""
        return {found.task.task_id: found.batch for found in self.found_tasks}

    @property
    def quotas(self) -> dict[str, int]:
        """The number of labelers that each task wants, by task id."""
        return {found.task.task_id: found.quota for found in self.found_tasks}

    @property
    def locations(self) -> dict[tuple[str, str, int], str]:
        """File and line of each judgment by (task id, labeler, revision), and of each task by (task id, "", 0)."""
        return {
            place: where
            for found in self.found_tasks
            for task_id in (found.task.task_id,)
            for place, where in (
                ((task_id, "", 0), found.where),
                *(((task_id, *of), where) for of, where in found.places.items()),
            )
        }

    @property
    def judgments(self) -> list[Judgment]:
        return [judgment for found in self.found_tasks for judgment in found.judgments]

    @property
    def rankings(self) -> list[Ranking]:
        """The final rankings that are training data. `report_excluded` reports the others."""
        return [ranking for _, rankings in self.ranked_tasks() for ranking in rankings]

    def ranked_tasks(self) -> Iterator[tuple[str, list[Ranking]]]:
        """Yields each task that has final rankings to train on: its file and line, and these rankings."""
        for found in self.found_tasks:
            if rankings := found.rankings:
                yield found.where, rankings


def collect(
    form: Format,
    rows: Iterable[tuple[str, Row]],
    *,
    strict: bool = False,
    objective: str = "",
    invalid: InvalidRows | None = None,
) -> Iterator[ImportedLabels]:
    """Reads rows into tasks and judgments. Yields the same growing result before the first and after every row.

    A labeler's judgment that appears in two rows counts once. A different judgment by a named labeler is a revision; a
    different judgment by an unknown labeler is attributed to another unknown labeler. `invalid` counts rows that are
    malformed or contradict an earlier one, and these rows are dropped; without `invalid` the first one is an error.

    Raises: ValueError naming file, line and field; in a strict import, for the first warning.
    """
    found = ImportedLabels(Report(strict=strict), invalid or InvalidRows(""))
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


def collect_all(form: Format, rows: Iterable[tuple[str, Row]], invalid: InvalidRows | None = None) -> ImportedLabels:
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


def _merge(found: ImportedLabels, judged: JudgedTask, name: str) -> None:
    task_id = judged.task.task_id
    known = found.found_tasks.get(task_id)
    own = known or ImportedTask(judged.task, judged.batch, judged.where)
    if known:
        _refuse_contradiction(found, judged)  # check again: another task of the same row may contradict this one
        _report_differences(found, judged, known)
    else:
        found.found_tasks.add(own)
    for vote in judged.votes:
        judgment = _add_vote(own.by_labeler, task_id, vote, name, judged.where, found.report)
        own.places.setdefault((judgment.labeler, judgment.revision), judged.where)
        _order_by_time(own, judgment.labeler)
    for judgment in judged.judgments:
        events = own.by_labeler.setdefault(judgment.labeler, [])
        if judgment in events:
            said = f"revision {judgment.revision} of {judgment.labeler}"
            found.report.add("row seen twice", judged.where, said, "counted once")
        else:
            events.append(judgment)
        own.places.setdefault((judgment.labeler, judgment.revision), judged.where)
    if known and not judged.votes and not judged.judgments:
        found.report.add("row seen twice", judged.where, "an earlier row has the task; nobody judged it", "left out")
    if len(own.by_labeler) > MAX_LABELERS:
        raise ValueError(
            f"{judged.where}: {named(NO_LOCATIONS, task_id)}: judged by more than {MAX_LABELERS:,} labelers"
        )
    own.quota = judged.num_labelers or max(len(own.by_labeler), 1)


def _refuse_contradiction(found: ImportedLabels, judged: JudgedTask) -> None:
    """Raises: ValueError if the row contradicts an earlier one, or itself."""
    task_id = judged.task.task_id
    earlier = found.found_tasks.get(task_id)
    if earlier:
        _refuse_other_task(earlier, judged)
    by_labeler = earlier.by_labeler if earlier else {}
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


def _refuse_other_task(earlier: ImportedTask, judged: JudgedTask) -> None:
    """Raises: ValueError if two rows give one id to different prompts or responses, or contradict each other."""
    known, task, first = earlier.task, judged.task, earlier.where
    where = named(NO_LOCATIONS, task.task_id)
    now = {"batch": judged.batch, "num_labelers": judged.num_labelers or earlier.quota}
    before = {"batch": earlier.batch, "num_labelers": earlier.quota}
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


def _report_differences(found: ImportedLabels, judged: JudgedTask, earlier: ImportedTask) -> None:
    known, task = earlier.task, judged.task
    others = [name for name in ("sources", "details", "warning") if getattr(known, name) != getattr(task, name)]
    if others:
        found.report.add(
            "task described differently",
            judged.where,
            f"{', '.join(others)} differ from {earlier.where}",
            "kept as there",
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
            kind=vote.kind,
            ranks=vote.ranks,
            ratings=vote.ratings,
            flags=vote.flags,
            note=vote.note,
            shown_order=vote.shown_order,
            instructions_version="",
            milliseconds=vote.milliseconds,
            client=f"import {name}",
            created_at=vote.created_at,
        )
    )
    return own[-1]


def _order_by_time(found: ImportedTask, labeler: str) -> None:
    """Renumbers a labeler's judgments by time, if all times are known: a later row may hold an earlier one."""
    events = found.by_labeler[labeler]
    order = sorted(range(len(events)), key=lambda index: events[index].created_at)
    if order == list(range(len(events))) or not all(event.created_at for event in events):
        return
    places = [found.places.get((labeler, revision), found.where) for revision in order]
    found.by_labeler[labeler] = [replace(events[index], revision=new) for new, index in enumerate(order)]
    found.places.update({(labeler, new): where for new, where in enumerate(places)})


def _same(own: Sequence[Judgment], vote: Vote) -> Judgment | None:
    content = (vote.kind, vote.ranks, vote.ratings, vote.flags, vote.note, vote.created_at)
    stated = ((one.kind, one.ranks, one.ratings, one.flags, one.note, one.created_at) for one in own)
    return next((one for one, known in zip(own, stated, strict=True) if known == content), None)


# ---- final rankings ----


def final_rankings(
    tasks: Iterable[Task], judgments: Iterable[Judgment], report: Report
) -> Iterator[tuple[Task, Ranking]]:
    """Yields the final judgments as rankings; see `final_judgments`."""
    for task, judgment in final_judgments(tasks, judgments, report):
        yield task, ranking_of(task, judgment)


def final_judgments(
    tasks: Iterable[Task], judgments: Iterable[Judgment], report: Report, *, keeps: Sequence[str] = ()
) -> Iterator[tuple[Task, Judgment]]:
    """Yields the final judgments that are training data, in the order of the tasks.

    It reports each judgment that is not final once, those that are excluded (`preferences.rankings.why_excluded`), and
    annotations ("criteria", "turns", "edits") except those that the format `keeps`.
    """
    judgments = list(judgments)
    current = current_judgments(judgments)
    events = sorted(judgments, key=lambda event: (event.task_id, event.labeler, event.revision))
    for event, following in pairwise(events):
        is_same = (event.task_id, event.labeler) == (following.task_id, following.labeler)
        if is_same and event.kind not in TAKES_BACK:
            taken_back = following.kind in TAKES_BACK
            kind, why = (following.kind, following.note) if taken_back else ("superseded", "was revised")
            _report_not_final(report, event, kind, why)
    for judgment in current.skips:
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
                _report_annotations(report, judgment, keeps)
                yield task, judgment


def _report_annotations(report: Report, judgment: Judgment, keeps: Sequence[str]) -> None:
    said = judgment.annotations
    counts = {name: len(getattr(said, name)) for name in ("criteria", "turns")}
    counts["edits"] = sum(map(bool, said.edits))
    for kind, count in counts.items():
        if count and kind not in keeps:
            where = f"task {judgment.task_id!r}, labeler {judgment.labeler!r}"
            report.add(kind, where, f"the answer has {count}, which this format cannot hold", "left out")


def report_excluded(found: ImportedLabels) -> None:
    """Reports the judgments of an import that training leaves out because they measure labelers."""
    for own in found.found_tasks:
        if why := why_excluded(own.task):
            for judgment in current_judgments(own.judgments).final:
                _report_excluded(found.report, judgment, why)


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
    """Two responses that a labeler ordered, by canonical index. `where` names task and labeler."""

    task: Task
    where: str
    first: int
    second: int

    @property
    def better(self) -> str:
        return self.task.responses[self.first]

    @property
    def worse(self) -> str:
        return self.task.responses[self.second]


def untied_pairs(stored: Sequence[StoredTask], judgments: Sequence[Judgment], report: Report) -> Iterator[Pair]:
    """Yields every pair of every final ranking that has a better response. Reports ties and single responses."""
    for task, ranking in final_rankings([one.task for one in stored], judgments, report):
        where = f"task {task.task_id!r}, labeler {ranking.labeler!r}"
        if task.is_single:
            report.add("single response", where, "it was rated alone, so there is no pair", "left out")
        for first, second in combinations(range(len(task.responses)), 2):
            if ranking.ranks[first] == ranking.ranks[second]:
                report.add("tie", where, f"responses {first + 1} and {second + 1} are tied", "left out")
            else:
                is_swapped = ranking.ranks[first] > ranking.ranks[second]
                yield Pair(task, where, *((second, first) if is_swapped else (first, second)))


def single_turn(pair: Pair, report: Report) -> str:
    """Returns the text of a prompt with a single user turn, or "" and a warning for any other prompt."""
    if len(pair.task.prompt) == 1 and pair.task.prompt[0].role == "user":
        return pair.task.prompt[0].content
    roles = ", ".join(message.role for message in pair.task.prompt)
    report.add("prompt of several turns", pair.where, f"the prompt's turns are {roles}", "left out")
    return ""


def clusters_of_arena(tasks: Sequence[Task]) -> str:
    """Returns "person" if an arena wrote all tasks: what one person asks and prefers is no independent evidence. But if
    several people had most of the prompts, as from a list, it returns "", and each prompt is a cluster.
    """
    people: dict[tuple[Message, ...], set[object]] = {}
    for task in tasks:
        if not {"person", "conversation"} <= task.details.keys():
            return ""
        people.setdefault(task.prompt, set()).add(task.details["person"])
    return "person" if 2 * sum(len(who) > 1 for who in people.values()) < len(people) else ""
