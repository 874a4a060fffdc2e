"""Every documented format of conversations is recognised, and rows that fit none, two or another one are refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from files.conversations import FORMATS, ConversationReader
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


def conversation(**last: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", **last}]}


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
        ([{"conversations": [{"from": "tool", "value": "x"}]}], r"'conversations\[0\].from' is 'tool'; system, human"),
        ([conversation(content=PARTS)], r"messages\[1\]: content\[1\] is a part of type 'image_url'; only text parts"),
        ([conversation(content=None, tool_calls=[{"id": 1}])], r"field 'messages\[1\].tool_calls' holds a tool call"),
    ],
)
def test_ambiguous_rows_are_refused(tmp_path: Path, rows: list[dict[str, Any]], words: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
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
