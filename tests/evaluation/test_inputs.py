"""The prompts of a comparison, and the names of policies and judges."""

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.inputs import clusters_of, named_runs, named_specs, read_compared_prompts, with_clusters
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


def test_a_name_with_several_specs_is_an_algorithm_with_several_runs() -> None:
    specs = ["ppo=runs/a/ppo", "runs/a/sft/model", "dpo=runs/b/dpo", "ppo=runs/b/ppo", "dpo=runs/c/dpo"]
    found, runs = named_runs(specs)
    assert found == [
        ("ppo/1", "runs/a/ppo"),
        ("sft", "runs/a/sft/model"),
        ("dpo/1", "runs/b/dpo"),
        ("ppo/2", "runs/b/ppo"),
        ("dpo/2", "runs/c/dpo"),
    ]
    assert runs == {"ppo": ["ppo/1", "ppo/2"], "dpo": ["dpo/1", "dpo/2"]}
    assert named_runs(["ppo=x", "dpo=y"]) == ([("ppo", "x"), ("dpo", "y")], {})


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        (["ppo=x", "ppo=y", "ppo=x"], "policy 'ppo': x is given twice; different runs were expected"),
        (["ppo=x", "ppo=y", "runs/c/ppo/model"], "'runs/c/ppo/model' would be called 'ppo' like others"),
        (["x", "x", "ppo=y"], "'x' is given twice"),
    ],
)
def test_runs_that_cannot_be_told_apart_are_refused(specs: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        named_runs(specs)


def test_prompts_are_clustered_by_a_field_of_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt_id": "c", "prompt": "x", "template": "t", "size": 3},
        {"prompt_id": "a", "prompt": "y", "template": "t", "size": 4},
        {"prompt_id": "b", "prompt": "z", "template": "u", "size": 3},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(source=str(path))
    prompts = read_compared_prompts(data, "", "template")
    assert [prompt.cluster for prompt in prompts] == ["t", "t", "u"]
    assert clusters_of(prompts) == {"a": "a", "c": "a", "b": "b"}
    plain = read_compared_prompts(data)
    assert (with_clusters(plain, data, ""), clusters_of(plain)) == (plain, {})
    assert with_clusters(plain, data, "template") == prompts
    assert [prompt.cluster for prompt in with_clusters(plain[1:], data, "size")] == ["4", "3"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "y"}, r"prompts.jsonl: line 2: the field 'template' to cluster by is missing; found \['prompt'\]"),
        ({"prompt": "y", "template": ""}, "line 2: the field 'template' to cluster by is ''; text or a whole number"),
        ({"prompt": "y", "template": 0.5}, "line 2: the field 'template' to cluster by is 0.5; text or a whole number"),
        ({"prompt": "y", "template": None}, "line 2: the field 'template' to cluster by is None; text or a whole"),
    ],
)
def test_rows_without_a_cluster_are_named_by_line(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(found) + "\n" for found in ({"prompt": "x", "template": "t"}, row)))
    data = DataConfig(source=str(path))
    with pytest.raises(ValueError, match=words):
        read_compared_prompts(data, "", "template")
    with pytest.raises(ValueError, match=words):
        with_clusters(read_compared_prompts(data), data, "template")
