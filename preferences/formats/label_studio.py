"""Label Studio's tasks: exports as JSON, a task per row, with its annotations.

An export has no labeling configuration, so results are read by their types: Pairwise, Ranker with or without buckets,
Choices that name a response or a tie, Rating or Number of each response, TextArea. A cancelled annotation is a skip,
and a ground truth is an adjudication. Everything else that an annotator entered is in the judgment's note.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from files.fields import as_number, kind_of, list_field, object_field, objects_field, shown, text_field
from preferences.formats.labeling_tools import (
    FLAGS,
    SKIPPED,
    Said,
    Shown,
    milliseconds_field,
    moment_field,
    ranks_in_order,
    rated_place,
    shown_in,
    verdict_ranks,
    vote_of,
)
from preferences.formats.parts import (
    UNKNOWN,
    JudgedTask,
    Report,
    Row,
    Vote,
    content_id,
    is_sound_prompt,
    rest,
)
from preferences.records import OVERALL, Task

OWN = ("task_id", "warning")  # fields of the tasks' data that are read
_BUCKET = re.compile(r"(?:.*[^0-9])?([0-9]{1,2})")


def read(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    data = object_field(where, row, "data")
    asked = shown_in(f"{where}: data", data)
    task = _task(where, asked, data, objective)
    if not is_sound_prompt(where, task.prompt, report):
        return
    for name in ("predictions", "drafts"):
        if row.get(name):
            report.add(
                name, where, f"{len(list_field(where, row, name))} {name}, which nobody has submitted", "left out"
            )
    annotations = objects_field(where, row, "annotations")
    placed = [(f"{where}: annotations[{number}]", own) for number, own in enumerate(annotations)]
    placed.sort(key=lambda one: moment_field(one[0], one[1], "created_at"))
    votes = [_vote(place, own, asked, task.objective, report) for place, own in placed]
    if any(votes) or not placed:
        yield JudgedTask(where, task, tuple(vote for vote in votes if vote))


def _task(where: str, asked: Shown, data: Row, objective: str) -> Task:
    return Task(
        task_id=text_field(where, data, "task_id")
        if data.get("task_id") is not None
        else content_id("label-studio", asked.prompt, asked.responses, ()),
        prompt=asked.prompt,
        responses=asked.responses,
        sources=(UNKNOWN,) * len(asked.responses),
        objective=objective or OVERALL,
        details=rest(data, *asked.fields, *OWN),
        warning=data["warning"] if isinstance(data.get("warning"), str) else "",
    )


# ---- one annotation ----


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
