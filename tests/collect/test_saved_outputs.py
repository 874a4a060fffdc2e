"""Labeling tasks from files of outputs, by the command."""

import json
from pathlib import Path
from typing import Any

import pytest

from preferences.store import LabelStore

STORE = ("--store", "labels.sqlite", "--batch", "main")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, *rows: object) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return name


def stored() -> list[Any]:
    with LabelStore("labels.sqlite") as store:
        return [(one.task.prompt[-1].content, one.task.responses, one.task.sources, one.num_labelers)
                for one in store.tasks("main")]  # fmt: skip


def warnings() -> list[str]:
    with LabelStore("labels.sqlite") as store:
        return [one.task.warning for one in store.tasks("main")]


def test_two_models_outputs_and_their_prompts(heed_label: Any) -> None:
    asked = [{"prompt_id": f"p{i}", "prompt": f"Question {i}?"} for i in range(3)]
    prompts = write("prompts.jsonl", *asked[:2], asked[2] | {"warning": "blood"})
    small = write("small.jsonl", *({"prompt_id": f"p{i}", "response": f"small {i}"} for i in (2, 1, 0)))
    large = write("large.jsonl", *({"prompt": f"Question {i}?", "output": f"{('large', 'small')[i == 1]} {i}"}
                                   for i in range(3)))  # fmt: skip
    command = ("outputs", f"small={small}", f"large={large}", "--prompts", prompts, *STORE, "--labelers", "3")
    for _ in range(2):  # a command that is repeated adds nothing
        code, out, _ = heed_label(*command)
        assert code == 0
        assert "2 tasks in batch 'main' of labels.sqlite, each for 3 labelers" in out
        assert "1 prompt is left out: all responses to it are the same" in out
        assert stored() == [
            ("Question 0?", ("small 0", "large 0"), ("small", "large"), 3),
            ("Question 2?", ("small 2", "large 2"), ("small", "large"), 3),
        ]
    assert warnings() == ["", "blood"]
    write("small.jsonl", {"prompt_id": "p0", "response": "small 0"})
    code, _, err = heed_label(*command)
    assert (code, "p1" in err) == (2, True)


def test_a_text_that_several_models_wrote_is_one_response(heed_label: Any) -> None:
    """Labelers would otherwise rank a response against itself."""
    row = {"prompt": "Why?", "responses": {"small": "So.", "large": "No.", "huge": "So."}}
    alike = {"prompt": "Who?", "responses": {"small": "I.", "large": "I.", "huge": "I."}}
    code, out, _ = heed_label("outputs", write("rows.jsonl", row, alike), *STORE)
    assert (code, "1 prompt is left out" in out) == (0, True)
    assert stored() == [("Why?", ("So.", "No."), ("small, huge", "large"), 1)]


@pytest.mark.parametrize(
    ("row", "sources"),
    [
        ({"prompt": "Why?", "response_a": "So.", "response_b": "No."}, ("response_a", "response_b")),
        ({"prompt": [{"role": "user", "content": "Why?"}], "responses": ["So.", "No."]}, ("1", "2")),
        ({"prompt": "Why?", "responses": {"small": "So.", "large": "No."}, "warning": "blood"}, ("small", "large")),
    ],
)
def test_rows_that_hold_prompt_and_responses(heed_label: Any, row: Any, sources: tuple[str, ...]) -> None:
    assert heed_label("outputs", write("rows.jsonl", row), *STORE)[0] == 0
    assert stored() == [("Why?", ("So.", "No."), sources, 1)]
    assert warnings() == [row.get("warning", "")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("rows.jsonl",), "rows.jsonl: line 1: 2 to 9 responses were expected, in 'responses'"),
        (("a=rows.jsonl", "b=rows.jsonl"), "--prompts is missing"),
        (("a=rows.jsonl", "--prompts", "rows.jsonl"), "one model's outputs; NAME=FILE of two or more were expected"),
        (("same.jsonl",), "same.jsonl: no prompt has two different responses"),
    ],
)
def test_what_cannot_become_tasks_makes_no_store(heed_label: Any, arguments: tuple[str, ...], said: str) -> None:
    write("rows.jsonl", {"prompt": "Why?", "response_a": "So."})
    write("same.jsonl", {"prompt": "Why?", "response_a": "So.", "response_b": "So."})
    code, out, err = heed_label("outputs", *arguments, *STORE)
    assert (code, out) == (2, "")
    assert said in err
    assert not Path("labels.sqlite").exists()
