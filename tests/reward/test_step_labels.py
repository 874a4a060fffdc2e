"""Labels of steps: the formats, what is wrong with a row, and where the labels are in the tokens."""

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lm.tokenizer import Tokenizer
from reward.step_labels import (
    ARRAYS,
    NEUTRAL,
    RIGHT,
    UNLABELLED,
    WRONG,
    StepLabels,
    StepLabelsConfig,
    read_step_labels,
    step_parts,
)
from training.data import SourceRows
from training.tokens import read_overlong, write_arrays

TRL = {"prompt": "Add 1 and 2, then 3.", "completions": ["1 + 2 = 3", "3 + 3 = 7"], "labels": [True, False]}
# The layout of a line of PRM800K's phase1_train.jsonl, with shorter texts.
PRM800K: dict[str, Any] = {
    "labeler": "340d89bc",
    "timestamp": "2023-01-22T04:34:27.052924",
    "generation": None,
    "is_quality_control_question": False,
    "is_initial_screening_question": False,
    "question": {"problem": "What is 2 times 3, plus 1?", "ground_truth_answer": "7"},
    "label": {
        "steps": [
            {
                "completions": [
                    {"text": "Let us see.", "rating": 0, "flagged": None},
                    {"text": "Add 2 and 3.", "rating": -1, "flagged": False},
                ],
                "human_completion": None,
                "chosen_completion": 0,
            },
            {
                "completions": [{"text": "2 times 3 is 5.", "rating": -1, "flagged": None}],
                "human_completion": "2 times 3 is 6.",
                "chosen_completion": None,
            },
            {
                "completions": [
                    {"text": "6 + 1 = 8\n\n# Answer\n\n8", "rating": -1, "flagged": None},
                    {"text": "6 + 1 = 7\n\n# Answer\n\n7", "rating": 1, "flagged": None},
                    {"text": "So.", "rating": None, "flagged": True},
                ],
                "human_completion": None,
                "chosen_completion": None,
            },
        ],
        "total_time": 278270,
        "finish_reason": "found_error",
    },
}


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., StepLabelsConfig]:
    def write(*rows: dict[str, Any], **settings: Any) -> StepLabelsConfig:
        path = tmp_path / "steps.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return StepLabelsConfig(source=str(path), **settings)

    return write


def read(data: StepLabelsConfig) -> list[tuple[list[str], list[int]]]:
    return [(steps, labels) for _, (_, steps, labels) in read_step_labels(data)]


def test_trls_rows_are_read(written: Callable[..., StepLabelsConfig]) -> None:
    as_messages = {**TRL, "prompt": [{"role": "user", "content": TRL["prompt"]}], "labels": [1, 0]}
    for row in (TRL, as_messages):
        ((where, (prompt, steps, labels)),) = read_step_labels(written(row))
        assert where.endswith("steps.jsonl: line 1")
        assert prompt == [{"role": "user", "content": "Add 1 and 2, then 3."}]
        assert (steps, labels) == (TRL["completions"], [RIGHT, WRONG])


def test_prm800k_gives_the_followed_response_and_its_alternatives(written: Callable[..., StepLabelsConfig]) -> None:
    see, six = "Let us see.", "2 times 3 is 6."
    assert read(written(PRM800K)) == [
        ([see, six, "6 + 1 = 8 # Answer 8"], [NEUTRAL, RIGHT, WRONG]),  # no separator is inside of a step
        (["Add 2 and 3."], [WRONG]),
        ([see, "2 times 3 is 5."], [UNLABELLED, WRONG]),
        ([see, six, "6 + 1 = 7 # Answer 7"], [UNLABELLED, UNLABELLED, RIGHT]),
    ]
    by_object = copy.deepcopy(PRM800K)
    by_object["label"]["steps"][1]["human_completion"] = {"text": six, "rating": None, "source": "human"}
    assert read(written(by_object)) == read(written(PRM800K))


def test_broken_problems_and_responses_without_labels_are_counted(written: Callable[..., StepLabelsConfig]) -> None:
    broken, bare = copy.deepcopy(PRM800K), copy.deepcopy(PRM800K)
    broken["label"]["finish_reason"] = "bad_problem"
    bare["label"]["steps"] = bare["label"]["steps"][:1]
    bare["label"]["steps"][0]["completions"].pop()
    counts, lines = list[SourceRows](), list[str]()
    assert len(list(read_step_labels(written(PRM800K, broken, bare), lines.append, counts.append))) == 4
    (rows,) = counts
    assert rows.unusual == {
        "problem that its labeler found broken (left out)": 1,
        "response without a label (left out)": 1,
    }
    assert "of 3 rows, 1 x problem that its labeler found broken" in lines[0]


def changed(path: Sequence[str | int], value: Any) -> dict[str, Any]:
    row = copy.deepcopy(PRM800K)
    table: Any = row
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    return row


STEP = ("label", "steps", 0)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({**TRL, "labels": [True]}, r"field 'labels' has 1 entries for 2 steps in 'completions'"),
        ({**TRL, "completions": [], "labels": []}, r"field 'labels' has 0 entries for 0 steps"),
        ({**TRL, "labels": [True, "no"]}, r"field 'labels\[1\]' is 'no'; true or false was expected"),
        ({**TRL, "labels": [True, 0.5]}, r"field 'labels\[1\]' is 0.5; true or false"),
        ({**TRL, "completions": ["a", " "]}, r"field 'completions\[1\]' is empty; text was expected"),
        ({**TRL, "completions": ["a", 3]}, r"field 'completions\[1\]' is int; a string was expected"),
        ({**TRL, "prompt": " "}, r"field 'prompt' is empty"),
        (
            {"text": "a"},
            r"found the fields \['text'\]; prompt, completions, labels \(trl\) or question, label \(prm800k\)",
        ),
        (changed(("question", "problem"), None), r": question: field 'problem' is null; a string was expected"),
        (
            changed(("label", "finish_reason"), "done"),
            r"field 'label.finish_reason' is 'done'; one of found_error, sol",
        ),
        (changed(("label", "steps"), []), r"field 'label.steps' is empty; at least one step"),
        (
            changed((*STEP, "completions", 0, "rating"), 2),
            r"label.steps\[0\].completions\[0\]: field 'rating' is 2; -1, 0",
        ),
        (changed((*STEP, "completions", 0, "text"), ""), r"label.steps\[0\].completions\[0\]: field 'text' is empty"),
        (
            changed((*STEP, "chosen_completion"), 7),
            r"label.steps\[0\]: field 'chosen_completion' is 7; the index of one",
        ),
        (
            changed(STEP, {"completions": None, "human_completion": None, "chosen_completion": None}),
            r"label.steps\[0\]: field 'completions' is empty, and there is no human_completion",
        ),
    ],
)
def test_what_is_wrong_with_a_row_is_named(
    written: Callable[..., StepLabelsConfig], row: dict[str, Any], words: str
) -> None:
    good = TRL if "label" not in row else PRM800K
    with pytest.raises(ValueError, match=rf"steps\.jsonl: line 2.*{words}"):
        list(read_step_labels(written(good, row)))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["1 + 2 = 3\n3 + 3 = 6\nAdd 1 and 2, then 3."] * 3, 300, "chat")


def in_folder(
    tokenizer: Tokenizer, data: StepLabelsConfig, folder: Path, max_tokens: int = 64, on_overlong: Any = "refuse"
) -> StepLabels:
    write_arrays(folder, ARRAYS, lambda first: step_parts(tokenizer, data, max_tokens, on_overlong, 0.5, 3, first))
    return StepLabels(folder)


def test_a_label_is_at_the_last_token_of_its_step(
    written: Callable[..., StepLabelsConfig], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    found = in_folder(tokenizer, written(TRL, PRM800K), tmp_path / "tokens", 256)
    assert [found.labels(row) for row in range(3)] == [(RIGHT, WRONG), (NEUTRAL, RIGHT, WRONG), (WRONG,)]
    steps = found.steps(0)
    first, second = steps.ends
    assert tokenizer.decode(steps.tokens[: first + 1]).endswith("1 + 2 = 3\n")
    assert second == len(steps.tokens) - 1
    assert steps.tokens[second] == tokenizer.end_id
    assert len({found.problems[row] for row in range(5)}) == 2  # all responses of a problem are on one side
    assert sorted(found.rows(heldout=True) + found.rows(heldout=False)) == list(range(5))


def test_long_responses_lose_the_steps_that_do_not_fit(
    written: Callable[..., StepLabelsConfig], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    whole = in_folder(tokenizer, written(TRL), tmp_path / "whole").steps(0)
    limit = len(whole.tokens) - 1
    with pytest.raises(ValueError, match=rf"line 1: prompt and response have {limit + 1} tokens; .* is {limit}"):
        in_folder(tokenizer, written(TRL), tmp_path / "refused", limit)
    cut = in_folder(tokenizer, written(TRL), tmp_path / "cut", limit, "truncate")
    assert (cut.labels(0), cut.steps(0).ends) == ((RIGHT,), whole.ends[:1])
    skipped = in_folder(tokenizer, written(TRL), tmp_path / "skipped", limit, "skip")
    assert not skipped.problems
    assert read_overlong(skipped.folder).num_skipped == 1


def test_tokenizing_continues_where_it_was_cut_off(
    written: Callable[..., StepLabelsConfig], tokenizer: Tokenizer
) -> None:
    data = written(TRL, PRM800K, TRL)
    (whole,) = step_parts(tokenizer, data, 256, "refuse", 0.5, 3, 0)
    (rest,) = step_parts(tokenizer, data, 256, "refuse", 0.5, 3, 2)
    assert whole.num_rows == rest.num_rows + 2
    kept = len(rest.arrays["targets"])
    assert whole.arrays["targets"][-kept:].tolist() == rest.arrays["targets"].tolist()


# ---- labels of turns ----

CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "map"}}}
TURNS: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "Where is the fox?"},
        {"role": "assistant", "content": "I look.\nNow.", "tool_calls": [CALL]},
        {"role": "tool", "content": "in the den"},
        {"role": "assistant", "content": "In the den.\nSurely."},
        {"role": "user", "content": "And the cat?"},
        {"role": "assistant", "content": "On the roof."},
    ],
    "labels": [None, True, False],
}


def test_the_labels_of_turns_are_where_the_turns_end(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "turns.jsonl"
    path.write_text(json.dumps(TURNS) + "\n")
    data = StepLabelsConfig(source=str(path), separator="")
    found = in_folder(tokenizer, data, tmp_path / "tokens", 512)
    assert found.labels(0) == (UNLABELLED, RIGHT, WRONG)
    tokens, is_response = tokenizer.encode_conversation(TURNS["messages"])
    steps = found.steps(0)
    assert list(steps.tokens) == tokens[: steps.ends[-1] + 1]
    texts = [tokenizer.decode(steps.tokens[: end + 1]) for end in steps.ends]
    assert [is_response[end : end + 2] for end in steps.ends[:-1]] == [[True, False]] * 2
    assert "In the den.\nSurely." in texts[1]
    assert "And the cat?" not in texts[1]
    assert "look" in texts[0]
    assert "in the den" not in texts[0]


@pytest.mark.parametrize(
    ("change", "separator", "message"),
    [
        ({"labels": [True]}, "", "'labels' has 1 entries for 3 turns of the assistant"),
        ({"labels": [True, 2, None]}, "", r"'labels\[1\]' is 2; true, false or null"),
        ({"messages": [], "labels": []}, "", "'messages'"),
        ({"messages": [{"role": "assistant", "content": "Hi."}], "labels": [True]}, "", r"messages\[0\].role"),
        ({"messages": [{"role": "tool", "content": "1"}], "labels": []}, "", "'tool' without a call before it"),
        ({}, "\n", r"turns are labelled, and reward.step_labels.separator is '\\n'; separator = \"\" was expected"),
        ({"messages": None, **TRL}, "", "steps are labelled, and reward.step_labels.separator is ''"),
    ],
)
def test_wrong_labels_of_turns_are_named(tmp_path: Path, change: dict[str, Any], separator: str, message: str) -> None:
    path = tmp_path / "turns.jsonl"
    path.write_text(json.dumps(TURNS | change) + "\n")
    with pytest.raises(ValueError, match=rf"turns.jsonl: line 1: .*{message}"):
        list(read_step_labels(StepLabelsConfig(source=str(path), separator=separator)))
