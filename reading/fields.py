"""Fields of a row, checked. Every error is a ValueError that names file, line, field and what was expected."""

import math
import reprlib
from collections.abc import Mapping
from typing import Any

SHOWN_CHARACTERS = 60
SHOWN_NAMES = 20  # of a row's fields


def shown(value: Any) -> str:
    """The value as an error message shows it, cut to SHOWN_CHARACTERS; never raises, whatever the value is."""
    if type(value) is int and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print those of thousands of digits
    told = _SHORT.repr(value)
    return told if len(told) <= SHOWN_CHARACTERS else f"{told[: SHOWN_CHARACTERS - 3]}..."


class _Short(reprlib.Repr):
    """Repr that looks at the first few items alone, so that a list of millions costs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = SHOWN_CHARACTERS
        self.maxlist, self.maxdict = 9, 4  # as many as a task has responses

    def repr_int(self, value: int, _level: int) -> str:
        return shown(value) if value.bit_length() > 64 else repr(value)


_SHORT = _Short()


def names(row: Mapping[str, Any]) -> str:
    """The row's fields as an error message lists them."""
    first = sorted(map(str, row))[:SHOWN_NAMES]
    return f"{first}" + (f" and {len(row) - SHOWN_NAMES} more" if len(row) > SHOWN_NAMES else "")


def text_field(where: str, row: Mapping[str, Any], field: str) -> str:
    """A non-empty string."""
    value = any_text(where, row, field)
    if not value.strip():
        raise ValueError(f"{where}: field {field!r} is empty; text was expected")
    return value


def any_text(where: str, row: Mapping[str, Any], field: str) -> str:
    """A string, which may be empty."""
    value = present(where, row, field)
    if not isinstance(value, str):
        raise ValueError(f"{where}: field {field!r} is {type(value).__name__}; a string was expected")
    return value


def present(where: str, row: Mapping[str, Any], field: str) -> Any:
    """Whatever the field holds."""
    if field not in row:
        raise ValueError(f"{where}: field {field!r} is missing; found {names(row)}")
    return row[field]


def optional_text(where: str, row: Mapping[str, Any], field: str) -> str:
    """A string; "" where the field is missing or null."""
    return "" if row.get(field) is None else any_text(where, row, field)


def name_field(where: str, row: Mapping[str, Any], field: str) -> str:
    """A name or a number that identifies something, as text; "" where the field is missing or null."""
    value = row.get(field)
    if type(value) is int:
        return str(whole_field(where, row, field, -(2**63), 2**63 - 1))
    return optional_text(where, row, field)


def list_field(where: str, row: Mapping[str, Any], field: str) -> list[Any]:
    """A list of anything."""
    value = present(where, row, field)
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where}: field {field!r} is {type(value).__name__}; a list was expected")
    return list(value)


def object_field(where: str, row: Mapping[str, Any], field: str) -> dict[str, Any]:
    """A JSON object."""
    value = present(where, row, field)
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: field {field!r} is {type(value).__name__}; an object was expected")
    return dict(value)


def objects_field(where: str, row: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    """A list of JSON objects."""
    found = list_field(where, row, field)
    for index, item in enumerate(found):
        if not isinstance(item, Mapping):
            raise ValueError(f"{where}: {field}[{index}]: {type(item).__name__} found; an object was expected")
    return [dict(item) for item in found]


def number_field(where: str, row: Mapping[str, Any], field: str) -> float:
    """A finite number."""
    value = present(where, row, field)
    if not is_number(value):
        raise ValueError(f"{where}: field {field!r} is {shown(value)}; a number was expected")
    number: float = value
    return number


def numbers_field(where: str, row: Mapping[str, Any], field: str) -> tuple[float, ...]:
    """A list of finite numbers, which may be empty."""
    values = list_field(where, row, field)
    for index, value in enumerate(values):
        if not is_number(value):
            raise ValueError(f"{where}: field '{field}[{index}]' is {shown(value)}; a number was expected")
    return tuple(values)


def is_number(value: Any) -> bool:
    """Whether it is a finite int (of 64 bits at most) or float, and no bool."""
    return (type(value) is int and value.bit_length() < 64) or (type(value) is float and math.isfinite(value))


def as_number(value: Any) -> float | None:
    """A finite number, or the one that a text spells; None where it is neither."""
    if is_number(value):
        number: float = value
        return number
    if not isinstance(value, str) or len(value) > SHOWN_CHARACTERS:
        return None
    try:
        number = float(value)
    except ValueError:  # Python has no other way to ask
        return None
    return number if math.isfinite(number) else None


def whole_field(where: str, row: Mapping[str, Any], field: str, low: int, high: int) -> int:
    """A whole number from `low` to `high`."""
    value = present(where, row, field)
    if type(value) is not int or not low <= value <= high:
        wanted = f"a whole number from {low} to {high}"
        raise ValueError(f"{where}: field {field!r} is {shown(value)}; {wanted} was expected")
    return value


def checked_messages(where: str, messages: Any, field: str, *, ends_with: str) -> list[dict[str, str]]:
    """The turns in `field`, none of them empty, the last one from `ends_with`."""
    turns = any_messages(where, messages, field)
    for index, message in enumerate(turns):
        text_field(f"{where}: {field}[{index}]", message, "content")
    if turns[-1]["role"] != ends_with:
        raise ValueError(
            f"{where}: field '{field}[{len(turns) - 1}].role' is {turns[-1]['role']!r};"
            f" the last turn must be the {ends_with}'s"
        )
    return turns


def any_messages(where: str, messages: Any, field: str) -> list[dict[str, str]]:
    """The turns in `field`, at least one, in known roles; their texts may be empty."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: field {field!r} is {type(messages).__name__}; a non-empty list was expected")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in ("system", "user", "assistant"):
            raise ValueError(f"{where}: field '{field}[{index}].role': system, user or assistant was expected")
        any_text(f"{where}: {field}[{index}]", message, "content")
    return [{"role": message["role"], "content": message["content"]} for message in messages]
