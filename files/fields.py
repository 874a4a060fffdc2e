"""Reading and checking fields of a row. Every error is a ValueError with file, line, field and what was expected."""

import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from files.strict_json import parse_json

SHOWN_CHARACTERS = 60
SHOWN_NAMES = 20  # field names of a row that an error message lists


def shown(value: Any) -> str:
    """Formats a value for an error message, cut to SHOWN_CHARACTERS. Never raises."""
    if type(value) is int and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print thousands of digits
    text = _SHORT.repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


class _Short(reprlib.Repr):
    """A repr that reads only the first few items, so that a list of millions costs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = SHOWN_CHARACTERS
        self.maxlist, self.maxdict = 9, 4  # as many as a task has responses

    def repr_int(self, value: int, _level: int) -> str:
        return shown(value) if value.bit_length() > 64 else repr(value)


_SHORT = _Short()


def names(row: Mapping[str, Any]) -> str:
    """Lists the row's fields for an error message."""
    first = sorted(map(str, row))[:SHOWN_NAMES]
    return f"{first}" + (f" and {len(row) - SHOWN_NAMES} more" if len(row) > SHOWN_NAMES else "")


def kind_of(value: Any) -> str:
    """Names a value's type for an error message; None is "null", as in JSON."""
    return "null" if value is None else type(value).__name__


def text_field(where: str, row: Mapping[str, Any], field: str) -> str:
    """Returns a string that is not empty."""
    value = any_text(where, row, field)
    if not value.strip():
        raise ValueError(f"{where}: field {field!r} is empty; text was expected")
    return value


def any_text(where: str, row: Mapping[str, Any], field: str) -> str:
    """Returns a string, which may be empty."""
    value = present(where, row, field)
    if not isinstance(value, str):
        raise ValueError(f"{where}: field {field!r} is {kind_of(value)}; a string was expected")
    return value


def present(where: str, row: Mapping[str, Any], field: str) -> Any:
    """Returns the field's value, of any type."""
    if field not in row:
        raise ValueError(f"{where}: field {field!r} is missing; found {names(row)}")
    return row[field]


def optional_text(where: str, row: Mapping[str, Any], field: str) -> str:
    """Returns a string, or "" if the field is missing or null."""
    return "" if row.get(field) is None else any_text(where, row, field)


def name_field(where: str, row: Mapping[str, Any], field: str) -> str:
    """Returns a name, or a number that identifies something, as text; "" if the field is missing or null."""
    value = row.get(field)
    if type(value) is int:
        return str(whole_field(where, row, field, -(2**63), 2**63 - 1))
    return optional_text(where, row, field)


def list_field(where: str, row: Mapping[str, Any], field: str) -> list[Any]:
    """Returns a list of any values."""
    value = present(where, row, field)
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where}: field {field!r} is {kind_of(value)}; a list was expected")
    return list(value)


def object_field(where: str, row: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Returns a JSON object."""
    value = present(where, row, field)
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: field {field!r} is {kind_of(value)}; an object was expected")
    return dict(value)


def objects_field(where: str, row: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    """Returns a list of JSON objects."""
    items = list_field(where, row, field)
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise ValueError(f"{where}: field '{field}[{index}]' is {kind_of(item)}; an object was expected")
    return [dict(item) for item in items]


def number_field(where: str, row: Mapping[str, Any], field: str) -> float:
    """Returns a finite number."""
    value = present(where, row, field)
    if not is_number(value):
        raise ValueError(f"{where}: field {field!r} is {shown(value)}; a number was expected")
    number: float = value
    return number


def numbers_field(where: str, row: Mapping[str, Any], field: str) -> tuple[float, ...]:
    """Returns a list of finite numbers, which may be empty."""
    values = list_field(where, row, field)
    for index, value in enumerate(values):
        if not is_number(value):
            raise ValueError(f"{where}: field '{field}[{index}]' is {shown(value)}; a number was expected")
    return tuple(values)


def is_number(value: Any) -> bool:
    """Whether the value is an int of at most 64 bits or a finite float, and not a bool."""
    return (type(value) is int and value.bit_length() < 64) or (type(value) is float and math.isfinite(value))


def as_number(value: Any) -> float | None:
    """Converts a finite number, or a text that spells one, to a number; returns None for anything else."""
    if is_number(value):
        number: float = value
        return number
    if not isinstance(value, str) or len(value) > SHOWN_CHARACTERS:
        return None
    try:
        number = float(value)
    except ValueError:  # Python has no other way to test it
        return None
    return number if math.isfinite(number) else None


def whole_field(where: str, row: Mapping[str, Any], field: str, low: int, high: int) -> int:
    """Returns an integer from `low` to `high`."""
    value = present(where, row, field)
    if type(value) is not int or not low <= value <= high:
        wanted = f"a whole number from {low} to {high}"
        raise ValueError(f"{where}: field {field!r} is {shown(value)}; {wanted} was expected")
    return value


def text_or_messages(where: str, row: Mapping[str, Any], field: str) -> Any:
    """Returns a text, or a list that should contain messages."""
    value = present(where, row, field)
    if not isinstance(value, str | list | tuple):
        raise ValueError(f"{where}: field {field!r} is {kind_of(value)}; a text or a list of messages was expected")
    return value


def checked_messages(where: str, messages: Any, field: str, *, ends_with: str) -> list[dict[str, str]]:
    """Returns the turns in `field`. No turn may be empty, and the last one must be from `ends_with`."""
    turns = any_messages(where, messages, field)
    for index, message in enumerate(turns):
        text_field(f"{where}: {field}[{index}]", message, "content")
    if turns[-1]["role"] != ends_with:
        raise ValueError(
            f"{where}: field '{field}[{len(turns) - 1}].role' is {turns[-1]['role']!r};"
            f" the last turn must be the {ends_with}'s"
        )
    return turns


def any_messages(where: str, messages: Any, field: str, *, takes_tools: bool = False) -> list[dict[str, Any]]:
    """Returns the turns in `field`: at least one, with known roles. Their texts may be empty.

    The role `developer`, OpenAI's newer name, becomes `system`. Content may be text, or OpenAI's list of parts; these
    must all be texts, and are joined. With `takes_tools`, turns may be calls of tools (`tool_calls`, next to which the
    content may be null) and their results (role `tool`), and the first may have the schemas of the tools (`tools`).
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"{where}: field {field!r} is {kind_of(messages)}; a non-empty list was expected")
    turns = [_message(where, message, f"{field}[{index}]", takes_tools) for index, message in enumerate(messages)]
    for index, message in enumerate(messages if takes_tools else ()):
        if tools := tools_field(f"{where}: {field}[{index}]", message, "tools"):
            if index:
                raise ValueError(f"{where}: field '{field}[{index}].tools': only the first message may have tools")
            turns[0]["tools"] = tools
    return turns


def _message(where: str, message: Any, field: str, takes_tools: bool) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, Mapping) else None
    roles = ("system", "user", "assistant", *(["tool"] if takes_tools else []))
    if role not in (*roles, "developer"):
        role_found = f" is {shown(role)};" if role is not None else ":"
        raise ValueError(
            f"{where}: field '{field}.role'{role_found} {', '.join(roles[:-1])} or {roles[-1]} was expected"
        )
    if message.get("function_call"):
        raise ValueError(
            f"{where}: field '{field}.function_call' holds a call in OpenAI's older form; tool_calls was expected"
        )
    calls = message.get("tool_calls")
    if calls and (not takes_tools or role != "assistant"):
        wanted = "only an assistant's message may have calls" if takes_tools else "only texts are read here"
        raise ValueError(f"{where}: field '{field}.tool_calls' holds a tool call; {wanted}")
    if calls:
        has_content = message.get("content") is not None
        content = _content(f"{where}: {field}", message) if has_content else ""
        return {"role": role, "content": content, "tool_calls": tool_calls(where, calls, f"{field}.tool_calls")}
    checked = {"role": "system" if role == "developer" else role, "content": _content(f"{where}: {field}", message)}
    names = {name: optional_text(f"{where}: {field}", message, name) for name in ("tool_call_id", "name")}
    return checked | ({name: text for name, text in names.items() if text} if role == "tool" else {})


def tool_calls(where: str, calls: Any, field: str) -> list[dict[str, Any]]:
    """Returns calls of tools as OpenAI's API has them, with objects as arguments. They may be objects or JSON text."""
    checked = []
    for index, call in enumerate(objects_field(where, {field: calls}, field)):
        place = f"{field}[{index}]"
        if call.get("type") not in (None, "function"):
            raise ValueError(f"{where}: field '{place}.type' is {shown(call['type'])}; function was expected")
        function = object_field(f"{where}: {place}", call, "function")
        name = text_field(f"{where}: {place}", function, "name")
        arguments = from_json(where, present(f"{where}: {place}", function, "arguments"), f"{place}.function.arguments")
        if not isinstance(arguments, Mapping):
            raise ValueError(
                f"{where}: field '{place}.function.arguments' is {kind_of(arguments)}; an object, or its JSON text, was"
                " expected"
            )
        call_id = optional_text(f"{where}: {place}", call, "id")
        checked.append(
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            | ({"id": call_id} if call_id else {})
        )
    return checked


def tools_field(where: str, row: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    """Returns the schemas of a row's tools, as OpenAI's API has them; none if the field is missing or empty.

    The list may be JSON text, and its items may be the functions themselves.
    """
    tools = from_json(where, row.get(field) or [], field)
    checked = []
    for index, tool in enumerate(objects_field(where, {field: tools}, field)):
        function = tool if "function" not in tool else object_field(f"{where}: {field}[{index}]", tool, "function")
        text_field(f"{where}: {field}[{index}]", function, "name")
        checked.append({"type": "function", "function": function})
    return checked


def from_json(where: str, value: Any, field: str) -> Any:
    """Returns the value of JSON text; another value without fields that are null, which Parquet adds to objects."""
    if not isinstance(value, str):
        return _without_nulls(value)
    try:
        return parse_json("", value)
    except ValueError as error:
        raise ValueError(f"{where}: field {field!r} is {shown(value)}: {str(error).removeprefix(': ')}") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _content(where: str, message: Mapping[str, Any]) -> str:
    """Returns a message's text, or OpenAI's text parts joined."""
    if not isinstance(message.get("content"), list | tuple):
        return any_text(where, message, "content")
    texts = []
    for index, part in enumerate(objects_field(where, message, "content")):
        if part.get("type") != "text":
            raise ValueError(
                f"{where}: content[{index}] is a part of type {shown(part.get('type'))}; only text parts are read"
            )
        texts.append(any_text(f"{where}: content[{index}]", part, "text"))
    return "".join(texts)


_jobs: list[Path] = []


def remember_job(file: Path) -> None:
    """Let messages name this job file, and say that another file is next to it."""
    _jobs.append(file)


def last_job() -> Path | None:
    """Returns the job file that was remembered last."""
    return _jobs[-1] if _jobs else None


def no_such_file(name: str | Path) -> str:
    """Returns "no such file" for a path that does not exist, with the folder that a relative path was looked up in."""
    path = Path(name)
    if path.is_absolute():
        return "no such file"
    here, folders = Path.cwd(), (job.resolve().parent for job in _jobs)
    beside = next((folder for folder in folders if folder != here and (folder / path).exists()), None)
    hint = f"; {beside / path} exists, so run heed in {beside}, or write that path" if beside else ""
    return f"no such file in {here}, where relative paths start{hint}"
