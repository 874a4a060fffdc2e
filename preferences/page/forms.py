"""Labelers' forms: parsing them into answers.

Parsing returns sentences for the page about what is missing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote_plus

from preferences.annotations import MAX_CRITERIA, MAX_EDIT_CHARACTERS, Annotations, CriterionRatings, TurnRating
from preferences.leases import Lease
from preferences.page.config import LabelingConfig
from preferences.page.security import MAX_BODY_BYTES
from preferences.page.service import TaskForm
from preferences.records import Answer, Judgment, ShownTask, assistant_turns

LETTERS = "ABCDEFGHI"  # the names of responses on the page
MIN_RATING, MAX_RATING = 1, 7
MAX_NOTE_CHARACTERS = 4_000
_TURN = re.compile(r"turn_\d{1,2}_\d{1,6}")  # the field of a turn's rating: criterion and turn


# ---- the fields of a form ----


@dataclass(frozen=True)
class Fields:
    """A posted form: single values, and the values of checkboxes."""

    values: Mapping[str, str]
    ticked: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def text(self, name: str) -> str:
        return self.values.get(name, "")

    def number(self, name: str) -> int | None:
        """Returns the integer, or None if there is none. It accepts only digits, so '1_0' and ' 1' give None."""
        found = self.text(name)
        return int(found) if found.isascii() and found.isdigit() and len(found) < 18 else None


def read_each(
    fields: Fields, name: str, num_responses: int, lowest: int, highest: int, wrong: list[str], *, noun: str
) -> list[int]:
    """Returns the number of each response in the fields NAME_0, NAME_1, ... (0 if it has none).

    Adds sentences to `wrong` about missing numbers and those outside `lowest` to `highest`.
    """
    found = [fields.number(f"{name}_{place}") for place in range(num_responses)]
    missing = [LETTERS[place] for place, value in enumerate(found) if value is None]
    if missing and num_responses == 1:
        wrong.append(f"The response has no {noun}.")
    elif missing:
        several = f"Responses {', '.join(missing[:-1])} and {missing[-1]} have no {noun}."
        wrong.append(f"Response {missing[0]} has no {noun}." if len(missing) == 1 else several)
    for place, value in enumerate(found):
        if value is not None and not lowest <= value <= highest:
            which = "the response" if num_responses == 1 else f"response {LETTERS[place]}"
            wrong.append(f"The {noun} of {which} is {value}; it must be {lowest} to {highest}.")
    return [value or 0 for value in found]


# ---- reading a form ----


def task_form(fields: Fields) -> TaskForm:
    """Returns what the form sends back about its task. The seal is checked later."""
    return TaskForm(
        fields.text("task"), fields.number("revision") or 0, fields.number("shown_at") or 0, fields.text("seal")
    )


def read_answer(fields: Fields, shown: ShownTask, config: LabelingConfig) -> tuple[Answer | None, list[str]]:
    """Returns the answer to a task, in the order shown, or None and a sentence for each mistake."""
    wrong: list[str] = []
    num, limits = len(shown.responses), (MIN_RATING, MAX_RATING)
    ranks = read_each(fields, "rank", num, 1, num, wrong, noun="rank") if num > 1 else [1]
    ratings = read_each(fields, "rating", num, *limits, wrong, noun="rating") if config.asks_ratings else []
    annotations = read_annotations(fields, shown, config, wrong)
    flags = [tuple(fields.ticked.get(f"flags_{place}", ())) for place in range(num)]
    unknown = sorted({flag for marked in flags for flag in marked} - set(config.flags))
    if unknown:
        wrong.append(f"“{unknown[0]}” is not one of the marks that you can give.")
    note = fields.text("note").strip()
    if len(note) > MAX_NOTE_CHARACTERS:
        wrong.append(f"The note has {len(note)} characters; at most {MAX_NOTE_CHARACTERS} are allowed.")
    if wrong:
        return None, wrong
    marked = tuple(flags) if any(flags) else ()
    return Answer(tuple(ranks), 0, tuple(ratings), marked, note, annotations), []


def answer_fields(judgment: Judgment, lease: Lease, config: LabelingConfig) -> Fields:
    """Returns the form of a stored answer to the lease's task, so that it can be changed."""
    order = lease.order
    values, ticked = {"note": judgment.note}, {}
    values |= annotation_fields(judgment.annotations.as_shown(order), lease.shown.responses, config)
    for place, index in enumerate(order):
        values[f"rank_{place}"] = str(judgment.ranks[index])
        if judgment.ratings:
            values[f"rating_{place}"] = f"{judgment.ratings[index]:.0f}"
        if judgment.flags:
            ticked[f"flags_{place}"] = list(judgment.flags[index])
    return Fields(values, ticked)


def read_reason(fields: Fields, config: LabelingConfig) -> str:
    """Returns why a task is skipped: a reason that was chosen, the labeler's own words, or both; "" if neither."""
    chosen, own = fields.text("chosen_reason"), fields.text("reason").strip()
    return ": ".join(part for part in (chosen if chosen in config.all_skip_reasons else "", own) if part)


def as_text(fields: Fields) -> str:
    """Returns what was entered into a form, as lines that can be copied; "" if nothing was."""
    lines = []
    for place, letter in enumerate(LETTERS):
        said = [f"{name} {value}" for name in ("rank", "rating") if (value := fields.text(f"{name}_{place}"))]
        by_criterion = ((number, fields.text(f"criterion_{number}_{place}")) for number in range(MAX_CRITERIA))
        said += [f"criterion {number + 1}: {value}" for number, value in by_criterion if value]
        marks = fields.ticked.get(f"flags_{place}", ())
        if said or marks:
            lines.append(f"Response {letter}: {', '.join([*said, *marks])}")
        if edit := fields.text(f"edit_{place}").strip():
            lines.append(f"Your version of {letter}: {edit}")
    rated = [(name.split("_"), value) for name, value in fields.values.items() if _TURN.fullmatch(name) and value]
    lines += [f"Turn {int(turn) + 1}, criterion {int(of) + 1}: {value}" for (_, of, turn), value in rated]
    for name, label in (("note", "Note"), ("question", "Question"), ("reason", "Reason to skip")):
        if fields.text(name).strip():
            lines.append(f"{label}: {fields.text(name)}")
    return "\n".join(lines)


# ---- criteria, ratings of earlier turns, and edits ----


def read_annotations(fields: Fields, shown: ShownTask, config: LabelingConfig, wrong: list[str]) -> Annotations:
    """Returns what the form says, in the order shown, and adds a sentence to `wrong` for each mistake."""
    responses, criteria = shown.responses, []
    for number, criterion in enumerate(config.criteria):
        allowed = list(criterion.choices)
        low, high = min(allowed), max(allowed)
        ratings = read_each(fields, f"criterion_{number}", len(responses), low, high, wrong, noun=criterion.name)
        criteria.append(CriterionRatings(criterion.name, tuple(ratings)))
    edits = _edits(fields, responses, wrong) if config.asks_edits else ()
    turns = tuple(_turns(fields, assistant_turns(shown.prompt), config, wrong))
    return Annotations(tuple(criteria), edits, turns)


def _turns(fields: Fields, turns: Sequence[int], config: LabelingConfig, wrong: list[str]) -> Iterator[TurnRating]:
    """Yields the ratings of the assistant's turns from the fields turn_CRITERION_TURN, all of which are expected."""
    for number, criterion in enumerate(config.criteria):
        if not criterion.each_turn:
            continue
        given = {turn: fields.number(f"turn_{number}_{turn}") for turn in turns}
        missing = [str(turn + 1) for turn, rating in given.items() if rating is None]
        if missing:
            named = f"Turn {missing[0]} has" if len(missing) == 1 else f"Turns {', '.join(missing)} have"
            wrong.append(f"{named} no {criterion.name}.")
        for turn, rating in given.items():
            if rating is not None and rating not in criterion.choices:
                expected = f"{min(criterion.choices)} to {max(criterion.choices)}"
                wrong.append(f"The {criterion.name} of turn {turn + 1} is {rating}; it must be {expected}.")
            yield TurnRating(turn, criterion.name, rating or 0)


def _edits(fields: Fields, responses: Sequence[str], wrong: list[str]) -> tuple[str, ...]:
    """Returns each response's edit; "" for one that was left as it is or emptied."""
    edits = []
    for place, response in enumerate(responses):
        edit = plain_lines(fields.text(f"edit_{place}"))
        if is_same_text(edit, response):
            edits.append("")
            continue
        if len(edit) > MAX_EDIT_CHARACTERS:
            found = f"{len(edit):,} characters; at most {MAX_EDIT_CHARACTERS:,} are allowed"
            wrong.append(f"Your version of response {LETTERS[place]} has {found}.")
        edits.append(edit.strip("\n"))
    return tuple(edits) if any(edits) else ()


def plain_lines(text: str) -> str:
    """Returns the text with \\n as its only line break. Browsers send \\r\\n."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def is_same_text(edit: str, response: str) -> bool:
    """Whether an edit changes nothing: it is empty, or differs only in white space at its ends."""
    return not edit.strip() or plain_lines(edit).strip() == plain_lines(response).strip()


def max_edit(responses: Sequence[str]) -> int:
    """Returns how many characters a response may have to be edited on the page: 0 if a form could not hold them all."""
    num_bytes = sum(len(quote_plus(response)) for response in responses)
    return MAX_EDIT_CHARACTERS if num_bytes <= MAX_BODY_BYTES // 2 else 0


def annotation_fields(found: Annotations, responses: Sequence[str], config: LabelingConfig) -> dict[str, str]:
    """Returns the fields of stored annotations, in the order shown, so that they can be changed."""
    values: dict[str, str] = {}
    for number, criterion in enumerate(config.criteria):
        for place, rating in enumerate(found.ratings_by(criterion.name)):
            values[f"criterion_{number}_{place}"] = f"{rating:.0f}"
        for turn, rating in found.turn_ratings_by(criterion.name).items():
            values[f"turn_{number}_{turn}"] = f"{rating:.0f}"
    for place, edit in enumerate(found.edits):
        values[f"edit_{place}"] = edit or responses[place]
    return values
