"""MT-Bench: two turns, one grade each, by hand."""

import json
from pathlib import Path

import pytest

from evaluation.evaluate.statistics import suite_statistics
from evaluation.suites.mt_bench import SUITE, read_grade
from evaluation.suites.suite import Tools
from reward.endpoint import Answer
from tests.conftest import ChatServer
from tests.evaluation.suites.models import EndpointJudge, Written, by_prompt

SHARED = Path(__file__).parents[4] / "shared/data/mt_bench_question.jsonl"
ROWS = [
    {"question_id": 81, "category": "writing", "turns": ["Write a line.", "Shorten it."]},
    {"question_id": 111, "category": "math", "turns": ["2 + 3?", "Twice that?"], "reference": ["5", "10"]},
    {"question_id": 103, "category": "reasoning", "turns": ["Why?", "How?"], "reference": ["Because.", ""]},
    {"question_id": 104, "category": "reasoning", "turns": ["Who?", "Whom?"]},
]
ANSWERS = {
    "Write a line.": "A line.", "Shorten it.": "Line.",
    "2 + 3?": "It is 5.", "Twice that?": "It is 11.",
    "Why?": "Because of it.", "How?": Answer("", failure="timed out"),
    "Who?": Answer("", failure="refused"),
}  # fmt: skip
GRADES = {"A line.": "Grade: 7", "Line.": "Grade: 4", "It is 5.": "Well.\n**Grade: [[10]]/10**", "It is 11.": "Bad."}


def write(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_two_turns_and_their_grades(tmp_path: Path, chat_server: ChatServer) -> None:
    items = SUITE.read(write(tmp_path / "question.jsonl", ROWS))
    asked: dict[str, str] = {}

    def grade(_model: str, prompt: str, _seed: int) -> str:
        last = prompt.rpartition("<answer ")[2].splitlines()[1]
        asked[last] = prompt
        return GRADES.get(last, "Grade: 1.5")

    chat_server.answer = grade
    judge, model = EndpointJudge(chat_server.url, tmp_path / "answers.sqlite"), Written(by_prompt(ANSWERS))
    writing, math, half, none = SUITE.score(model, items, Tools(judge))
    assert writing.values == {"score": 5.5, "first_turn": 7.0, "second_turn": 4.0}
    assert math.values == {"first_turn": 10.0}
    assert math.failures["score"] == math.failures["second_turn"]
    assert math.failures["score"].startswith("the judge: no grade: the answer ends with 'Bad.'; a line 'Grade: N'")
    assert half.values == {"first_turn": 1.5}
    assert half.failures == {"score": "timed out", "second_turn": "timed out"}
    assert (none.values, none.failures) == ({}, dict.fromkeys(("score", "first_turn", "second_turn"), "refused"))
    # The second question follows the model's own first answer; nobody is asked it after a failed one.
    assert [message["content"] for message in model.asked[5].messages] == ["2 + 3?", "It is 5.", "Twice that?"]
    assert len(model.asked) == 7
    assert [request.temperature for request in model.asked[:3]] == [0.7, 0.0, 0.0]
    assert "<reference 1>\n5\n</reference 1>" in asked["It is 5."]
    assert "reference 2" not in asked["It is 5."]
    assert "<reference 2>\n10\n</reference 2>" in asked["It is 11."]
    assert "Grade the second answer only" in asked["It is 11."]
    assert "reference" not in asked["A line."]
    assert len(asked) == 5  # only answers are graded


def test_the_score_is_that_of_the_original_code(tmp_path: Path, chat_server: ChatServer) -> None:
    """Expected is what `fastchat/llm_judge/show_result.py` of fschat 0.2.36 (PyPI) prints for these judgments."""
    grades = [(8, 5), (9, 5), (10, 9), (10, 9), (9, 8), (1, 10), (7, 10), (3.5, 9)]
    rows = [
        {"question_id": 81 + n, "category": "writing", "turns": [f"First {n}?", f"Second {n}?"]}
        for n in range(len(grades))
    ]
    answers = {f"{turn} {n}?": f"{turn} answer {n}." for n in range(len(grades)) for turn in ("First", "Second")}

    def grade(_model: str, prompt: str, _seed: int) -> str:
        turn, _, number = prompt.rpartition("<answer ")[2].splitlines()[1].removesuffix(".").split()
        return f"Grade: {grades[int(number)][turn == 'Second']}"

    chat_server.answer = grade
    items = SUITE.read(write(tmp_path / "question.jsonl", rows))
    judge, model = EndpointJudge(chat_server.url, tmp_path / "answers.sqlite"), Written(by_prompt(dict(answers)))
    scored = SUITE.score(model, items, Tools(judge))
    found = suite_statistics("mt-bench", SUITE.measures, items, {"m": {one.item_id: one for one in scored}}, seed=0)
    expected = {"first_turn": 7.1875, "second_turn": 8.125, "score": 7.65625}
    assert {value.measure: value.value.mean for value in found.values if not value.group} == pytest.approx(expected)


def test_grades() -> None:
    for reply, grade in (("Grade: 10", 10.0), ("So.\n*grade: 7.5*\n", 7.5), ("Grade: 8/10.", 8.0)):
        assert read_grade(reply) == (grade, "")
    for reply in ("", "Grade: eight", "Grade: 7\nOr 8.", "My grade: 7"):
        assert read_grade(reply)[1].startswith("no grade: the answer ends with ")
    for reply in ("Grade: 0", "Grade: 11", "Grade: 100"):
        assert read_grade(reply)[1].endswith("a line 'Grade: N' with N from 1 to 10 was expected")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"turns": ["one"]}, r"q.jsonl: line 2: field 'turns' has 1 texts; two that are not empty were expected"),
        ({"turns": ["one", 2]}, r"q.jsonl: line 2: field 'turns\[1\]' is int"),
        ({"turns": "one"}, r"q.jsonl: line 2: field 'turns' is str; a list was expected"),
        ({"reference": ["one"]}, r"q.jsonl: line 2: field 'reference' has 1 texts; one per turn was expected"),
        ({"category": None}, r"q.jsonl: line 2: field 'category' is null"),
        ({"question_id": None}, r"q.jsonl: line 2: field 'question_id' is empty; an id was expected"),
        ({"question_id": 81}, r"q.jsonl: line 2: the id '81' is already used in .*q.jsonl: line 1"),
    ],
)
def test_malformed_rows(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SUITE.read(write(tmp_path / "q.jsonl", [ROWS[0], ROWS[1] | change]))


@pytest.mark.skipif(not SHARED.is_file(), reason="MT-Bench's questions are not on this machine")
def test_the_published_questions() -> None:
    items = SUITE.read(str(SHARED))
    groups = [item.group for item in items]
    assert len(items) == 80
    assert {group: groups.count(group) for group in groups} == dict.fromkeys(
        ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"), 10
    )
    assert sum(any(item.data["references"]) for item in items) == 39
