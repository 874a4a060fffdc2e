"""Records of other labeling tools, Argilla and Label Studio.

These tools let users choose the names of fields and questions. What a file does not say is read from those names:
`prompt` and `response_1`, `answer_b` or a list `responses` hold the texts; `rating_1` or `response_1_helpful` rates the
first response. What cannot be placed is kept in the judgment's note.

Argilla 2's records are read as `records.to_json` and `Dataset.to_disk` write them (nested), and as
`records.to_datasets` and `Dataset.to_hub` do (a column per field, `QUESTION.responses`, `QUESTION.responses.users`,
`QUESTION.responses.status`). A record does not say what kind its questions are, so responses are read by their values:
a list of all responses is a ranking, a number rates one response, a label that names a response or a tie is a verdict.
Discarded responses are skips and drafts are left out, where the file says so: nested records have no status. Argilla's
client also drops the ranks of a ranking, so ties come back as an order; ranks in the file are used.

Label Studio's tasks are read from exports as JSON, a task per row, with its annotations. An export has no labeling
configuration, so results are read by their types: Pairwise, Ranker with or without buckets, Choices that name a
response or a tie, Rating or Number of each response, TextArea. A cancelled annotation is a skip, and a ground truth is
an adjudication. Everything else that an annotator entered is in the judgment's note.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from files.fields import (
    any_text,
    as_number,
    is_number,
    kind_of,
    list_field,
    names,
    number_field,
    object_field,
    objects_field,
    optional_text,
    shown,
    text_field,
)
from preferences.formats.parts import (
    UNKNOWN,
    JudgedTask,
    Report,
    Row,
    Vote,
    as_note,
    imported_task,
    is_sound_prompt,
    plain,
    ranks_of,
    rest,
)
from preferences.records import MAX_MILLISECONDS, MAX_RESPONSES, Kind, Message, Task, require_moment

PROMPTS = ("prompt", "instruction", "question", "conversation", "messages", "dialogue", "input", "query")
LISTS = ("responses", "answers", "completions", "outputs", "candidates", "items")
ALONE = ("response", "answer", "completion", "output", "generation", "reply")  # fields that may hold a single response
TEXTS = ("body", "text", "content", "response", "html")  # of a response in a list of objects
NOTES = ("note", "notes", "comment", "comments", "reason", "explanation", "feedback")
FLAGS = ("flags", "flag", "marks")  # of a question about what applies to a response
SKIPPED = "skipped"  # the reason of a skip for which the labeler gave none
ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "ai": "assistant", "bot": "assistant", "gpt": "assistant", "model": "assistant",
}  # fmt: skip
_WORDS = "response|answer|completion|output|candidate|generation|reply|option|model|assistant|text"
_NUMBERED = re.compile(rf"({_WORDS})s?[ _-]?([1-9]|[a-i])", re.IGNORECASE)
_OPTION = re.compile(rf"(?:(?:{_WORDS})s?[ _-]?)?([1-9]|[a-i])", re.IGNORECASE)
_PLACE = re.compile(r"(?<![a-z0-9])([1-9]|[a-i])(?![a-z0-9])|(?<=[a-z])([1-9])(?![0-9])", re.IGNORECASE)
_TIE = re.compile(r"tie[ds]?\b|equal|same\b|both\b|neither\b|draw\b|no preference|about the same", re.IGNORECASE)


@dataclass(frozen=True)
class Shown:
    """What a labeler saw: the prompt, the responses, what names each response, and the fields that held all of it."""

    prompt: tuple[Message, ...]
    responses: tuple[str, ...]
    names: tuple[str, ...]
    fields: tuple[str, ...]


def shown_in(where: str, fields: Mapping[str, Any]) -> Shown:
    """Finds prompt and responses. Raises: ValueError naming file, line and field."""
    asked = next((name for name in PROMPTS if fields.get(name) is not None), None)
    if asked is None:
        raise ValueError(f"{where}: a prompt was expected in one of {', '.join(PROMPTS)}; found {names(fields)}")
    prompt = _prompt(where, fields, asked)
    if not prompt:
        raise ValueError(f"{where}: field {asked!r} has no messages; at least one was expected")
    listed = next((name for name in LISTS if isinstance(fields.get(name), list | tuple | Mapping)), None)
    if listed is not None:
        found = _listed(f"{where}: {listed}", fields[listed])
        used: tuple[str, ...] = (listed,)
    else:
        alone = [name for name in ALONE if isinstance(fields.get(name), str)][:1]
        found = {name: any_text(where, fields, name) for name in _numbered(fields) or alone}
        used = tuple(found)
    if not 1 <= len(found) <= MAX_RESPONSES:
        raise ValueError(
            f"{where}: 1 to {MAX_RESPONSES} responses were expected, in a list {' or '.join(LISTS[:2])}, in fields such"
            " as 'response_1' and 'response_2', or a single one in 'response'; found"
            f" {len(found) or 'none in ' + names(fields)}"
        )
    return Shown(prompt, tuple(found.values()), tuple(found), (asked, *used))


def _numbered(fields: Mapping[str, Any]) -> list[str]:
    """Returns the fields of the word that most of the numbered fields begin with, in order of their numbers."""
    by_word: dict[str, list[str]] = {}
    for name, value in fields.items():
        if value is not None and (match := _NUMBERED.fullmatch(name)):
            by_word.setdefault(match[1].lower(), []).append(name)
    most = max(by_word.values(), key=len) if by_word else []
    return sorted(most, key=lambda name: name[-1].lower())


def _listed(where: str, found: Any) -> dict[str, str]:
    if isinstance(found, Mapping):
        return {str(name): any_text(where, found, name) for name in found}
    texts: dict[str, str] = {}
    for number, item in enumerate(found, start=1):
        place = f"{where}[{number - 1}]"
        if isinstance(item, str):
            texts[str(number)] = item
            continue
        if not isinstance(item, Mapping):
            raise ValueError(f"{place} is {kind_of(item)}; a text, or an object with an id and a body, was expected")
        name = next((name for name in TEXTS if name in item), TEXTS[0])
        texts[str(item.get("id", number))] = any_text(place, item, name)
    if len(texts) < len(found):
        raise ValueError(f"{where}: two items have the same id; a different id for each was expected")
    return texts


def _prompt(where: str, fields: Mapping[str, Any], name: str) -> tuple[Message, ...]:
    """Returns a prompt that is a text, or a list of turns in any of the tools' spellings."""
    if isinstance(fields[name], str):
        return (Message("user", fields[name]),)
    turns = []
    for number, turn in enumerate(list_field(where, fields, name)):
        place = f"{where}: {name}[{number}]"
        if not isinstance(turn, Mapping):
            raise ValueError(f"{place} is {kind_of(turn)}; an object with a role and a content was expected")
        speaker = next((own for own in ("role", "author", "speaker", "from") if own in turn), "role")
        role = ROLES.get(any_text(place, turn, speaker).strip().lower())
        if role is None:
            raise ValueError(
                f"{place}: field {speaker!r} is {shown(turn[speaker])}; one of {names(ROLES)} was expected"
            )
        text = next((own for own in ("content", "text", "value") if own in turn), "content")
        turns.append(Message(role, any_text(place, turn, text)))
    return tuple(turns)


# ---- what a labeler said ----


@dataclass
class Said:
    """One labeler's answers to the questions about one task. `ratings` are by what is rated, then by response."""

    ranks: tuple[int, ...] = ()
    ratings: dict[str, dict[int, float]] = field(default_factory=dict)
    flags: dict[int, list[str]] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)  # for the note

    def rate(self, question: str, about: str, rating: float, asked: Shown) -> None:
        """Adds a number that answers a question about the field `about` ("" = the file does not say which)."""
        place = rated_place(question, about, asked)
        if place is None:
            self.others[question] = rating
        else:
            self.ratings.setdefault(place[0], {})[place[1]] = rating

    @property
    def note(self) -> str:
        """What a person wrote, if that is all there is; otherwise JSON."""
        filled = {name: value for name, value in self.others.items() if value not in (None, "", [], {})}
        if len(filled) == 1 and isinstance(text := next(iter(filled.values())), str) and {*filled} <= {*NOTES}:
            return text
        return as_note(filled)


def chosen_place(option: str, asked: Shown) -> int | None:
    """Returns the index of the response that an option names: by its field, as "left", "B" or "Response 2"."""
    if option in asked.names:
        return asked.names.index(option)
    if len(asked.names) == 2 and option.lower() in ("left", "right"):
        return ("left", "right").index(option.lower())
    match = _OPTION.fullmatch(option.strip())
    return _index(match[1], asked) if match else None


def rated_place(question: str, about: str, asked: Shown) -> tuple[str, int] | None:
    """Returns what a question asks and of which response, from its name and the field that it is about."""
    if len(asked.names) == 1:  # every question that is not about the prompt is about the only response
        name = asked.names[0]
        without = question if name.isdigit() or name not in question else question.replace(name, "").strip(" _-")
        return None if about == asked.fields[0] else (_without(without, "1"), 0)
    if about in asked.names:
        index = asked.names.index(about)
        return _without(question, str(index + 1)), index
    for index, name in sorted(enumerate(asked.names), key=lambda entry: -len(entry[1])):
        if not name.isdigit() and name in question:
            return question.replace(name, "").strip(" _-") or "rating", index
    places = list(_PLACE.finditer(question.replace("_", " ")))
    if len(places) == 1 and (found := _index(places[0][1] or places[0][2], asked)) is not None:
        return (question[: places[0].start()] + question[places[0].end() :]).strip(" _-") or "rating", found
    return None


def _without(question: str, number: str) -> str:
    return re.sub(rf"[ _-]?{number}$", "", question).strip(" _-") or "rating"


def _index(number: str, asked: Shown) -> int | None:
    index = int(number) - 1 if number.isdigit() else ord(number.lower()) - ord("a")
    return index if index < len(asked.names) else None


def verdict_ranks(option: str, asked: Shown) -> tuple[int, ...]:
    """Returns the ranks that a choice between two responses gives; () if it names neither of them and no tie."""
    if len(asked.names) != 2:
        return ()
    if _TIE.match(option.strip()):
        return (1, 1)
    place = chosen_place(option, asked)
    return () if place is None else (1, 2) if place == 0 else (2, 1)


def vote_of(
    where: str,
    said: Said,
    asked: Shown,
    report: Report,
    *,
    labeler: str,
    objective: str,
    created_at: float = 0.0,
    milliseconds: int = 0,
    kind: Kind = "answer",
) -> Vote | None:
    """Returns a labeler's vote, or None and a warning if the answers order nothing.

    Without a ranking, ratings order the responses: by the objective if it is one of the things rated, and otherwise by
    the mean of all of them. A single response only has to be rated or marked.
    """
    num = len(asked.responses)
    complete = {name: rated for name, rated in said.ratings.items() if len(rated) == num}
    for name in said.ratings.keys() - complete.keys():
        found = f"{name} of {len(said.ratings[name])} of {num} responses"
        report.add("not all rated", where, found, "these ratings are in the note")
    used = {objective: complete[objective]} if objective in complete else complete
    ratings = tuple(sum(rated[place] for rated in used.values()) / len(used) for place in range(num)) if used else ()
    others = dict(said.others)
    if len(complete) > 1 or len(complete) < len(said.ratings):
        others["ratings"] = {name: {asked.names[i]: r for i, r in of.items()} for name, of in said.ratings.items()}
    ranks = said.ranks or (ranks_of(ratings) if num > 1 else (1,) if ratings or said.flags else ())
    if not ranks:
        found = "gave no order of the responses" if num > 1 else "neither rated nor marked the response"
        report.add("nothing to rank", where, f"{labeler} {found}", "left out")
        return None
    return Vote(
        labeler=labeler,
        ranks=ranks,
        ratings=ratings,
        flags=tuple(tuple(said.flags.get(place, ())) for place in range(num)) if said.flags else (),
        note=Said(others=others).note,
        created_at=created_at,
        kind=kind,
        milliseconds=milliseconds,
    )


def moment_field(where: str, row: Row, name: str) -> float:
    """Returns a time, in seconds since the epoch, from ISO 8601; 0 if the field is missing, null or empty."""
    if not row.get(name):
        return 0.0
    text = any_text(where, row, name)
    try:
        seconds = datetime.fromisoformat(text).timestamp()
    except ValueError:
        expected = "a time such as 2026-11-27T10:00:00Z"
        raise ValueError(f"{where}: field {name!r} is {shown(text)}; {expected} was expected") from None
    return require_moment(where, f"field {name!r}", seconds)


def milliseconds_field(where: str, row: Row, name: str) -> int:
    """Returns a time in seconds as milliseconds; 0 if the field is missing or null."""
    if row.get(name) is None:
        return 0
    return min(max(round(number_field(where, row, name) * 1000), 0), MAX_MILLISECONDS)


def ranks_in_order(where: str, groups: Iterable[Sequence[Any]], asked: Shown) -> tuple[int, ...]:
    """Returns ranks from groups of tied options, the best group first; () if some response is in none.

    Raises: ValueError for an option that names no response, or one that appears twice.
    """
    ranks: dict[int, int] = {}
    for rank, group in enumerate([group for group in groups if group], start=1):
        for option in group:
            place = chosen_place(option, asked) if isinstance(option, str) else None
            if place is None or place in ranks:
                wrong = "a response that is ranked twice" if place in ranks else "no response"
                raise ValueError(f"{where}: {shown(option)} names {wrong}; each of {[*asked.names]} once was expected")
            ranks[place] = rank
    return tuple(ranks[place] for place in range(len(asked.names))) if len(ranks) == len(asked.names) else ()


# ---- Argilla ----


USERS, STATUS, RESPONSES = ".responses.users", ".responses.status", ".responses"
ARGILLA_FIELDS = ("task_id", "objective", "warning")  # metadata that is read
RECORD_FIELDS = ("id", "status", "_server_id")  # of a flat record, next to its fields, metadata and questions

Answers = dict[str, tuple[Any, str]]  # one user's answer and its status ("" = the file does not say), by question


def read_argilla(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    is_flat = any(name.endswith(USERS) for name in row)
    fields = {**row} if is_flat else object_field(where, row, "fields")
    given = row if is_flat else row.get("metadata")
    metadata: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    asked = shown_in(where if is_flat else f"{where}: fields", fields)
    task = _argilla_task(where, asked, fields, metadata, objective, is_flat=is_flat)
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
    votes = [_argilla_vote(where, user, answers, asked, task.objective, report) for user, answers in by_user.items()]
    if any(votes) or not by_user:
        yield JudgedTask(where, task, tuple(vote for vote in votes if vote))


def _argilla_task(where: str, asked: Shown, fields: Row, metadata: Row, objective: str, *, is_flat: bool) -> Task:
    others = {} if is_flat else {name: value for name, value in metadata.items() if name not in ARGILLA_FIELDS}
    questions = [name for name in fields if RESPONSES in name or ".suggestion" in name] if is_flat else []
    unread = rest(fields, *asked.fields, *questions, *((*ARGILLA_FIELDS, *RECORD_FIELDS) if is_flat else ()))
    return imported_task(
        "argilla",
        asked.prompt,
        asked.responses,
        objective or optional_text(where, metadata, "objective"),
        unread | plain(others),
        task_id=optional_text(where, metadata, "task_id"),
        warning=optional_text(where, metadata, "warning"),
    )


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


def _argilla_vote(where: str, user: str, answers: Answers, asked: Shown, objective: str, report: Report) -> Vote | None:
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
        if ranks := _argilla_ranks(where, items, asked):
            said.ranks = ranks
            return
        place = rated_place(question, "", asked)
        if place is not None and place[0] in FLAGS and all(isinstance(item, str) for item in items):
            said.flags[place[1]] = items
        else:
            said.others[question] = items
    elif is_number(value):
        said.rate(question, "", value, asked)
    elif isinstance(value, str):
        verdict = verdict_ranks(value, asked) if question not in NOTES else ()
        if verdict and rated_place(question, "", asked) is None:
            said.ranks = said.ranks or verdict
        else:
            said.others[question] = value
    else:
        raise ValueError(f"{where}: the value is {kind_of(value)}; text, a number or a list was expected")


def _argilla_ranks(where: str, items: list[Any], asked: Shown) -> tuple[int, ...]:
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


# ---- Label Studio ----


LABEL_STUDIO_FIELDS = ("task_id", "warning")  # fields of the tasks' data that are read
_BUCKET = re.compile(r"(?:.*[^0-9])?([0-9]{1,2})")


def read_label_studio(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    data = object_field(where, row, "data")
    asked = shown_in(f"{where}: data", data)
    task = _label_studio_task(where, asked, data, objective)
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
    votes = [_label_studio_vote(place, own, asked, task.objective, report) for place, own in placed]
    if any(votes) or not placed:
        yield JudgedTask(where, task, tuple(vote for vote in votes if vote))


def _label_studio_task(where: str, asked: Shown, data: Row, objective: str) -> Task:
    task_id = text_field(where, data, "task_id") if data.get("task_id") is not None else ""
    warning = data["warning"] if isinstance(data.get("warning"), str) else ""
    details = rest(data, *asked.fields, *LABEL_STUDIO_FIELDS)
    return imported_task(
        "label-studio", asked.prompt, asked.responses, objective, details, task_id=task_id, warning=warning
    )


def _label_studio_vote(where: str, row: Row, asked: Shown, objective: str, report: Report) -> Vote | None:
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
        said.ranks = _label_studio_ranks(where, object_field(where, value, "ranker"), asked)
    elif "rating" in value or "number" in value:
        name = "rating" if "rating" in value else "number"
        number = as_number(value[name])
        if number is None:
            raise ValueError(f"{where}: field {name!r} is {shown(value[name])}; a number was expected")
        said.rate(control, about, number, asked)
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
    place = rated_place(control, about, asked)
    if place is not None and place[0] in FLAGS:
        said.flags.setdefault(place[1], []).extend(choices)
    elif verdict and place is None:
        said.ranks = said.ranks or verdict
    else:
        said.others[control] = choices[0] if len(choices) == 1 else choices


def _label_studio_ranks(where: str, ranker: Row, asked: Shown) -> tuple[int, ...]:
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
