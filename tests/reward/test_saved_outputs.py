"""Labeling tasks from files of outputs, by the command."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.judges.external import read_verdict_file
from preferences.formats.exchange import export
from preferences.formats.registry import format_to_write
from preferences.records import Answer, ShownTask
from preferences.scripted import answer_all
from preferences.store import LabelStore
from tests.rows import jsonl

STORE = ("--store", "labels.sqlite", "--batch", "main")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, *rows: object) -> str:
    Path(name).write_text(jsonl(rows), encoding="utf-8")
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
    for there in (
        "2 new tasks in batch 'main' of labels.sqlite, each for 3 labelers\n",
        "0 new tasks in batch 'main' of labels.sqlite, each for 3 labelers; 2 already there; the batch now"
        " has 2 tasks\n",
    ):  # a command that is repeated adds nothing
        code, out, err = heed_label(*command)
        assert (code, "created a new label store at labels.sqlite" in err) == (0, "; " not in there)
        assert there in out
        assert "1 prompt is left out: all responses to it are the same" in out
        assert stored() == [
            ("Question 0?", ("small 0", "large 0"), ("small", "large"), 3),
            ("Question 2?", ("small 2", "large 2"), ("small", "large"), 3),
        ]
    assert warnings() == ["", "blood"]
    write("small.jsonl", *({"prompt_id": f"p{i}", "response": f"corrected {i // 2}"} for i in range(3)))
    assert "; 0 already there; the batch now has 5 tasks" in heed_label(*command)[1]
    write("small.jsonl", {"prompt_id": "p0", "response": "small 0"})
    code, _, err = heed_label(*command)
    assert (code, "p1" in err) == (2, True)


def test_a_deployed_models_answers_are_rated_alone(heed_label: Any) -> None:
    rows = write("rows.jsonl", {"prompt": "Why?", "response": "So."}, {"prompt": "Who?", "response": "I."})
    assert heed_label("outputs", rows, *STORE)[0] == 0
    assert stored() == [("Why?", ("So.",), ("response",), 1), ("Who?", ("I.",), ("response",), 1)]


def test_a_text_that_several_models_wrote_is_one_response(heed_label: Any) -> None:
    """Labelers would otherwise rank a response against itself."""
    row = {"prompt": "Why?", "responses": {"small": "So.", "large": "No.", "huge": "So."}}
    alike = {"prompt": "Who?", "responses": {"small": "I.", "large": "I.", "huge": "I."}}
    code, out, _ = heed_label("outputs", write("rows.jsonl", row, alike), *STORE)
    assert (code, "1 prompt is left out" in out) == (0, True)
    assert stored() == [("Why?", ("So.", "No."), ("small, huge", "large"), 1)]


class Longest:
    name = "ann"

    def judge(self, shown: ShownTask) -> Answer:
        longest = max(shown.responses, key=len)
        return Answer(tuple(1 if text == longest else 2 for text in shown.responses), 5)


def test_a_verdict_on_a_text_that_several_models_wrote_is_one_on_each_of_them(heed_label: Any) -> None:
    """Those models tie; no policy has the names of two."""
    prompts = write("prompts.jsonl", {"prompt_id": "p", "prompt": "Why?"})
    texts = {"a": "Same text.", "b": "Same text.", "c": "No."}
    files = [f"{name}={write(f'{name}.jsonl', {'prompt_id': 'p', 'output': text})}" for name, text in texts.items()]
    assert heed_label("outputs", *files, "--prompts", prompts, *STORE)[0] == 0
    with LabelStore("labels.sqlite") as store:
        answer_all(store, [Longest()], batch="main", client="t", instructions_version="1")
        export(store, format_to_write("heed"), Path("labels.parquet"))
    found = read_verdict_file("labels.parquet", judge="people")
    preferences = {(v.policy_a, v.policy_b): v.preference_a for v in found.verdicts}
    assert found.policies == ("a", "b", "c")
    assert preferences == {("a", "b"): 0.5, ("a", "c"): 1.0, ("b", "c"): 1.0}


def test_the_id_of_a_task_is_a_hash_of_its_prompt_and_all_responses(heed_label: Any) -> None:
    responses = {"small": "So.", "large": "No.", "huge": "So."}
    rows = write("rows.jsonl", {"prompt": "Why?", "responses": responses})
    assert heed_label("outputs", rows, "--store", "new.sqlite", "--batch", "main")[0] == 0
    content = json.dumps([[{"role": "user", "content": "Why?"}], list(responses.items())])
    with LabelStore("new.sqlite") as store:
        assert [one.task.task_id for one in store.tasks("main")] == [hashlib.sha256(content.encode()).hexdigest()[:16]]


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


def test_responses_of_one_model_are_rated_alone(heed_label: Any) -> None:
    write("rows.jsonl", {"prompt": "Why?", "response_a": "So."}, {"prompt": "How?", "response_a": "So."})
    assert heed_label("outputs", write("rows.jsonl", {"prompt": "Why?", "response_a": "So."}), *STORE)[0] == 0
    assert stored() == [("Why?", ("So.",), ("response_a",), 1)]
    prompts = write("prompts.jsonl", {"prompt_id": "1", "prompt": "Why?"}, {"prompt_id": "2", "prompt": "How?"})
    mine = write("mine.jsonl", {"prompt_id": "1", "text": "So."}, {"prompt_id": "2", "text": "Thus."})
    assert heed_label("outputs", f"mine={mine}", "--prompts", prompts, *STORE)[0] == 0
    assert stored()[1:] == [("Why?", ("So.",), ("mine",), 1), ("How?", ("Thus.",), ("mine",), 1)]
    write("two.jsonl", {"prompt": "When?", "response_a": "So.", "response_b": "No."})
    code, _, err = heed_label("outputs", "two.jsonl", *STORE)
    assert (code, "of batch 'main' have single responses, which are rated alone" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("mixed.jsonl",), "mixed.jsonl: line 2: one response, but mixed.jsonl: line 1 has several"),
        (("a=rows.jsonl", "b=rows.jsonl"), "--prompts is missing"),
        (("bare.jsonl",), "bare.jsonl: line 1: 1 to 9 responses were expected, in 'responses'"),
        (("bare.jsonl",), "found ['prompt']"),
        (("same.jsonl",), "same.jsonl: no prompt has two different responses"),
        (("empty.jsonl",), "empty.jsonl: there are no rows; at least one was expected"),
    ],
)
def test_what_cannot_become_tasks_makes_no_store(heed_label: Any, arguments: tuple[str, ...], said: str) -> None:
    write("rows.jsonl", {"prompt": "Why?", "response_a": "So."})
    write("same.jsonl", {"prompt": "Why?", "response_a": "So.", "response_b": "So."})
    two = {"prompt": "Why?", "response_a": "So.", "response_b": "No."}
    write("mixed.jsonl", two, {"prompt": "How?", "response_a": "So."})
    write("bare.jsonl", {"prompt": "Why?"})
    write("empty.jsonl")
    code, out, err = heed_label("outputs", *arguments, *STORE)
    assert (code, out) == (2, "")
    assert said in err
    assert not Path("labels.sqlite").exists()
