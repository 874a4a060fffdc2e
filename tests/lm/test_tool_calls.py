"""Calls in what an assistant writes: what templates write is read back, and nothing that is written raises."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lm.chat_template import with_tools
from lm.tokenizer import Tokenizer
from lm.tool_calls import CALL_TOKENS, AssistantMessage, ToolCall, read_tool_calls
from tests.examples import examples
from tests.lm.test_tools import ASK, TOOLS, both, call
from tests.lm.tool_templates import LLAMA_3_1, MISTRAL_NEMO, QWEN_2_5, TOOL_TEMPLATES

CALL = ToolCall("f", {"a": 1})
PIECES = (
    "<tool_call>",
    "</tool_call>",
    '{"name": "f"',
    ', "parameters": ',
    "{}",
    "}",
    ";",
    "[",
    "]",
    "<think>",
    "</think>",
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.text(max_size=8)
    | st.sampled_from(["</tool_call>", '"}', "; {"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)


@pytest.mark.parametrize(
    ("template", "text", "content", "calls"),
    [
        (QWEN_2_5, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [CALL]),
        (
            QWEN_2_5,
            'So\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "g"}</tool_call> Yes',
            "So\nYes",
            [CALL, ToolCall("g", {})],
        ),
        (QWEN_2_5, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [CALL]),
        (QWEN_2_5, '<think>\n<tool_call>{}\n</think>\n\nNo call.', "<think>\n<tool_call>{}\n</think>\n\nNo call.", []),
        (QWEN_2_5, '<think><tool_call>{"name": "f"}</tool_call>', '<think><tool_call>{"name": "f"}</tool_call>', []),
        (QWEN_2_5, '{"name": "f", "parameters": {"a": 1}}', '{"name": "f", "parameters": {"a": 1}}', []),
        (LLAMA_3_1, '{"name": "f", "parameters": {"a": 1}}', "", [CALL]),
        (LLAMA_3_1, '{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [CALL]),
        (
            LLAMA_3_1, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "arguments": {}}', "",
            [CALL, ToolCall("g", {})],
        ),
        (LLAMA_3_1, '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
        (MISTRAL_NEMO, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "123456789"}]', "", [CALL]),
        (
            MISTRAL_NEMO, 'So [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
            "So",
            [CALL, ToolCall("g", {})],
        ),
        (MISTRAL_NEMO, '[{"name": "f", "arguments": {"a": 1}}]', "", [CALL]),
        ("", "Just <b>text</b> and [1].", "Just <b>text</b> and [1].", []),
    ],
)  # fmt: skip
def test_published_formats_are_read(template: str, text: str, content: str, calls: list[ToolCall]) -> None:
    assert read_tool_calls(text, template) == AssistantMessage(text, content, tuple(calls))


@pytest.mark.parametrize(
    ("template", "text", "name", "failure"),
    [
        (QWEN_2_5, "<tool_call>f(1)</tool_call>", "", "'f(1)</tool_call>' is not JSON: Expecting value"),
        (QWEN_2_5, '<tool_call>{"name": "f", "arguments": {}}', "", "</tool_call> is missing"),
        (QWEN_2_5, '<tool_call>{"name": "f"} and</tool_call>', "", "'and' follows the call's JSON; </tool_call> was"),
        (QWEN_2_5, '<tool_call>{"arguments": {}}</tool_call>', "", 'has no "name"; the name of a tool was expected'),
        (QWEN_2_5, '<tool_call>["f"]</tool_call>', "", 'has no "name"'),
        (QWEN_2_5, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "f", "arguments are '[1]'; an object was"),
        (QWEN_2_5, '<tool_call>{"name": "f", "arguments": "{"}</tool_call>', "f", "arguments: '{' is not JSON"),
        (QWEN_2_5, '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "", "a value that JSON does not"),
        (QWEN_2_5, '<tool_call>{"name": "\\ud800"}</tool_call>', "", "a value that JSON does not allow"),
        (QWEN_2_5, f"<tool_call>{'[' * 100_000}", "", "a call is nested too deeply"),
        (QWEN_2_5, f'<tool_call>{{"name": "f", "arguments": {{"a": {"9" * 9000}}}}}</tool_call>', "", "not JSON"),
        (LLAMA_3_1, '<|python_tag|>brave_search.call(query="x")', "", "is not JSON: Expecting value"),
        (
            LLAMA_3_1,
            '{"name": "f", "parameters": {"a": 1}} Done.',
            "f",
            "'Done.' follows the call; nothing was expected",
        ),
        (LLAMA_3_1, '{"name": "f", "parameters": {"a": 1', "", "is not JSON"),
        (MISTRAL_NEMO, '[TOOL_CALLS]{"name": "f"}', "", "follows [TOOL_CALLS]; a list of calls was expected"),
        (MISTRAL_NEMO, '[TOOL_CALLS][{"name": "f", "arguments": {}}] So', "", "'So' follows the list of calls"),
    ],
)
def test_what_cannot_be_read_is_a_call_with_a_failure(template: str, text: str, name: str, failure: str) -> None:
    (found,) = read_tool_calls(text, template).tool_calls
    assert (found.name, dict(found.arguments)) == (name, {})
    assert failure in found.failure
    assert "\n" not in found.failure


@examples(100)
@given(text=st.lists(st.sampled_from([*CALL_TOKENS, *PIECES]), max_size=9).map("".join))
@example(text="[TOOL_CALLS][TOOL_CALLS]")
@pytest.mark.parametrize("template", [QWEN_2_5, LLAMA_3_1, MISTRAL_NEMO, ""])
def test_no_text_raises(template: str, text: str) -> None:
    said = read_tool_calls(text, template)
    assert said.text == text
    assert all(call.failure or call.name == "f" for call in said.tool_calls)


@examples(30)
@given(arguments=st.dictionaries(st.text(max_size=5), json_values, max_size=3))
@pytest.mark.parametrize("name", [*TOOL_TEMPLATES, "chat"])
def test_what_a_template_writes_is_read_back(tokenizer: Tokenizer, name: str, arguments: dict[str, Any]) -> None:
    ours = tokenizer.with_template("chat") if name == "chat" else both(name)[0]
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return
    tokens, is_response = ours.encode_conversation(with_tools([ASK, call(arguments)], TOOLS))
    said = ours.assistant_message([token for token, mine in zip(tokens, is_response, strict=True) if mine])
    assert list(said.tool_calls) == [ToolCall("multiply", arguments)]
    assert said.content == ("<think>\n\n</think>" if name == "Qwen3" else "")
