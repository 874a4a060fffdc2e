"""GSM8K: reading, the two ways of asking, and scores, next to those of lm-evaluation-harness."""

import json
from pathlib import Path

import pytest

from evaluation.endpoint import Answer
from evaluation.suites.gsm8k import MEASURES, SUITE, scored
from evaluation.suites.suite import Item, Tools
from tests.evaluation.suites.models import Written

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "grade-school-math"
ROW = {"question": "Two and three?", "answer": "Two and three are 2+3=<<2+3=5>>5.\n#### 5"}


def write(folder: Path, name: str, num: int) -> None:
    rows = [{**ROW, "question": f"{name} {n}: two and three?"} for n in range(num)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_chat_models_are_instructed_and_base_models_shown_solved_problems(tmp_path: Path) -> None:
    write(tmp_path, "test", 2)
    write(tmp_path, "train", 20)
    items = SUITE.read(str(tmp_path))
    answers = {"0": Answer("2 + 3 = 5\n#### 5", True, 9), "1": Answer("", failure="status 503")}
    chat = Written(lambda request: answers[request.item_id], has_chat_template=True)
    right, failed = SUITE.score(chat, items, Tools())
    assert right.values == {measure.name: 1.0 for measure in MEASURES}
    assert (failed.values, set(failed.failures)) == ({}, {measure.name for measure in MEASURES})
    assert chat.asked[0].messages[0]["content"].startswith("test 0: two and three?\n\nSolve the problem step by step.")
    base = Written(lambda request: answers[request.item_id])
    SUITE.score(base, items, Tools())
    text = base.asked[1].text
    assert text.count("Question: train") == 8
    assert text.endswith("Question: test 1: two and three?\nAnswer:")
    assert "<<" not in text
    assert (base.asked[1].stop, base.asked[1].item_id) == (("\nQuestion:",), "1")
    (alone,) = SUITE.read(str(tmp_path / "test.jsonl"))[:1]
    assert alone.data == {"reference": "5", "solved_before": ""}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("#### 1,000", {"accuracy": 1.0, "accuracy_if_read": 1.0, "strict_match": 1.0, "flexible_extract": 1.0}),
        ("The answer is $1,000.", {"accuracy": 1, "accuracy_if_read": 1, "strict_match": 0, "flexible_extract": 1}),
        # The harness takes the last number; the parser sees that it belongs to something else.
        ("The answer is 1000. It took 2 steps.",
         {"accuracy": 1, "accuracy_if_read": 1, "strict_match": 0, "flexible_extract": 0}),
        ("It is 1000 or 1001.", {"accuracy": 0, "strict_match": 0, "flexible_extract": 0}),
        ("#### 1000.00", {"accuracy": 1, "accuracy_if_read": 1, "strict_match": 0, "flexible_extract": 0}),
        ("#### 7", {"accuracy": 0, "accuracy_if_read": 0, "strict_match": 0, "flexible_extract": 0}),
        ("I do not know.", {"accuracy": 0, "strict_match": 0, "flexible_extract": 0}),
    ],
)  # fmt: skip
def test_scores(answer: str, expected: dict[str, float]) -> None:
    found = scored(Item("0", (), data={"reference": "1000"}), answer)
    assert found.values == expected
    assert ("accuracy_if_read" in found.failures) == ("accuracy_if_read" not in expected)


def test_malformed_rows_are_named(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, "answer": "five"}) + "\n")
    with pytest.raises(ValueError, match=r"test.jsonl: line 2: field 'answer' ends with 'five'; '#### N' was expected"):
        SUITE.read(str(path))
    path.write_text(json.dumps({"answer": "#### 5"}) + "\n")
    with pytest.raises(ValueError, match="line 1: field 'question' is missing"):
        SUITE.read(str(tmp_path))


def test_the_scores_of_lm_eval() -> None:
    """The harness' own filters and metric, where it is installed."""
    filters = pytest.importorskip("lm_eval.filters.extraction")
    metrics = pytest.importorskip("lm_eval.api.metrics")
    answers = ["#### 1,000", "It is $1,000.", "#### 1000.00", "x 12 y 1000", "none", "The answer is 1000. Then 2"]
    ignored = [",", r"\$", "(?s).*#### ", r"\.$"]
    for name, pattern, select in (
        ("strict_match", r"#### (\-?[0-9\.\,]+)", 0),
        ("flexible_extract", r"(-?[$0-9.,]{2,})|(-?[0-9]+)", -1),
    ):
        taken = filters.RegexFilter(regex_pattern=pattern, group_select=select).apply([[a] for a in answers], [])
        for answer, (found,) in zip(answers, taken, strict=True):
            theirs = metrics.exact_match_fn(
                predictions=[found], references=["so #### 1000"], regexes_to_ignore=ignored, ignore_case=True
            )["exact_match"]
            assert scored(Item("0", (), data={"reference": "1000"}), answer).values[name] == theirs, (name, answer)


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K's files are not on this machine")
def test_the_published_files() -> None:
    items = SUITE.read(str(GSM8K))
    assert len(items) == 1_319
    assert items[0].data["reference"] == "18"
    assert str(items[0].data["solved_before"]).count("Question: ") == 8
