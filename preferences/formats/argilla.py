"""Argilla 2's records: as `records.to_json` and `Dataset.to_disk` write them (nested), and as `records.to_datasets` and
`Dataset.to_hub` do (a column per field, `QUESTION.responses`, `QUESTION.responses.users`, `QUESTION.responses.status`).

A record does not say what kind its questions are, so responses are read by their values: a list of all responses is a
ranking, a number rates one response, a label that names a response or a tie is a verdict. Discarded responses are skips
and drafts are left out, where the file says so: nested records have no status. Argilla's client also drops the ranks of
a ranking, so ties come back as an order; ranks in the file are used.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from files.fields import is_number, kind_of, list_field, object_field, objects_field, optional_text, shown
from preferences.formats.labeling_tools import (
    FLAGS,
    NOTES,
    SKIPPED,
    Said,
    Shown,
    chosen_place,
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
    plain,
    rest,
)
from preferences.records import OVERALL, Task

USERS, STATUS, RESPONSES = ".responses.users", ".responses.status", ".responses"
OWN = ("task_id", "objective", "warning")  # metadata that is read
RECORD_FIELDS = ("id", "status", "_server_id")  # of a flat record, next to its fields, metadata and questions

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
    by_user = _flat_answers(where, row) if is_flat else _nested_answers(where, row)
    _report_suggestions(where, row, report, is_flat=is_flat)
    if (
        not is_flat
        and row.get("status") == "pending"
        and any(not of for one in by_user.values() for _, of in one.values())
    ):
        found = "the record is pending, and does not say who has submitted an answer"
        report.add("possibly drafts", where, found, "kept as answers")
    votes = [_vote(where, user, answers, asked, task.objective, report) for user, answers in by_user.items()]
    if any(votes) or not by_user:
        yield JudgedTask(where, task, tuple(vote for vote in votes if vote))


def _task(where: str, asked: Shown, fields: Row, metadata: Row, objective: str, *, is_flat: bool) -> Task:
    others = {} if is_flat else {name: value for name, value in metadata.items() if name not in OWN}
    questions = [name for name in fields if RESPONSES in name or ".suggestion" in name] if is_flat else []
    task_id = optional_text(where, metadata, "task_id")
    return Task(
        task_id=task_id or content_id("argilla", asked.prompt, asked.responses, ()),
        prompt=asked.prompt,
        responses=asked.responses,
        sources=(UNKNOWN,) * len(asked.responses),
        objective=objective or optional_text(where, metadata, "objective") or OVERALL,
        details=rest(fields, *asked.fields, *questions, *((*OWN, *RECORD_FIELDS) if is_flat else ())) | plain(others),
        warning=optional_text(where, metadata, "warning"),
    )


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


def _vote(where: str, user: str, answers: Answers, asked: Shown, objective: str, report: Report) -> Vote | None:
    said = Said()
    for question, (value, _) in answers.items():
        if value is not None:
            _read_answer(f"{where}: question {question!r}, user {user!r}", question, value, asked, said)
    statuses = {status for _, status in answers.values()}
    if "discarded" in statuses:
        return Vote(user, (), note=said.note or SKIPPED, kind="skip")
    if "draft" in statuses:
        report.add("draft", where, f"{user} has not submitted an answer", "left out")
        return None
    return vote_of(where, said, asked, report, labeler=user, objective=objective)


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
