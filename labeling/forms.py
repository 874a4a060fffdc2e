"""What a labeler's form says, read into an answer; what is missing is named in words that the page can show."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from labeling.config import LabelingConfig
from labeling.labeling import ShownForm
from preferences.records import Answer

MIN_RATING, MAX_RATING = 1, 7
MAX_NOTE_CHARACTERS = 4_000
LETTERS = "ABCDEFGHI"


@dataclass(frozen=True)
class Fields:
    """A posted form: single values, and those of boxes that may be ticked together."""

    values: Mapping[str, str]
    ticked: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def text(self, name: str) -> str:
        return self.values.get(name, "")

    def number(self, name: str) -> int | None:
        """The whole number, or None where there is none. Digits alone, so that no '1_0' or ' 1' passes."""
        found = self.text(name)
        return int(found) if found.isascii() and found.isdigit() and len(found) < 18 else None


def shown_form(fields: Fields) -> ShownForm:
    """What the form brings back of its task; a seal that does not fit is found later."""
    return ShownForm(
        fields.text("task"), fields.number("revision") or 0, fields.number("shown_at") or 0, fields.text("seal")
    )


def read_answer(fields: Fields, num_responses: int, config: LabelingConfig) -> tuple[Answer | None, list[str]]:
    """The answer, responses in the order shown, or None and what is wrong, one sentence each."""
    wrong: list[str] = []
    ranks = _read_each(fields, "rank", num_responses, 1, num_responses, wrong)
    ratings = _read_each(fields, "rating", num_responses, MIN_RATING, MAX_RATING, wrong) if config.asks_ratings else []
    flags = [tuple(fields.ticked.get(f"flags_{place}", ())) for place in range(num_responses)]
    unknown = sorted({flag for marked in flags for flag in marked} - set(config.flags))
    if unknown:
        wrong.append(f"“{unknown[0]}” is not among the marks that can be given.")
    note = fields.text("note").strip()
    if len(note) > MAX_NOTE_CHARACTERS:
        wrong.append(f"The note has {len(note)} characters; at most {MAX_NOTE_CHARACTERS} can be kept.")
    if wrong:
        return None, wrong
    marked = tuple(flags) if any(flags) else ()
    return Answer(tuple(ranks), 0, tuple(ratings), marked, note), []


def _read_each(fields: Fields, name: str, num_responses: int, lowest: int, highest: int, wrong: list[str]) -> list[int]:
    found = [fields.number(f"{name}_{place}") for place in range(num_responses)]
    missing = [LETTERS[place] for place, value in enumerate(found) if value is None]
    if missing:
        wrong.append(f"Response {', '.join(missing)} has no {name}." if len(missing) == 1 else _several(missing, name))
    for place, value in enumerate(found):
        if value is not None and not lowest <= value <= highest:
            wrong.append(f"The {name} of response {LETTERS[place]} is {value}; {lowest} to {highest} is expected.")
    return [value or 0 for value in found]


def _several(letters: Sequence[str], name: str) -> str:
    return f"Responses {', '.join(letters[:-1])} and {letters[-1]} have no {name}."
