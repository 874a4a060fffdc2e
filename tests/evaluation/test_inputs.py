"""The prompts of a comparison, and the names of policies and judges."""

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.inputs import named_specs, read_compared_prompts
from training.data import DataConfig, Prompt


def read(tmp_path: Path, rows: list[dict[str, Any]], category: str = "") -> list[Prompt]:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_compared_prompts(DataConfig(source=str(path)), category)


def test_prompts_in_every_form(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Bye"},
    ]
    rows = [
        {"prompt": "Sing", "category": "music"},
        {"prompt_id": 17, "messages": turns, "kind": "talk", "dataset": "x"},
        {"prompt_id": "p", "prompt": turns[:1]},
        {"instruction": "Add", "input": "1 and 2", "dataset": "sums"},
    ]
    found = [prompt for row in rows for prompt in read(tmp_path, [row])]
    assert [(prompt.prompt_id, prompt.kind) for prompt in found] == [
        ("0", "music"),
        ("17", "talk"),
        ("p", ""),
        ("0", "sums"),
    ]
    assert [prompt.messages[-1]["content"] for prompt in found] == ["Sing", "Bye", "Hi", "Add\n\n1 and 2"]
    named = read(tmp_path, [{"prompt": "a", "level": 3}], "level")
    assert named[0].kind == "3"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [{"prompt_id": "a", "prompt": "x"}, {"prompt_id": "a", "prompt": "y"}],
            r"line 2: prompt_id 'a' is already .* line 1",
        ),
        ([{"prompt": "x"}, {"prompt": "y"}, {"prompt": " x\n"}], r"line 3: the prompt is the same as in .*line 1"),
        ([{"prompt": " "}], "line 1: field 'prompt' is empty"),
        ([{"prompt_id": None, "prompt": "x"}], "line 1: field 'prompt_id' is null"),
        ([{"messages": [{"role": "assistant", "content": "x"}]}], "line 1: .*the last turn must be the user's"),
        ([], "no prompts"),
    ],
)
def test_bad_prompts_are_named_by_line(tmp_path: Path, rows: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(tmp_path, rows)


def test_a_named_category_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 2: the category field 'level' is missing"):
        read(tmp_path, [{"prompt": "a", "level": "low"}, {"prompt": "b"}], "level")


def test_names_are_derived_and_unique() -> None:
    names = {
        "runs/demo/ppo/model": "ppo",
        "runs/demo/sft/model_ema": "sft",
        "Qwen/Qwen2.5-0.5B": "Qwen2.5-0.5B",
        "https://h.org/v1#gpt": "gpt",
        "out/best.jsonl.gz": "best",
        "out/all.json#tulu": "tulu",
        "mine=a/b=c": "mine",
        "gold:playground": "gold",
        "people:postgresql://u:p@h/db": "people",
        "judges/rewards.py:score": "rewards/score",
        "http://h.org:80/score": "h.org:80/score",
    }
    found = named_specs(list(names), "policy")
    assert [name for name, _ in found] == list(names.values())
    assert dict(found)["mine"] == "a/b=c"


def test_names_that_clash_grow() -> None:
    found = named_specs(["runs/one/ppo/model", "runs/two/ppo/model", "runs/two/sft/model"], "policy")
    assert [name for name, _ in found] == ["one/ppo", "two/ppo", "sft"]
    assert [name for name, _ in named_specs(["ppo=elsewhere", "runs/two/ppo/model"], "policy")] == ["ppo", "two/ppo"]


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        (["a=x", "a=y"], "policy 'a': the name is used twice"),
        (["x/a", "x/a"], "policy 'x/a' is given twice"),
        (["a=x", "a"], "policy 'a' would be called 'a' like another"),
    ],
)
def test_names_that_cannot_be_told_apart(specs: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        named_specs(specs, "policy")
