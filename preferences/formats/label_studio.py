"""Label Studio's tasks: exports as JSON (a task per row, with its annotations) and JSON_MIN (an annotation per row).

An export has no labeling configuration, so results are read by their types: Pairwise, Ranker with or without buckets,
Choices that name a response or a tie, Rating or Number of each response, TextArea. A cancelled annotation is a skip,
and a ground truth is an adjudication. Everything else that an annotator entered is in the judgment's note.

What is written is a project: the tasks, and a configuration that asks what Heed's pages ask. Pairwise if all tasks have
two responses, and otherwise a Ranker whose buckets are ranks, so that ties are possible.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from xml.etree import ElementTree

from files.fields import as_number, kind_of, list_field, object_field, objects_field, shown, text_field
from preferences.formats.labeling_tools import (
    FLAGS,
    NOTES,
    SKIPPED,
    Said,
    Shown,
    all_flags,
    held_judgments,
    milliseconds_field,
    moment_field,
    ranks_in_order,
    rated_place,
    response_names,
    shown_in,
    turns_as_text,
    verdict_ranks,
    vote_of,
)
from preferences.formats.parts import (
    UNKNOWN,
    JudgedTask,
    Project,
    Report,
    Row,
    Vote,
    content_id,
    is_sound_prompt,
    rest,
)
from preferences.records import OVERALL, Judgment, StoredTask, Task

TASKS, CONFIG = "tasks.json", "label_config.xml"
MIN_FIELDS = ("annotator", "annotation_id", "lead_time", "created_at", "updated_at")  # of an annotation in JSON_MIN
OWN = ("task_id", "warning")  # fields of the tasks' data that Heed writes
MOST_STARS = 10  # ratings above it, or not whole, are asked as numbers
KEYS = ("selected", "ranker", "rating", "number", "choices", "text")  # of the values that are read
_BUCKET = re.compile(r"(?:.*[^0-9])?([0-9]{1,2})")
_NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _is_min(row: Row) -> bool:
    return row.keys() >= {*MIN_FIELDS[:3]}


def read(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    data = object_field(where, row, "data") if not _is_min(row) else {**row}
    asked = shown_in(where if _is_min(row) else f"{where}: data", data)
    given = row.get("meta")
    meta = given.get("heed") if isinstance(given, Mapping) and isinstance(given.get("heed"), Mapping) else {}
    task = _task(where, asked, data, meta or {}, objective, is_min=_is_min(row))
    if not is_sound_prompt(where, task.prompt, report):
        return
    for name in ("predictions", "drafts"):
        if row.get(name):
            report.add(
                name, where, f"{len(list_field(where, row, name))} {name}, which nobody has submitted", "left out"
            )
    if _is_min(row):
        annotation = _of_min(row, asked)
        is_judged = row["annotator"] is not None or annotation["result"]
        placed = [(where, annotation)] if is_judged else []
    else:
        annotations = objects_field(where, row, "annotations")
        placed = [(f"{where}: annotations[{number}]", own) for number, own in enumerate(annotations)]
    placed = [(place, annotation | _own_meta(annotation)) for place, annotation in placed]
    placed.sort(key=lambda one: moment_field(one[0], one[1], "created_at"))
    votes = [_vote(place, own, asked, task.objective, report) for place, own in placed]
    if any(votes) or not placed:
        yield JudgedTask(where, task, tuple(vote for vote in votes if vote))


def _task(where: str, asked: Shown, data: Row, meta: Row, objective: str, *, is_min: bool) -> Task:
    sources = tuple(meta["sources"]) if isinstance(meta.get("sources"), list) else ()
    if len(sources) != len(asked.responses) or not all(isinstance(source, str) for source in sources):
        sources = (UNKNOWN,) * len(asked.responses)
    details = meta.get("details")
    if not isinstance(details, Mapping):
        skipped = (*asked.fields, *OWN, *(_min_results(data, asked) if is_min else ()), *(MIN_FIELDS if is_min else ()))
        details = rest(data, *skipped)
    task_id = data.get("task_id")
    return Task(
        task_id=text_field(where, data, "task_id")
        if task_id is not None
        else content_id("label-studio", asked.prompt, asked.responses, ()),
        prompt=asked.prompt,
        responses=asked.responses,
        sources=sources,
        objective=objective or (text_field(where, meta, "objective") if meta.get("objective") else OVERALL),
        details=details,
        warning=data["warning"] if isinstance(data.get("warning"), str) else "",
    )


# ---- one annotation ----


def _of_min(row: Row, asked: Shown) -> dict[str, Any]:
    """Returns the annotation of a row of JSON_MIN, in which each control's name has its values."""
    result = []
    for name, values in _min_results(row, asked).items():
        for value in values if isinstance(values, list) else [values]:
            is_text = isinstance(value, str) and name in NOTES
            given = {"text": [value]} if is_text else {"choices": [value]} if isinstance(value, str) else value
            result.append({"from_name": name, "value": given})
    annotator = row.get("annotator")
    return {name: row.get(name) for name in MIN_FIELDS} | {"completed_by": annotator, "result": result}


def _min_results(row: Row, asked: Shown) -> dict[str, Any]:
    """Returns the fields of a JSON_MIN row that are results of an annotation, and not data of the task."""
    found: dict[str, Any] = {}
    for name, values in row.items():
        if name in (*asked.fields, *OWN, *MIN_FIELDS, "id", "agreement"):
            continue
        items = values if isinstance(values, list) else [values]
        is_region = bool(items) and all(isinstance(item, Mapping) and {*item} & {*KEYS} for item in items)
        is_text = isinstance(values, str) and (name in NOTES or bool(verdict_ranks(values, asked)))
        if is_region or is_text or _flagged_place(name, "", asked) is not None:
            found[name] = values
    return found


def _vote(where: str, row: Row, asked: Shown, objective: str, report: Report) -> Vote | None:
    said = Said()
    for number, result in enumerate(objects_field(where, {"result": row.get("result") or []}, "result")):
        place = f"{where}: result[{number}]"
        if "value" in result:  # a relation between two others has none
            _read_result(place, result, object_field(place, result, "value"), asked, said)
    labeler, created_at = _annotator(where, row), moment_field(where, row, "created_at")
    milliseconds = milliseconds_field(where, row, "lead_time")
    if row.get("was_cancelled"):
        note = said.note or SKIPPED
        return Vote(labeler, (), note=note, kind="skip", created_at=created_at, milliseconds=milliseconds)
    return vote_of(
        where,
        said,
        asked,
        report,
        labeler=labeler,
        objective=objective,
        created_at=created_at,
        milliseconds=milliseconds,
        kind="adjudication" if row.get("ground_truth") else "answer",
    )


def _own_meta(annotation: Row) -> dict[str, Any]:
    """Returns who judged and when, if Heed wrote it into the first result."""
    result = annotation.get("result")
    first = result[0] if isinstance(result, list) and result else None
    meta = first.get("meta") if isinstance(first, Mapping) else None
    if not isinstance(meta, Mapping) or not isinstance(meta.get("labeler"), str):
        return {}
    return {"completed_by": meta["labeler"]} | ({"created_at": meta["created_at"]} if "created_at" in meta else {})


def _annotator(where: str, row: Row) -> str:
    """Returns the annotator's email or username; "annotator 3" for the number 3, all that most exports have."""
    by = row.get("completed_by")
    if isinstance(by, Mapping):
        by = next((by[name] for name in ("email", "username", "id") if by.get(name)), None)
    if by is None:
        return UNKNOWN
    if type(by) is int:
        return f"annotator {by}"
    if not isinstance(by, str) or not by.strip():
        raise ValueError(f"{where}: field 'completed_by' is {shown(by)}; a user, an email or a number was expected")
    return by


def _read_result(where: str, result: Row, value: Row, asked: Shown, said: Said) -> None:
    """Adds one result of an annotation to what the annotator said."""
    control = str(result.get("from_name") or "result")
    about = str(result.get("to_name") or "")
    if "selected" in value:
        said.ranks = verdict_ranks(text_field(where, value, "selected"), asked)
        if not said.ranks:
            expected = f"left or right, of two responses, was expected; there are {len(asked.names)}"
            raise ValueError(f"{where}: field 'selected' is {shown(value['selected'])}; {expected}")
    elif "ranker" in value:
        said.ranks = _ranked(where, object_field(where, value, "ranker"), asked)
    elif "rating" in value or "number" in value:
        name = "rating" if "rating" in value else "number"
        number = as_number(value[name])
        if number is None:
            raise ValueError(f"{where}: field {name!r} is {shown(value[name])}; a number was expected")
        place = rated_place(control, about, asked)
        if place is None:
            said.others[control] = number
        else:
            said.ratings.setdefault(place[0], {})[place[1]] = number
    elif "choices" in value:
        _read_choices(where, control, about, list_field(where, value, "choices"), asked, said)
    elif "text" in value and set(value) <= {"text", "type"}:
        text = value["text"]
        texts = [str(line) for line in text] if isinstance(text, list) else [str(text)]
        said.others[control] = "\n".join([*([said.others[control]] if control in said.others else []), *texts])
    else:
        said.others.setdefault(control, [])
        if isinstance(said.others[control], list):
            said.others[control].append({**value, **({"of": about} if about else {})})


def _read_choices(where: str, control: str, about: str, choices: list[Any], asked: Shown, said: Said) -> None:
    for choice in choices:
        if not isinstance(choice, str):
            raise ValueError(f"{where}: field 'choices' holds {kind_of(choice)}; strings were expected")
    verdict = verdict_ranks(choices[0], asked) if len(choices) == 1 else ()
    flagged = _flagged_place(control, about, asked)
    if flagged is not None:
        said.flags.setdefault(flagged, []).extend(choices)
    elif verdict and rated_place(control, about, asked) is None:
        said.ranks = said.ranks or verdict
    else:
        said.others[control] = choices[0] if len(choices) == 1 else choices


def _flagged_place(control: str, about: str, asked: Shown) -> int | None:
    """Returns the response that a control such as `flags_1` marks; None for another control."""
    place = rated_place(control, about, asked)
    return place[1] if place is not None and place[0] in FLAGS else None


def _ranked(where: str, ranker: Row, asked: Shown) -> tuple[int, ...]:
    """Returns the ranks of a Ranker: its one list in order, or buckets that are numbered, in each of which all tie.

    Returns () if a response is in no bucket. Raises: ValueError for buckets without numbers, whose order is unknown.
    """
    lists = {name: list_field(f"{where}: ranker", ranker, name) for name in ranker if name != "_"}
    numbers = {name: _BUCKET.fullmatch(name) for name in lists}
    if len(lists) == 1 and not all(numbers.values()):
        return ranks_in_order(where, [[option] for option in next(iter(lists.values()))], asked)
    numbered = [(int(match[1]), name) for name, match in numbers.items() if match]
    if len(numbered) < len(lists):
        unknown = next(name for name, match in numbers.items() if not match)
        expected = "names that end with a rank, such as 'rank_1', were expected"
        raise ValueError(f"{where}: field 'ranker' has the bucket {unknown!r} among {len(lists)}; {expected}")
    return ranks_in_order(where, [lists[name] for _, name in sorted(numbered)], asked)


# ---- writing ----


def write(stored: Sequence[StoredTask], judgments: Sequence[Judgment], report: Report) -> Iterator[dict[str, Any]]:
    """Writes one task per row, judged or not."""
    layout = _Layout(stored, judgments)
    for number, (one, held) in enumerate(held_judgments(stored, judgments, report), start=1):
        task = one.task
        yield {
            "id": number,
            "data": layout.data(task, report),
            "meta": {
                "heed": {"sources": list(task.sources), "objective": task.objective, "details": dict(task.details)}
            },
            "annotations": [layout.annotation(judgment, report) for judgment in held],
        }


def project_files(stored: Sequence[StoredTask], judgments: Sequence[Judgment]) -> Mapping[str, str]:
    return {CONFIG: _Layout(stored, judgments).config()}


PROJECT = Project(TASKS, project_files, CONFIG)


class _Layout:
    """The names of fields and controls, which tasks and configuration share."""

    def __init__(self, stored: Sequence[StoredTask], judgments: Sequence[Judgment]) -> None:
        self.num_responses = max(len(one.task.responses) for one in stored)
        self.is_pairwise = all(len(one.task.responses) == 2 for one in stored)
        self.has_warnings = any(one.task.warning for one in stored)
        self.flags = [flag for flag in all_flags(judgments) if flag and not _NO_XML.search(flag)]
        ratings = [rating for judgment in judgments for rating in judgment.ratings]
        self.has_stars = all(rating in range(MOST_STARS + 1) for rating in ratings)
        self.most = max([7, *ratings])

    def data(self, task: Task, report: Report) -> dict[str, Any]:
        names = response_names(len(task.responses))
        texts = zip(names, task.responses, strict=True)
        shown = (
            dict(texts)
            if self.is_pairwise
            else {"responses": [{"id": name, "title": _title(name), "body": text} for name, text in texts]}
        )
        warning = {"warning": task.warning} if self.has_warnings else {}
        turns = turns_as_text(f"task {task.task_id!r}", task.prompt, report)
        return {"task_id": task.task_id, **warning, "prompt": turns, **shown}

    def annotation(self, judgment: Judgment, report: Report) -> dict[str, Any]:
        made: list[tuple[str, str, str, dict[str, Any]]] = []
        if judgment.ranks:
            made += [self._ranking(judgment.ranks)] if len(judgment.ranks) > 1 else []
            made += self._of_responses(judgment, report)
        if judgment.note:
            made.append(("note", "prompt", "textarea", {"text": [judgment.note]}))
        found: dict[str, Any] = {
            "completed_by": {"email": judgment.labeler},
            "was_cancelled": judgment.kind == "skip",
            "ground_truth": judgment.kind == "adjudication",
            "lead_time": judgment.milliseconds / 1000,
            "result": [
                {"id": f"r{number}", "from_name": control, "to_name": about, "type": kind, "value": value}
                for number, (control, about, kind, value) in enumerate(made)
            ],
        }
        # A server that does not know the email takes the importing user and the time of the import; results stay.
        meta = {"labeler": judgment.labeler}
        if judgment.created_at:
            found["created_at"] = meta["created_at"] = datetime.fromtimestamp(judgment.created_at, UTC).isoformat()
        if found["result"]:  # empty if a labeler did not mark the single response
            found["result"][0]["meta"] = meta
        return found

    def _ranking(self, ranks: Sequence[int]) -> tuple[str, str, str, dict[str, Any]]:
        if self.is_pairwise and ranks[0] == ranks[1]:
            return "tie", "prompt", "choices", {"choices": ["tie"]}
        if self.is_pairwise:
            return "preference", "response_1", "pairwise", {"selected": "left" if ranks[0] == 1 else "right"}
        names = response_names(len(ranks))
        buckets = {
            f"rank_{rank}": [name for name, own in zip(names, ranks, strict=True) if own == rank]
            for rank in sorted({*ranks})
        }
        return "ranking", "responses", "ranker", {"ranker": buckets}

    def _of_responses(self, judgment: Judgment, report: Report) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
        where = f"task {judgment.task_id!r}, labeler {judgment.labeler!r}"
        for index, rating in enumerate(judgment.ratings):
            kind, value = ("rating", int(rating)) if self.has_stars else ("number", float(rating))
            yield f"rating_{index + 1}", self._about(index), kind, {kind: value}
        for index, flags in enumerate(judgment.flags):
            held = [flag for flag in flags if flag in self.flags]
            if len(held) < len(flags):
                report.add("unwritable flag", where, f"{len(flags) - len(held)} empty or with characters that XML"
                           " cannot hold", "left out")  # fmt: skip
            if held:
                yield f"flags_{index + 1}", self._about(index), "choices", {"choices": held}

    def _about(self, index: int) -> str:
        return f"response_{index + 1}" if self.is_pairwise else "responses"

    def config(self) -> str:
        """Returns the labeling configuration, as XML."""
        view = ElementTree.Element("View")
        if self.has_warnings:
            ElementTree.SubElement(view, "Header", value="$warning", size="4")
        turns = {"name": "prompt", "value": "$prompt", "nameKey": "role", "textKey": "content", "layout": "dialogue"}
        ElementTree.SubElement(view, "Paragraphs", turns)
        names = response_names(self.num_responses)
        if self.is_pairwise:
            ElementTree.SubElement(view, "Pairwise", name="preference", toName=",".join(names))
            for name in names:
                ElementTree.SubElement(view, "Header", value=_title(name), size="5")
                ElementTree.SubElement(view, "Text", name=name, value=f"${name}")
            tie = ElementTree.SubElement(view, "Choices", name="tie", toName="prompt", showInLine="true")
            ElementTree.SubElement(tie, "Choice", value="tie", alias="tie")
        else:
            ElementTree.SubElement(view, "List", name="responses", value="$responses", title="Responses")
        if not self.is_pairwise and self.num_responses > 1:
            ranker = ElementTree.SubElement(view, "Ranker", name="ranking", toName="responses")
            for rank in range(1, self.num_responses + 1):
                title = f"{rank} (best)" if rank == 1 else str(rank)
                ElementTree.SubElement(ranker, "Bucket", name=f"rank_{rank}", title=title)
        for index, name in enumerate(names):
            self._add_questions(view, index, name)
        ElementTree.SubElement(view, "TextArea", name="note", toName="prompt", placeholder="Note", rows="3")
        ElementTree.indent(view)
        return ElementTree.tostring(view, encoding="unicode") + "\n"

    def _add_questions(self, view: ElementTree.Element, index: int, name: str) -> None:
        about = self._about(index)
        ElementTree.SubElement(view, "Header", value=f"{_title(name)}: rating", size="6")
        if self.has_stars:
            ElementTree.SubElement(
                view, "Rating", name=f"rating_{index + 1}", maxRating=str(int(self.most)), toName=about
            )
        else:
            ElementTree.SubElement(view, "Number", name=f"rating_{index + 1}", toName=about)
        if self.flags:
            marks = ElementTree.SubElement(view, "Choices", name=f"flags_{index + 1}", choice="multiple", toName=about)
            for flag in self.flags:
                ElementTree.SubElement(marks, "Choice", value=flag)


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()
