"""Fields of a row, checked. Every error is a ValueError that names file, line, field and what was expected."""

import math
from collections.abc import Mapping
from typing import Any


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
        raise ValueError(f"{where}: field {field!r} is missing; found {sorted(row)}")
    return row[field]


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


def number_field(where: str, row: Mapping[str, Any], field: str) -> float:
    """A finite number."""
    value = present(where, row, field)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{where}: field {field!r} is {value!r}; a number was expected")
    return value


def whole_field(where: str, row: Mapping[str, Any], field: str, low: int, high: int) -> int:
    """A whole number from `low` to `high`."""
    value = present(where, row, field)
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{where}: field {field!r} is {value!r}; a whole number from {low} to {high} was expected")
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
        if not isinstance(message, dict) or message.get("role") not in ("system", "user", "assistant"):
            raise ValueError(f"{where}: field '{field}[{index}].role': system, user or assistant was expected")
        any_text(f"{where}: {field}[{index}]", message, "content")
    return [{"role": message["role"], "content": message["content"]} for message in messages]
