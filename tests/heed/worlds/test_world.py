"""The files of a world: equal for equal seeds, disjoint, and with the intended flaws."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from heed.worlds.grammar import parse_text
from heed.worlds.instructions import kind_of, read_prompt
from heed.worlds.world import KIND_WEIGHTS, TEXT_WORDS, PlaygroundConfig, PlaygroundWorld
from stages.world import World

SMALL = PlaygroundConfig(
    num_pretrain_texts=200,
    num_pretrain_heldout=40,
    num_demonstrations=800,
    num_demonstrations_heldout=100,
    num_collect_prompts=200,
    num_ppo_prompts=500,
    num_compare_prompts=100,
)
PROMPT_FILES = ("demonstrations", "demonstrations_heldout", "collect_prompts", "ppo_prompts", "compare_prompts")


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    world: World = PlaygroundWorld(SMALL)
    world.write_data(folder, seed=1)
    return folder


def test_same_seed_same_bytes(folder: Path, tmp_path: Path) -> None:
    PlaygroundWorld(SMALL).write_data(tmp_path / "again", seed=1)
    PlaygroundWorld(SMALL).write_data(tmp_path / "other", seed=2)
    assert contents(tmp_path / "again") == contents(folder)
    other = contents(tmp_path / "other")
    assert all(other[name] != data for name, data in contents(folder).items())


def test_sizes_are_the_configs(folder: Path) -> None:
    sizes = {name: len(read(folder, name)) for name in ("pretrain", "pretrain_heldout", *PROMPT_FILES)}
    assert sizes == {
        "pretrain": 200,
        "pretrain_heldout": 40,
        "demonstrations": 800,
        "demonstrations_heldout": 100,
        "collect_prompts": 200,
        "ppo_prompts": 500,
        "compare_prompts": 100,
    }


def test_no_prompt_occurs_twice(folder: Path) -> None:
    prompts = [row["messages"][0]["content"] for name in PROMPT_FILES for row in read(folder, name)]
    assert len(prompts) == len(set(prompts)) == SMALL.num_prompts
    ids = [row["prompt_id"] for name in PROMPT_FILES if name.endswith("prompts") for row in read(folder, name)]
    assert len(ids) == len(set(ids))
    texts = [row["text"] for name in ("pretrain", "pretrain_heldout") for row in read(folder, name)]
    assert len(texts) == len(set(texts))


def test_twenty_thousand_prompts_are_possible(tmp_path: Path) -> None:
    config = SMALL.model_copy(update={"num_ppo_prompts": 20_000})
    PlaygroundWorld(config).write_data(tmp_path, seed=0)
    assert len({row["messages"][0]["content"] for row in read(tmp_path, "ppo_prompts")}) == 20_000


def test_rows_have_their_shape(folder: Path) -> None:
    for row in read(folder, "demonstrations"):
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    kinds = Counter(row["kind"] for row in read(folder, "ppo_prompts"))
    for row in read(folder, "ppo_prompts"):
        assert set(row) == {"prompt_id", "messages", "kind"}
        assert row["kind"] == kind_of(read_prompt(row["messages"][0]["content"]))
    for kind, weight in KIND_WEIGHTS.items():
        assert kinds[kind] / kinds.total() == pytest.approx(weight, abs=0.06)


def test_demonstrations_are_imperfect(folder: Path) -> None:
    demonstrations = [row["messages"] for row in read(folder, "demonstrations")]
    prompts, responses = ([messages[i]["content"] for messages in demonstrations] for i in (0, 1))
    scores = PlaygroundWorld(SMALL).gold_scores(prompts, responses)
    assert 0.54 <= sum(scores) / len(scores) <= 0.61
    assert 0.22 <= sum(score > 0.999 for score in scores) / len(scores) <= 0.34
    assert len({round(score, 6) for score in scores}) > 100


def test_pretraining_text_teaches_the_language_not_the_form(folder: Path) -> None:
    texts = [row["text"] for row in read(folder, "pretrain")]
    lengths = [len(text.split()) for text in texts]
    assert min(lengths) >= TEXT_WORDS[0]
    assert max(lengths) <= TEXT_WORDS[1] + 90
    sentences = [sentence for text in texts for sentence in parse_text(text) if "\n" not in sentence.text]
    assert sum(bool(sentence.groups) for sentence in sentences) / len(sentences) > 0.5
    assert not any(word in text for text in texts for word in ("Write", "Please", "Describe", "Tell me"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("labelers_rate", 1.5), ("num_labelers", 0), ("num_texts", 3), ("num_ppo_prompts", 10**6)],
)
def test_config_names_the_bad_field(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        PlaygroundConfig.model_validate({field: value})


def test_labelers_have_distinct_names() -> None:
    names = [labeler.name for labeler in PlaygroundWorld(SMALL).labelers(seed=0)]
    assert len(names) == len(set(names)) == SMALL.num_labelers
