"""Calls of tools in what an assistant writes, in the formats that chat templates of published models use.

- Hermes, Qwen2.5, Qwen3 and Heed's "chat": `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once or more.
- Llama 3.1 to 3.3: the whole answer is `{"name": ..., "parameters": {...}}`, several with `;` between them; the token
  `<|python_tag|>` may come first.
- Mistral: `[TOOL_CALLS]` and a list of {"name": ..., "arguments": {...}}.

What is meant as a call but cannot be read is a call with a `failure`, so that an environment can answer it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_LIST, _PYTHON = CALL_TOKENS = ("[TOOL_CALLS]", "<|python_tag|>")  # special tokens of Mistral and Llama
_THOUGHTS = ("<think>", "</think>")
_BARE = re.compile(r'\s*\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"]*"\s*,\s*"(parameters|arguments)"\s*:')
_SHOWN_CHARACTERS = 60


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


def read_tool_calls(text: str, chat_template: str = "") -> AssistantMessage:
    """Returns the assistant's turn with its calls. Never raises.

    The text must still have the special tokens that open calls, so use `Tokenizer.assistant_message` for tokens. The
    chat template says which format the model writes; without one, `<tool_call>`, `[TOOL_CALLS]` and `<|python_tag|>`
    open calls. A call in thoughts, up to `</think>`, is none.
    """
    opened, closed = _THOUGHTS
    start = text.rfind(closed) + len(closed) if closed in text else len(text) if opened in text else 0
    thoughts, answer = text[:start], text[start:]
    is_llama = '"parameters": ' in chat_template and "tool_calls" in chat_template and _OPEN not in chat_template
    if _LIST in answer or (_LIST in chat_template and answer.lstrip().startswith("[{")):
        content, calls = _read_list(answer)
    elif _OPEN in answer:
        content, calls = _read_tagged(answer)
    elif answer.lstrip().startswith(_PYTHON) or (is_llama and _BARE.match(answer)):
        content, calls = _read_bare(answer)
    else:
        return AssistantMessage(text, text)
    return AssistantMessage(text, (thoughts + content).strip(), tuple(calls))


def _read_tagged(answer: str) -> tuple[str, list[ToolCall]]:
    parts, calls, place = list[str](), list[ToolCall](), 0
    while (start := answer.find(_OPEN, place)) >= 0:
        parts.append(answer[place:start].strip())
        value, place, failure = _decoded(answer, start + len(_OPEN))
        end = answer.find(_CLOSE, place)
        if not failure and answer[place : max(end, place)].strip():
            failure = f"{_shown(answer[place:end])} follows the call's JSON; {_CLOSE} was expected"
        if not failure and end < 0:
            failure = f"{_CLOSE} is missing"
        calls.append(ToolCall("", {}, failure) if failure else _call(value))
        place = len(answer) if end < 0 else end + len(_CLOSE)
    return "\n".join(part for part in [*parts, answer[place:].strip()] if part), calls


def _read_list(answer: str) -> tuple[str, list[ToolCall]]:
    before, mark, listed = answer.rpartition(_LIST) if answer.count(_LIST) == 1 else answer.partition(_LIST)
    value, place, failure = _decoded(listed if mark else answer, 0)
    after = (listed if mark else answer)[place:].strip()
    if not failure and not isinstance(value, list):
        failure = f"{_shown(json.dumps(value))} follows {_LIST}; a list of calls was expected"
    if not failure and after:
        failure = f"{_shown(after)} follows the list of calls; nothing was expected"
    return before if mark else "", [ToolCall("", {}, failure)] if failure else [_call(item) for item in value]


def _read_bare(answer: str) -> tuple[str, list[ToolCall]]:
    listed, calls, place = answer.lstrip().removeprefix(_PYTHON), list[ToolCall](), 0
    while place < len(listed):
        value, place, failure = _decoded(listed, place)
        calls.append(ToolCall("", {}, failure) if failure else _call(value))
        after = listed[place:].strip()
        if failure or not after:
            break
        if not after.startswith(";"):
            calls[-1] = ToolCall(calls[-1].name, {}, f"{_shown(after)} follows the call; nothing was expected")
            break
        place = listed.index(";", place) + 1
    return "", calls


def _decoded(text: str, start: int) -> tuple[Any, int, str]:
    """Returns the JSON value at a place of the text, the place after it, and why there is none."""
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        value, end = _DECODER.raw_decode(text, start)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except RecursionError:
        return None, start, "a call is nested too deeply"
    except ValueError as error:
        return None, start, f"{_shown(text[start:])} is not JSON: {_reason(error)}"
    return value, end, ""


def _reason(error: ValueError) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else "it has a value that JSON does not allow"


def _refuse(name: str) -> Any:
    raise ValueError(name)


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _call(value: Any) -> ToolCall:
    """Returns the call that a JSON value stands for."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return ToolCall("", {}, f'{_shown(json.dumps(value))} has no "name"; the name of a tool was expected')
    arguments: Any = next((value[field] for field in ("arguments", "parameters") if field in value), {})
    if isinstance(arguments, str):  # OpenAI's API has them as text
        arguments, _, failure = _decoded(arguments, 0)
        if failure:
            return ToolCall(name, {}, f"arguments: {failure}")
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, f"arguments are {_shown(json.dumps(arguments))}; an object was expected")
    return ToolCall(name, arguments)


def _shown(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}...")
