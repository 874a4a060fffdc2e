"""The suite ifeval: reading, scoring, and the loose variants."""

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.suites.ifeval import SUITE, variants
from evaluation.suites.suite import Tools
from reward.verifiers.instructions import KINDS
from tests.evaluation.suites.models import Written, by_prompt

REAL = Path(__file__).parents[4] / "shared" / "data" / "benchmarks" / "ifeval_input_data.jsonl.gz"
ROWS = [
    {
        "key": 7,
        "prompt": "Two bullets, no commas.",
        "instruction_id_list": ["detectable_format:number_bullet_lists", "punctuation:no_comma"],
        "kwargs": [{"num_bullets": 2, "relation": None}, {}],
    },
    {"key": 8, "prompt": "JSON.", "instruction_id_list": ["detectable_format:json_format"], "kwargs": [{}]},
]


def write(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def values(folder: Path, answers: dict[str, str]) -> list[dict[str, float]]:
    items = SUITE.read(write(folder, ROWS))
    return [dict(scored.values) for scored in SUITE.score(Written(by_prompt(answers)), items, Tools())]


def test_items_are_instructions_in_clusters_of_prompts(tmp_path: Path) -> None:
    items = SUITE.read(write(tmp_path, ROWS))
    assert [(item.item_id, item.cluster, item.group) for item in items] == [
        ("7", "7", "detectable_format:number_bullet_lists"),
        ("7:2", "7", "punctuation:no_comma"),
        ("8", "8", "detectable_format:json_format"),
    ]
    model = Written(by_prompt({"Two bullets, no commas.": "* a\n* b", "JSON.": "3"}))
    SUITE.score(model, items, Tools())
    assert [(request.messages[-1]["content"], request.item_id) for request in model.asked] == [
        ("Two bullets, no commas.", "7"),
        ("JSON.", "8"),
    ]


def test_strict_and_loose_values(tmp_path: Path) -> None:
    found = values(tmp_path, {"Two bullets, no commas.": "Sure, these:\n* a\n* b", "JSON.": "Here it is:\n[1]"})
    assert found == [
        {"instruction_strict": 1, "instruction_loose": 1, "prompt_strict": 0, "prompt_loose": 1},
        {"instruction_strict": 0, "instruction_loose": 1},
        {"instruction_strict": 0, "instruction_loose": 1, "prompt_strict": 0, "prompt_loose": 1},
    ]
    # Each instruction may be followed in a variant of its own: no variant here has both two bullets and no comma.
    found = values(tmp_path, {"Two bullets, no commas.": "* a\n* b,", "JSON.": "no"})
    assert [one["instruction_loose"] for one in found] == [1, 1, 0]
    assert [one.get("prompt_loose") for one in found] == [1, None, 0]


def test_the_eight_variants() -> None:
    assert variants("*a*\n b \n**c") == [
        "*a*\n b \n**c", "b \n**c", "*a*\n b", "b",
        "a\n b \nc", "b \nc", "a\n b", "b",
    ]  # fmt: skip
    assert variants("one line")[1:4] == ["", "", ""]


def test_a_failed_answer_has_no_values_but_a_reason(tmp_path: Path) -> None:
    items = SUITE.read(write(tmp_path, ROWS))
    first, second, third = SUITE.score(Written(by_prompt({"JSON.": "3"})), items, Tools())
    assert first.values == second.values == {}
    assert set(first.failures) == {"instruction_strict", "instruction_loose", "prompt_strict", "prompt_loose"}
    assert set(second.failures) == {"instruction_strict", "instruction_loose"}
    assert set(first.failures.values()) == {"status 500"}
    assert third.values["prompt_strict"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kwargs": [{}]}, "2 of field 'instruction_id_list' and 1 of field 'kwargs'"),
        ({"kwargs": [{"num_bullets": 2}, 3]}, r"field 'kwargs\[1\]' is int; an object was expected"),
        ({"kwargs": [{}, {}]}, "argument 'num_bullets': it is missing"),
        ({"instruction_id_list": ["a:b", "punctuation:no_comma"]}, "check 'a:b'; one of keywords:existence"),
        ({"prompt": " "}, "field 'prompt' is empty"),
        ({"key": None}, "field 'key' is empty; an id was expected"),
        ({"key": 8}, "the id '8' is already used in .*line 1"),
    ],
)
def test_malformed_rows_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write(tmp_path, [ROWS[1], {**ROWS[0], **change}])
    with pytest.raises(ValueError, match=rf"rows\.jsonl: line 2: .*{message}"):
        SUITE.read(path)


@pytest.mark.skipif(not REAL.is_file(), reason=f"{REAL}: no real data")
def test_all_published_rows_are_read_and_every_kind_occurs() -> None:
    items = SUITE.read(str(REAL))
    assert len({item.cluster for item in items}) == 541
    assert len(items) == len({item.item_id for item in items}) == 834
    assert {item.group for item in items} == KINDS.keys()
