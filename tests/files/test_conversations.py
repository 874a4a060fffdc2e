"""Every documented format of conversations is recognised, and rows that fit none, two or another one are refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from files.conversations import FORMATS, ConversationReader
from tests.rows import jsonl
from training.data import DataConfig, read_conversations, read_prompts

DOCS = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
USER, ANSWER = {"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}


def documented(part: str) -> list[tuple[str, dict[str, Any]]]:
    """(format, row) of a section's examples in docs/data.md."""
    section = DOCS.split(f"## {part}\n")[1].split("\n## ")[0]
    found = re.findall(r"\*\*(.+?)\*\*.*?\n\n```json\n(.*?)```", section, re.DOTALL)
    return [(name, json.loads(row)) for name, rows in found for row in rows.splitlines()]


DEMONSTRATIONS, PROMPTS = documented("Demonstrations"), documented("Prompts")


@pytest.mark.parametrize(("name", "row"), DEMONSTRATIONS)
def test_each_documented_demonstration_is_the_same_conversation(name: str, row: dict[str, Any]) -> None:
    reader = ConversationReader("demonstration")
    turns = reader.read("demos.jsonl: line 1", row)
    if name == "plain text":
        assert turns == [{"role": "text", "content": "Two and two is four."}]
    else:
        assert turns in ([USER, ANSWER], [SYSTEM, USER, ANSWER])
    assert reader.summary("demos.jsonl").endswith(f", {name}")


@pytest.mark.parametrize(("name", "row"), PROMPTS)
def test_each_documented_prompt_is_the_same_question(name: str, row: dict[str, Any]) -> None:
    reader = ConversationReader("prompt")
    assert reader.read("prompts.jsonl: line 1", row) in ([USER], [SYSTEM, USER])
    assert reader.summary("prompts.jsonl") == f"prompts.jsonl: 1 {'text' if 'text' in name else 'prompt'}, {name}"


def test_every_format_is_documented_for_both_parts() -> None:
    assert {name for name, _ in DEMONSTRATIONS} == {form.title("demonstration") for form in FORMATS}
    assert {name for name, _ in PROMPTS} == {form.title("prompt") for form in FORMATS}


SHAREGPT = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
ALPACA = {"instruction": "q", "input": "", "output": "a"}
PARTS = [{"type": "text", "text": "Look"}, {"type": "image_url", "image_url": {"url": "x"}}]


SAID = {"from": "human", "value": "What is 2 + 2?"}
CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"x": 2, "y": 2}}}
RESULT = {"role": "tool", "tool_call_id": "a", "name": "add", "content": "4"}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}


def conversation(**last: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", **last}]}


def called(result: dict[str, Any] | None = None, **function: Any) -> dict[str, Any]:
    call = {**CALL, "function": {**CALL["function"], **function}}  # type: ignore[dict-item]
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"messages": [USER, called, {**RESULT, **(result or {})}, ANSWER], "tools": [TOOL]}


@pytest.mark.parametrize(
    "row",
    [
        called(),
        called(arguments='{"x": 2, "y": 2}') | {"tools": json.dumps([TOOL])},
        called(arguments={"x": 2, "y": 2, "z": None}) | {"tools": [{**TOOL, "strict": None}]},  # as Parquet stores them
        {"messages": [{**USER, "tools": [TOOL["function"]]}, *called()["messages"][1:]]},
        {"prompt": called()["messages"][:1], "completion": called()["messages"][1:], "tools": [TOOL["function"]]},
        {
            "conversations": [
                SAID,
                {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 2, "y": 2}}'},
                {"from": "observation", "value": "4"},
                {"from": "gpt", "value": "4"},
            ],
            "tools": json.dumps([TOOL["function"]]),
        },
    ],
)
def test_calls_of_tools_are_read_in_every_format_that_has_them(tmp_path: Path, row: dict[str, Any]) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(row) + "\n")
    ((_, turns),) = read_conversations([DataConfig(source=str(path))])
    is_sharegpt = "conversations" in row
    call = {name: value for name, value in CALL.items() if name != "id" or not is_sharegpt}
    answered = {"role": "tool", "content": "4"} if is_sharegpt else RESULT
    assert turns == [
        {**USER, "tools": [TOOL]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        answered,
        ANSWER,
    ]
    if "completion" not in row:
        (prompt,) = read_prompts(DataConfig(source=str(path)))
        assert list(prompt.messages) == turns[:3], "a prompt may end with a tool's result"


def test_conversations_that_differ_in_their_tools_are_not_repeats(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    rows = [called(), called(arguments={"x": 1}), called() | {"tools": []}]
    path.write_text(jsonl([*rows, rows[0]]))
    heard: list[str] = []
    list(read_conversations([DataConfig(source=str(path))], heard.append))
    assert heard[1] == f"{path}: of 4 rows, 1 x seen before (kept)"
    path.write_text(jsonl({"prompt_id": "p", **row} for row in rows))
    with pytest.raises(ValueError, match="prompt_id 'p' is also that of a different prompt"):
        read_prompts(DataConfig(source=str(path)))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [SHAREGPT, ALPACA],
            r"line 2: field 'conversations' is missing; found \['input', 'instruction', 'output'\]; the row is Alpaca,"
            r" but .*d\.jsonl: line 1 is ShareGPT: one format per file was expected",
        ),
        (
            [SHAREGPT | {"instruction": "other", "output": "a"}],
            r"line 1: the row can be read as sharegpt \(conversations\) and alpaca \(instruction, output\), with"
            r" different results; .* format = 'sharegpt' or format = 'alpaca'",
        ),
        ([{"question": "q", "answer": "a"}], r"line 1: no format of a demonstration has .*\['answer', 'question'\]"),
        ([{"conversations": [{"from": "robot", "value": "x"}]}], r"'conversations\[0\].from' is 'robot'; system,"),
        ([conversation(content=PARTS)], r"messages\[1\]: content\[1\] is a part of type 'image_url'; only text parts"),
        (
            [conversation(content="", function_call={"name": "f"})],
            r"'messages\[1\].function_call' holds a call in OpenAI's",
        ),
        (
            [{"messages": [{**USER, "tool_calls": [CALL]}, ANSWER]}],
            r"'messages\[0\].tool_calls' holds .*; only an assistant's",
        ),
        ([conversation(content=None)], r"messages\[1\]: field 'content' is NoneType|'content' is null"),
        (
            [conversation(content=None, tool_calls=[{"id": "1"}])],
            r"messages\[1\].tool_calls\[0\]: field 'function' is missing",
        ),
        ([called(name="")], r"messages\[1\].tool_calls\[0\]: field 'name' is empty"),
        ([called(arguments="{a: 1}")], r"'messages\[1\].tool_calls\[0\].function.arguments' is '{a: 1}': not JSON"),
        (
            [called(arguments="[1]")],
            r"'messages\[1\].tool_calls\[0\].function.arguments' is list; an object, or its JSON",
        ),
        ([called(result={"tool_call_id": "b"})], r"'messages\[2\].tool_call_id' is 'b'; the id of a call before it"),
        ([called(result={"content": None})], r"messages\[2\]: field 'content' is null; a string was expected"),
        (
            [{"messages": [USER, RESULT, ANSWER]}],
            r"'messages\[1\].role' is 'tool' without a call before it; one result per",
        ),
        (
            [{"messages": [USER, *called()["messages"][1:3], RESULT, ANSWER]}],
            r"'messages\[3\].role' is 'tool' without a call",
        ),
        ([{**called(), "tools": "["}], r"field 'tools' is '\[': not JSON"),
        ([{**called(), "tools": [{"type": "function", "function": {}}]}], r"tools\[0\]: field 'name' is missing"),
        (
            [{"messages": [USER, {**ANSWER, "tools": [TOOL]}]}],
            r"'messages\[1\].tools': only the first message may have",
        ),
        (
            [{"conversations": [SAID, {"from": "observation", "value": "4"}]}],
            r"'conversations\[1\].from' is 'observation' without",
        ),
        (
            [{"conversations": [SAID, {"from": "function_call", "value": "add"}]}],
            r"'conversations\[1\].value' is 'add': not JSON",
        ),
    ],
)
def test_ambiguous_rows_are_refused(tmp_path: Path, rows: list[dict[str, Any]], words: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(jsonl(rows))
    with pytest.raises(ValueError, match=words):
        list(read_conversations([DataConfig(source=str(path))]))


def test_fields_that_agree_are_not_ambiguous_and_a_name_decides(tmp_path: Path) -> None:
    """As in published sets: one field has the question, another the whole conversation; or a text repeats the rest."""
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"prompt": "q", "messages": [USER, ANSWER], "text": "### q a"}) + "\n")
    heard: list[str] = []
    ((_, turns),) = read_conversations([DataConfig(source=str(path))], heard.append)
    assert turns == [USER, ANSWER]
    assert heard == [f"{path}: 1 conversation, messages"]
    with pytest.raises(ValueError, match=r"messages \(messages\) and prompt \(prompt\)"):
        read_prompts(DataConfig(source=str(path)))
    (prompt,) = read_prompts(DataConfig(source=str(path), format="prompt"))
    assert prompt.messages == ({"role": "user", "content": "q"},)
    same = tmp_path / "same.jsonl"
    same.write_text(json.dumps({"prompt": "q", "messages": [{"role": "user", "content": "q"}]}) + "\n")
    assert read_prompts(DataConfig(source=str(same)))[0].messages == prompt.messages
    with pytest.raises(ValueError, match="format is 'sharedgpt'; one of auto, messages, prompt, sharegpt"):
        DataConfig(source="x", format="sharedgpt")


@pytest.mark.parametrize(
    "row", [json.loads(row) for row in DOCS.split("## Tools\n")[1].split("```")[1].splitlines()[1:]]
)
def test_each_documented_row_with_tools_is_read(row: dict[str, Any]) -> None:
    turns = ConversationReader("demonstration").read("demos.jsonl: line 1", row)
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "assistant"]
    assert turns[0]["tools"][0]["function"]["name"] == "add"
    assert turns[1]["tool_calls"][0]["function"]["arguments"] == {"x": 2, "y": 2}
