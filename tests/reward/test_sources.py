"""Several weighted sources as one reward, and functions that read the rows of prompts."""

import math
from pathlib import Path

import pytest

from reward.external import RewardFunction, Scored, score_in_parts
from reward.sources import RewardSum

ASKED = [({"role": "user", "content": "?"},)] * 3
ROWS = [{"answer": 1}, {"answer": 2}, {"answer": 3}]
CODE = """
def length(prompts, responses):
    return [None if text == "bad" else len(text) for text in responses]

def near(prompts, responses, rows):
    return [-abs(int(text) - row["answer"]) for text, row in zip(responses, rows)]

def scaled(prompts, responses, scale=2.0):
    return [scale * len(text) for text in responses]
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(CODE)
    return path


def sum_of(path: Path, **weights: float) -> RewardSum:
    sources = {
        "right": {"kind": "verifier", "verifier": "number", "unclear": "failed"},
        "length": {"kind": "function", "function": f"{path}:length"},
    }
    return RewardSum.model_validate({"sources": sources, "objective_weights": weights})


def test_a_function_gets_the_rows_if_it_has_a_parameter_for_them(functions: Path) -> None:
    near = RewardFunction(function=f"{functions}:near")
    assert near.reads_rows
    assert near.fields_of("here", {"answer": 1, "note": "x"}) == {"answer": 1, "note": "x"}
    scored = score_in_parts(near, ASKED, ["1", "5", "2"], 2, ROWS)
    assert [one.score for one in scored] == [0, -3, -1]
    failing = score_in_parts(near, ASKED, ["1", "?", "2"], 3, ROWS)  # the others are scored alone, with their own rows
    assert [one.score for one in failing] == [0, pytest.approx(math.nan, nan_ok=True), -1]


@pytest.mark.parametrize("name", ["length", "scaled"])
def test_functions_of_prompts_and_responses_work_as_before(functions: Path, name: str) -> None:
    reward = RewardFunction(function=f"{functions}:{name}")
    assert not reward.reads_rows
    assert reward.row_fields.key == ""
    factor = 2 if name == "scaled" else 1
    assert [one.score for one in reward.score(ASKED, ["a", "bb", "ccc"])] == [factor, 2 * factor, 3 * factor]


def test_a_row_that_json_cannot_hold_is_named(functions: Path) -> None:
    with pytest.raises(ValueError, match=r"^rows:4: field 'when' is bytes; .*near has a parameter `rows`"):
        RewardFunction(function=f"{functions}:near").fields_of("rows:4", {"answer": 1, "when": b"\xff"})


def test_the_sum_weighs_its_sources(functions: Path) -> None:
    reward = sum_of(functions, right=2.0, length=-0.5)
    assert reward.reads_rows
    assert reward.fields_of("here", {"prompt": "?", "answer": 1}) == {"answer": 1}
    assert [one.score for one in reward.score(ASKED, ["1", "1", "333"], ROWS)] == [1.5, -0.5, -1.5]
    assert reward.source == "2 x right + -0.5 x length"
    turned = sum_of(functions, length=-0.5, right=2.0)  # PPO takes the scores' columns in the order of their weights
    assert list(turned.parts) == ["length", "right"] == list(turned.objective_weights)


def test_a_response_has_a_score_if_all_sources_with_a_weight_give_one(functions: Path) -> None:
    both = sum_of(functions, right=1.0, length=1.0).score(ASKED, ["1", "bad", "1 or 2"], ROWS)
    assert both[0] == Scored(2.0)
    assert [math.isnan(one.score) for one in both] == [False, True, True]
    assert both[1].failure.startswith("right: unclear answer: no number")
    assert both[2].failure.startswith("right: unclear answer: ambiguous")
    watched = sum_of(functions, right=0.0, length=1.0).score(ASKED, ["1", "two", "bad"], ROWS)
    assert [one.score for one in watched[:2]] == [1, 3]
    assert watched[2].failure.startswith("length: ")


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"right": 1.0}, "objective_weights has right; the names of the sources, right, length, were expected"),
        ({"right": 1.0, "length": 1.0, "x": 1.0}, "objective_weights has right, length, x"),
        ({"right": 0.0, "length": 0.0}, "objective_weights are all 0"),
    ],
)
def test_weights_name_the_sources(functions: Path, weights: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sum_of(functions, **weights)


def test_a_reward_model_is_no_source_of_a_sum() -> None:
    with pytest.raises(ValueError, match='a table with kind "verifier", "function", "url" or "judge" was expected'):
        RewardSum.model_validate({"sources": {"a": {"kind": "model"}}, "objective_weights": {"a": 1.0}})
