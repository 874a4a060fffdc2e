"""Reading a labeler's form into an answer, with sentences for the page about what is missing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from preferences.page.config import LabelingConfig
from preferences.page.service import TaskForm
from preferences.records import Answer, Judgment

MIN_RATING, MAX_RATING = 1, 7
MAX_NOTE_CHARACTERS = 4_000
LETTERS = "ABCDEFGHI"


@dataclass(frozen=True)
class Fields:
    """A posted form: single values, and the values of checkboxes."""

    values: Mapping[str, str]
    ticked: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def text(self, name: str) -> str:
        return self.values.get(name, "")

    def number(self, name: str) -> int | None:
        """Returns the integer, or None if there is none. It accepts only digits, so not '1_0' or ' 1'."""
        found = self.text(name)
        return int(found) if found.isascii() and found.isdigit() and len(found) < 18 else None


def task_form(fields: Fields) -> TaskForm:
    """Returns what the form sends back about its task. The seal is checked later."""
    return TaskForm(
        fields.text("task"), fields.number("revision") or 0, fields.number("shown_at") or 0, fields.text("seal")
    )


def read_answer(fields: Fields, num_responses: int, config: LabelingConfig) -> tuple[Answer | None, list[str]]:
    """Returns the answer, in the order shown, or None and a sentence for each thing that is wrong."""
    wrong: list[str] = []
    ranks = _read_each(fields, "rank", num_responses, 1, num_responses, wrong)
    ratings = _read_each(fields, "rating", num_responses, MIN_RATING, MAX_RATING, wrong) if config.asks_ratings else []
    flags = [tuple(fields.ticked.get(f"flags_{place}", ())) for place in range(num_responses)]
    unknown = sorted({flag for marked in flags for flag in marked} - set(config.flags))
    if unknown:
        wrong.append(f"“{unknown[0]}” is not one of the marks that you can give.")
    note = fields.text("note").strip()
    if len(note) > MAX_NOTE_CHARACTERS:
        wrong.append(f"The note has {len(note)} characters; at most {MAX_NOTE_CHARACTERS} are allowed.")
    if wrong:
        return None, wrong
    marked = tuple(flags) if any(flags) else ()
    return Answer(tuple(ranks), 0, tuple(ratings), marked, note), []


def answer_fields(judgment: Judgment, order: Sequence[int]) -> Fields:
    """Returns the form of a stored answer, for responses shown in `order`, so that it can be changed."""
    values, ticked = {"note": judgment.note}, {}
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


def _read_each(fields: Fields, name: str, num_responses: int, lowest: int, highest: int, wrong: list[str]) -> list[int]:
    found = [fields.number(f"{name}_{place}") for place in range(num_responses)]
    missing = [LETTERS[place] for place, value in enumerate(found) if value is None]
    if missing:
        wrong.append(f"Response {', '.join(missing)} has no {name}." if len(missing) == 1 else _several(missing, name))
    for place, value in enumerate(found):
        if value is not None and not lowest <= value <= highest:
            wrong.append(f"The {name} of response {LETTERS[place]} is {value}; it must be {lowest} to {highest}.")
    return [value or 0 for value in found]


def _several(letters: Sequence[str], name: str) -> str:
    return f"Responses {', '.join(letters[:-1])} and {letters[-1]} have no {name}."
