"""Calls of tools in what an assistant writes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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
