"""Parts that the formats of other labeling tools share: finding prompt and responses in a record's fields, and turning
a labeler's answers to several questions into one vote.

These tools let users choose the names of fields and questions. What a file does not say is read from those names:
`prompt` and `response_1`, `answer_b` or a list `responses` hold the texts; `rating_1` or `response_1_helpful` rates the
first response. What cannot be placed is kept in the judgment's note.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from files.fields import any_text, kind_of, list_field, names, number_field, shown
from preferences.formats.parts import Report, Row, Vote, as_note, ranks_of
from preferences.records import MAX_MILLISECONDS, MAX_RESPONSES, Kind, Message, require_moment

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
