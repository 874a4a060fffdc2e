"""Argilla 2's records: as `records.to_json` and `Dataset.to_disk` write them (nested), and as `records.to_datasets` and
`Dataset.to_hub` do (a column per field, `QUESTION.responses`, `QUESTION.responses.users`, `QUESTION.responses.status`).

A record does not say what kind its questions are, so responses are read by their values: a list of all responses is a
ranking, a number rates one response, a label that names a response or a tie is a verdict. Discarded responses are skips
and drafts are left out, where the file says so: nested records have no status. Argilla's client also drops the ranks of
a ranking, so ties come back as an order; ranks in the file are used.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from files.fields import is_number, kind_of, list_field, object_field, objects_field, optional_text, shown
from files.strict_json import parse_json
from preferences.formats.labeling_tools import (
    FLAGS,
    NOTES,
    SKIPPED,
    Said,
    Shown,
    all_flags,
    chosen_place,
    held_judgments,
    ranks_in_order,
    rated_place,
    response_names,
    shown_in,
    turns_as_text,
    verdict_ranks,
    vote_of,
)
from preferences.formats.parts import (
    JudgedTask,
    Project,
    Report,
    Row,
    Vote,
    content_id,
    is_sound_prompt,
    plain,
    rest,
)
from preferences.records import OVERALL, Judgment, StoredTask, Task

RECORDS, SETTINGS, DATASET = "records.json", ".argilla/settings.json", ".argilla/dataset.json"
USERS, STATUS, RESPONSES = ".responses.users", ".responses.status", ".responses"
OWN = ("task_id", "objective", "sources", "details", "warning", "labelers")  # metadata that Heed writes
RECORD_FIELDS = ("id", "status", "_server_id")  # of a flat record, next to its fields, metadata and questions
RATINGS = range(11)  # what a rating question may offer

Answers = dict[str, tuple[Any, str]]  # one user's answer and its status ("" = the file does not say), by question


def read(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    is_flat = any(name.endswith(USERS) for name in row)
    fields = {**row} if is_flat else object_field(where, row, "fields")
    given = row if is_flat else row.get("metadata")
    metadata: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    asked = shown_in(where if is_flat else f"{where}: fields", fields)
    task = _task(where, asked, fields, metadata, objective, is_flat=is_flat)
    if not is_sound_prompt(where, task.prompt, report):
        return
    labelers = _labelers(where, metadata)
    by_user = _flat_answers(where, row) if is_flat else _nested_answers(where, row)
    _report_suggestions(where, row, report, is_flat=is_flat)
    if (
        not is_flat
        and row.get("status") == "pending"
        and any(not of for one in by_user.values() for _, of in one.values())
    ):
        found = "the record is pending, and does not say who has submitted an answer"
        report.add("possibly drafts", where, found, "kept as answers")
    votes = [
        _vote(where, user, labelers.get(user, user), answers, asked, task.objective, report)
        for user, answers in by_user.items()
    ]
    if any(votes) or not by_user:
        yield JudgedTask(where, task, tuple(vote for vote in votes if vote))


def _task(where: str, asked: Shown, fields: Row, metadata: Row, objective: str, *, is_flat: bool) -> Task:
    sources = _own_json(where, metadata, "sources")
    details = _own_json(where, metadata, "details")
    if not isinstance(details, Mapping):
        others = {} if is_flat else {name: value for name, value in metadata.items() if name not in OWN}
        questions = [name for name in fields if RESPONSES in name or ".suggestion" in name] if is_flat else []
        details = rest(fields, *asked.fields, *questions, *((*OWN, *RECORD_FIELDS) if is_flat else ())) | plain(others)
    num = len(asked.responses)
    has_sources = isinstance(sources, list) and len(sources) == num and all(isinstance(one, str) for one in sources)
    task_id = optional_text(where, metadata, "task_id")
    return Task(
        task_id=task_id or content_id("argilla", asked.prompt, asked.responses, ()),
        prompt=asked.prompt,
        responses=asked.responses,
        sources=tuple(sources) if has_sources else ("unknown",) * num,
        objective=objective or optional_text(where, metadata, "objective") or OVERALL,
        details=details,
        warning=optional_text(where, metadata, "warning"),
    )


def _own_json(where: str, metadata: Row, name: str) -> Any:
    """Returns what Heed wrote as JSON text in a record's metadata; None if it is something else."""
    text = metadata.get(name)
    if not isinstance(text, str) or text[:1] not in ("[", "{"):
        return None
    return parse_json(f"{where}: metadata field {name!r}", text)


def _labelers(where: str, metadata: Row) -> dict[str, str]:
    """Returns the labelers' names by their ids in Argilla, which only records that Heed wrote have."""
    found = _own_json(where, metadata, "labelers")
    return {str(user): str(name) for user, name in found.items()} if isinstance(found, Mapping) else {}


# ---- one user's answers ----


def _nested_answers(where: str, row: Row) -> dict[str, Answers]:
    """Returns the answers by user, from {question: [{value, user_id}]}."""
    found: dict[str, Answers] = {}
    responses = object_field(where, row, "responses")
    for question in responses:
        place = f"{where}: responses"
        if responses[question] is None:  # Parquet adds it for a question that only other records have
            continue
        for number, response in enumerate(objects_field(place, responses, question)):
            user = _user(f"{place}: {question}[{number}]", response.get("user_id"), "user_id")
            status = optional_text(f"{place}: {question}[{number}]", response, "status")
            _add(found, f"{place}: {question}[{number}]", user, question, (response.get("value"), status))
    return found


def _flat_answers(where: str, row: Row) -> dict[str, Answers]:
    """Returns the answers by user, from the columns of each question."""
    found: dict[str, Answers] = {}
    for column in [name for name in row if name.endswith(USERS) and row[name] is not None]:
        question = column.removesuffix(USERS)
        users, values = (list_field(where, row, name) for name in (column, question + RESPONSES))
        given = row.get(question + STATUS)
        statuses = list_field(where, row, question + STATUS) if given is not None else [""] * len(users)
        if not len(users) == len(values) == len(statuses):
            raise ValueError(
                f"{where}: fields {question + RESPONSES!r}, {column!r} and {question + STATUS!r} have {len(values)},"
                f" {len(users)} and {len(statuses)} entries; as many of each were expected"
            )
        for number, (user, value, status) in enumerate(zip(users, values, statuses, strict=True)):
            place = f"{where}: {column}[{number}]"
            _add(found, place, _user(place, user, column), question, (value, str(status or "")))
    return found


def _user(where: str, user: Any, field: str) -> str:
    if not isinstance(user, str) or not user:
        raise ValueError(f"{where}: field {field!r} is {shown(user)}; a user's id was expected")
    return user


def _add(found: dict[str, Answers], where: str, user: str, question: str, answer: tuple[Any, str]) -> None:
    if question in found.setdefault(user, {}):
        raise ValueError(f"{where}: user {shown(user)} answers {question!r} twice; one answer was expected")
    found[user][question] = answer


def _vote(
    where: str, user: str, labeler: str, answers: Answers, asked: Shown, objective: str, report: Report
) -> Vote | None:
    said = Said()
    for question, (value, _) in answers.items():
        if value is not None:
            _read_answer(f"{where}: question {question!r}, user {user!r}", question, value, asked, said)
    statuses = {status for _, status in answers.values()}
    if "discarded" in statuses:
        return Vote(labeler, (), note=said.note or SKIPPED, kind="skip")
    if "draft" in statuses:
        report.add("draft", where, f"{labeler} has not submitted an answer", "left out")
        return None
    return vote_of(where, said, asked, report, labeler=labeler, objective=objective)


def _read_answer(where: str, question: str, value: Any, asked: Shown, said: Said) -> None:
    """Adds the answer to one question to what the user said."""
    if isinstance(value, list | tuple):
        items = [plain(item) for item in value]
        if ranks := _ranked(where, items, asked):
            said.ranks = ranks
            return
        place = rated_place(question, "", asked)
        if place is not None and place[0] in FLAGS and all(isinstance(item, str) for item in items):
            said.flags[place[1]] = items
        else:
            said.others[question] = items
    elif is_number(value):
        place = rated_place(question, "", asked)
        if place is None:
            said.others[question] = value
        else:
            said.ratings.setdefault(place[0], {})[place[1]] = value
    elif isinstance(value, str):
        verdict = verdict_ranks(value, asked) if question not in NOTES else ()
        if verdict and rated_place(question, "", asked) is None:
            said.ranks = said.ranks or verdict
        else:
            said.others[question] = value
    else:
        raise ValueError(f"{where}: the value is {kind_of(value)}; text, a number or a list was expected")


def _ranked(where: str, items: list[Any], asked: Shown) -> tuple[int, ...]:
    """Returns the ranks of a ranking's value, a list of options in order or of {value, rank}; () for another list."""
    options = [item.get("value") if isinstance(item, Mapping) else item for item in items]
    places = [chosen_place(option, asked) if isinstance(option, str) else None for option in options]
    if len(options) < 2 or None in places:
        return ()
    given = [rank for item in items if isinstance(item, Mapping) and type(rank := item.get("rank")) is int]
    if len(given) == len(items):
        groups = [[o for o, own in zip(options, given, strict=True) if own == rank] for rank in sorted({*given})]
        return ranks_in_order(where, groups, asked)
    return ranks_in_order(where, [[option] for option in options], asked)


def _report_suggestions(where: str, row: Row, report: Report, *, is_flat: bool) -> None:
    if is_flat:
        values = {name: value for name, value in row.items() if name.endswith(".suggestion")}
    else:
        values = object_field(where, row, "suggestions")
    given = [name for name in values if values[name] is not None]
    if given:
        report.add("suggestions", where, f"for {', '.join(given)}, by a program", "left out")


# ---- writing ----


def write(stored: Sequence[StoredTask], judgments: Sequence[Judgment], report: Report) -> Iterator[dict[str, Any]]:
    """Writes one record per task, judged or not. All have as many responses, because a ranking's options are fixed."""
    layout = _Layout(stored, judgments)
    for one, held in held_judgments(stored, judgments, report):
        where = f"task {one.task.task_id!r}"
        if len(one.task.responses) != layout.num_responses:
            found = f"{len(one.task.responses)} responses, and most tasks have {layout.num_responses}"
            report.add("other number of responses", where, found, "left out")
        else:
            yield layout.record(one.task, held, report)


def project_files(stored: Sequence[StoredTask], judgments: Sequence[Judgment]) -> Mapping[str, str]:
    layout = _Layout(stored, judgments)
    dataset = {"name": "labels", "status": "ready", "allow_extra_metadata": True, "guidelines": layout.guidelines}
    return {SETTINGS: json.dumps(layout.settings(), indent=2), DATASET: json.dumps(dataset, indent=2)}


PROJECT = Project(RECORDS, project_files, DATASET)


class _Layout:
    """The fields and questions that records and settings share."""

    def __init__(self, stored: Sequence[StoredTask], judgments: Sequence[Judgment]) -> None:
        numbers = [len(one.task.responses) for one in stored]
        self.num_responses = max(sorted({*numbers}), key=numbers.count)
        self.names = response_names(self.num_responses)
        self.guidelines = (
            "Read the prompt and the response. Rate and mark the response."
            if self.num_responses == 1
            else "Read the prompt and every response. Rank the responses; ties are allowed."
        )
        self.flags = [flag for flag in all_flags(judgments) if flag]
        if len(self.flags) == 1:  # a label question needs two labels
            self.flags.append("other" if self.flags != ["other"] else "none of these")
        self.num_labelers = max(one.num_labelers for one in stored)

    def record(self, task: Task, held: Sequence[Judgment], report: Report) -> dict[str, Any]:
        responses: dict[str, list[dict[str, Any]]] = {}
        for judgment in held:
            user = str(uuid5(NAMESPACE_URL, f"heed:{judgment.labeler}"))
            status = "discarded" if judgment.kind == "skip" else "submitted"
            for question, value in self._answers(judgment, report):
                responses.setdefault(question, []).append({"value": value, "user_id": user, "status": status})
        labelers = {str(uuid5(NAMESPACE_URL, f"heed:{one.labeler}")): one.labeler for one in held}
        metadata = {
            "task_id": task.task_id,
            "objective": task.objective,
            "sources": json.dumps(task.sources),
            "details": json.dumps(dict(task.details)),
            "labelers": json.dumps(labelers),
        }
        return {
            "id": task.task_id,
            "fields": {
                "prompt": turns_as_text(f"task {task.task_id!r}", task.prompt, report),
                **dict(zip(self.names, task.responses, strict=True)),
            },
            "metadata": metadata | ({"warning": task.warning} if task.warning else {}),
            "suggestions": {},
            "responses": responses,
            "vectors": {},
            "status": "pending",
            "_server_id": None,
        }

    def _answers(self, judgment: Judgment, report: Report) -> Iterator[tuple[str, Any]]:
        where = f"task {judgment.task_id!r}, labeler {judgment.labeler!r}"
        if len(judgment.ranks) > 1:
            ordered = sorted(zip(judgment.ranks, self.names, strict=True))
            yield "ranking", [{"value": name, "rank": rank} for rank, name in ordered]
        if judgment.ratings and all(rating in RATINGS for rating in judgment.ratings):
            for index, rating in enumerate(judgment.ratings):
                yield f"rating_{index + 1}", int(rating)
        elif judgment.ratings:
            found = f"ratings {shown([*judgment.ratings])}, not all whole numbers from 0 to {RATINGS[-1]}"
            report.add("unwritable ratings", where, found, "left out")
        for index, flags in enumerate(judgment.flags):
            if "" in flags:
                report.add("unwritable flag", where, "an empty flag", "left out")
            if held := [flag for flag in flags if flag]:
                yield f"flags_{index + 1}", held
        if judgment.note:
            yield "note", judgment.note
        elif len(judgment.ranks) == 1 and not judgment.ratings and not any(judgment.flags):
            report.add("nothing marked", where, "the response was not marked, and no question says that", "left out")

    def settings(self) -> dict[str, Any]:
        """Returns what `argilla.Settings.from_json` reads."""
        fields = [_field("prompt", {"type": "chat", "use_markdown": True})]
        fields += [_field(name, {"type": "text", "use_markdown": True}) for name in self.names]
        options = [{"value": name, "text": _title(name)} for name in self.names]
        ranking = _question("ranking", "Rank the responses, the best first", {"type": "ranking", "options": options})
        is_single = self.num_responses == 1
        questions = [] if is_single else [ranking]
        for index, name in enumerate(self.names):
            rating = {"type": "rating", "options": [{"value": value} for value in RATINGS]}
            title = "Rate the response" if is_single else f"Rate {_title(name).lower()}"
            questions.append(_question(f"rating_{index + 1}", title, rating, required=is_single and not self.flags))
            if self.flags:
                labels = [{"value": flag, "text": flag} for flag in self.flags]
                kind = {"type": "multi_label_selection", "options": labels, "options_order": "natural"}
                title = f"What applies to {'the response' if is_single else _title(name).lower()}?"
                questions.append(_question(f"flags_{index + 1}", title, kind, required=False))
        questions.append(_question("note", "Note", {"type": "text", "use_markdown": False}, required=False))
        return {
            "guidelines": self.guidelines,
            "questions": questions,
            "fields": fields,
            "vectors": [],
            "metadata": [],
            "allow_extra_metadata": True,
            "distribution": {"strategy": "overlap", "min_submitted": self.num_labelers},
            "mapping": None,
        }


def _field(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "title": _title(name), "required": True, "settings": settings}


def _question(name: str, title: str, settings: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
    return {"name": name, "title": title, "required": required, "settings": settings}


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()
