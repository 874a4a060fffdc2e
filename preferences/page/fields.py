"""A posted form's fields, and reading one number per response from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

LETTERS = "ABCDEFGHI"  # the names of responses on the page


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
        wrong.append(f"Response {', '.join(missing)} has no {noun}." if len(missing) == 1 else _several(missing, noun))
    for place, value in enumerate(found):
        if value is not None and not lowest <= value <= highest:
            which = "the response" if num_responses == 1 else f"response {LETTERS[place]}"
            wrong.append(f"The {noun} of {which} is {value}; it must be {lowest} to {highest}.")
    return [value or 0 for value in found]


def _several(letters: Sequence[str], noun: str) -> str:
    return f"Responses {', '.join(letters[:-1])} and {letters[-1]} have no {noun}."
