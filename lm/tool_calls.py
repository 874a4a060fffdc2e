"""Calls of tools in what an assistant writes."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call of the tool `name`. `failure` says why its arguments cannot be read; they are empty then."""

    name: str
    arguments: Mapping[str, Any]
    failure: str = ""


@dataclass(frozen=True)
class AssistantMessage:
    """A turn of the policy: its text as written, and the same without the calls that were read from it."""

    text: str
    content: str
    tool_calls: Sequence[ToolCall] = ()


def read_tool_calls(text: str) -> AssistantMessage:
    """Reads calls as Hermes and Qwen models write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    calls = [_read(match[1]) for match in _CALL.finditer(text)]
    return AssistantMessage(text, _CALL.sub("", text).strip(), calls)


def _read(body: str) -> ToolCall:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"a call is not JSON: {error}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, 'a call names no tool; {"name": ..., "arguments": {...}} was expected')
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], {}, "arguments are no object; one value per parameter was expected")
    return ToolCall(value["name"], arguments)
