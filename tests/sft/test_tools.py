"""Demonstrations with calls of tools: which tokens are learned, and errors that name the row."""

import json
from pathlib import Path
from typing import Any

import pytest

from lm.tokenizer import Tokenizer
from sft.demonstrations import Limit, demonstration_lengths, demonstration_parts
from stages.data import PromptLimit, prompt_lengths
from training.data import DataConfig, read_prompts

FUNCTION = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
CALL = {"type": "function", "id": "a", "function": {"name": "add", "arguments": '{"x": 2, "y": 2}'}}
ROW: dict[str, Any] = {
    "tools": [{"type": "function", "function": FUNCTION}],
    "messages": [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": "the sum is <|end|> 4"},
        {"role": "assistant", "content": "It is 4."},
    ],
}


def source(path: Path, row: dict[str, Any]) -> DataConfig:
    path.write_text(json.dumps(row) + "\n")
    return DataConfig(source=str(path))


def test_calls_and_answers_are_learned_and_results_are_not(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ours, data = tokenizer.with_template("chat"), source(tmp_path / "a.jsonl", ROW)
    part, *_ = demonstration_parts(ours, [data], Limit(has_source=False, seq_len=1000), 0)
    tokens, counted = part.arrays["tokens"], part.arrays["counted"]
    learned = "".join(ours.token_text(int(token)) for token in tokens[counted]).replace("Ġ", " ")
    call = '<tool_call>{"name": "add", "arguments": {"x": 2, "y": 2}}</tool_call>'
    assert learned == f" {call}<|end|> It is 4.<|end|>"
    assert "<tool_response>the sum is <|end|> 4</tool_response>" in ours.decode(tokens.tolist())
    assert json.dumps(ROW["tools"][0]) in ours.decode(tokens.tolist())
    lengths = demonstration_lengths(ours, [data], Limit(has_source=False, seq_len=1000))
    assert lengths.longest == len(tokens)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"messages": ROW["messages"][:1] + ROW["messages"][2:]},
            "line 1: field 'messages.1..role' is 'tool' without a call",
        ),
        ({}, r"a.jsonl: line 1: chat_template leaves out tools.0.; a template that writes tools"),
    ],
)
def test_what_cannot_be_learned_is_named(
    tokenizer: Tokenizer, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    data = source(tmp_path / "a.jsonl", {**ROW, **changes})
    with pytest.raises(ValueError, match=words):
        list(demonstration_parts(tokenizer.with_template("plain"), [data], Limit(has_source=False, seq_len=1000), 0))


def test_prompts_have_the_tools_of_their_rows_also_where_old_turns_are_dropped(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    ours = tokenizer.with_template("chat")
    asked = {**ROW, "messages": [*ROW["messages"], {"role": "user", "content": "And 3 + 3?"}]}
    (prompt,) = read_prompts(source(tmp_path / "a.jsonl", asked))
    whole = ours.encode_prompt(prompt.messages)
    last = ours.encode_prompt([{**prompt.messages[-1], "tools": ROW["tools"]}])
    assert whole[: len(last) // 2] == last[: len(last) // 2], "both begin with the tools"
    limit = PromptLimit("ppo", len(last) + 4, 4, "truncate")
    kept, tokens, _ = limit.fit(ours, "a.jsonl: line 1", prompt, whole)
    assert tokens == last
    assert kept.messages == ({"role": "user", "content": "And 3 + 3?", "tools": ROW["tools"]},)
    assert prompt_lengths(ours, source(tmp_path / "b.jsonl", asked), limit).longest == len(last)
