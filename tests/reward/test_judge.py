"""A language model with a rubric as a reward: a real local judge, a recorded endpoint, and what a rubric refuses."""

import json
import math
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from files import retries
from lm.config import ModelConfig
from lm.model import LanguageModel
from lm.tokenizer import Tokenizer
from reward import judge as judge_module
from reward.judge import GradeTokens, JudgeReward, grade_tokens
from reward.rubric import Rubric
from tests.grading import write_judge
from tests.serving import serving

ASKED = [[{"role": "user", "content": f"Where is the {what}?"}] for what in ("fox", "dog", "bird", "bush")]
TEXTS = ["in the bush", "over the dog", "in the hand", "far"]
TEMPLATE = "$prompt\n$response\n$criterion"
CRITERIA = {"right": {"text": "Is it right?", "weight": 3.0}, "short": {"text": "Short?", "grades": [0, 1, 2, 3, 4, 5]}}
RUBRIC = {"criteria": CRITERIA, "template": TEMPLATE}
FILE = """\
template = "$prompt $response $criterion"

[criteria.right]
weight = 3
text = "Is it right?"

[criteria.short]
text = "Short?"
grades = [0, 1, 2, 3, 4, 5]
"""


@pytest.fixture(scope="module")
def judge_folder(tmp_path_factory: pytest.TempPathFactory, tiny_config: ModelConfig, tokenizer: Tokenizer) -> Path:
    return write_judge(tmp_path_factory.mktemp("judge") / "model", tiny_config, tokenizer, seed=3)


def local(folder: Path, **changes: Any) -> JudgeReward:
    return JudgeReward.model_validate({"model": str(folder), "rubric": RUBRIC, **changes})


def by_hand(folder: Path, question: str, grades: dict[int, float]) -> float:
    """The expected grade from a plain pass over one question; `grades` are the values of the scale's numbers."""
    from lm.source import load

    tokenizer, model = Tokenizer.load(folder), load(judge_module.ModelFolder(folder, LanguageModel)).eval()
    query = [*tokenizer.encode_prompt([{"role": "user", "content": question}]), *tokenizer.encode(" ")]
    with torch.no_grad():
        p_V = model(torch.tensor([query]))[0, -1].softmax(-1)
    masses = {grade: float(p_V[tokenizer.encode(str(grade))[0]]) for grade in grades}
    return sum(value * masses[grade] for grade, value in grades.items()) / sum(masses.values())


def test_a_local_judge_gives_the_weighted_mean_of_expected_grades(judge_folder: Path) -> None:
    reward = local(judge_folder)
    totals, right, short = reward.columns(ASKED, TEXTS, 4)
    assert list(reward.objective_weights) == ["rubric", "right", "short"]
    for row, (messages, text) in enumerate(zip(ASKED, TEXTS, strict=True)):
        asked = f"{messages[0]['content']}\n{text}\n"
        first = by_hand(judge_folder, f"{asked}Is it right?", {1: 0, 2: 0.25, 3: 0.5, 4: 0.75, 5: 1})
        second = by_hand(judge_folder, f"{asked}Short?", {grade: grade / 5 for grade in range(6)})
        assert (right[row].score, short[row].score) == (pytest.approx(first, abs=1e-5), pytest.approx(second, abs=1e-5))
        assert totals[row].score == pytest.approx((3 * first + second) / 4, abs=1e-5)
    assert [one.score for one in reward.score(ASKED, TEXTS)] == [one.score for one in totals]
    assert len({one.score for one in totals}) == 4


def test_a_judge_that_gives_no_grade_and_a_response_that_is_too_long_have_no_score(
    judge_folder: Path, model_folder: Path
) -> None:
    (unsure,) = local(model_folder).score(ASKED[:1], TEXTS[:1])  # random weights: no token is likely
    assert math.isnan(unsure.score)
    assert unsure.failure_kind == "unreadable"
    assert unsure.failure.startswith("right: the grades have a probability of 0.0")
    long, fine = local(judge_folder).score(ASKED[:2], ["dog " * 90, "over"])
    assert (long.failure_kind, fine.failure) == ("too_long", "")
    assert "the judge reads at most 96" in long.failure


def test_rubric_dropout_is_a_function_of_the_texts(judge_folder: Path) -> None:
    criteria = {
        name: {"text": f"{name}?", "weight": float(name != "logged")} for name in ("a", "b", "c", "d", "logged")
    }
    reward = local(judge_folder, rubric={"criteria": criteria, "template": TEMPLATE}, dropout=0.5)
    many = [(ASKED[n % 4], f"text {n}") for n in range(400)]
    kept = [reward.criteria_of(*each) for each in many]
    assert all("logged" in names and len(names) > 1 for names in kept)
    assert kept[::-1] == [reward.criteria_of(*each) for each in many[::-1]]
    share = sum(len(names) - 1 for names in kept) / 1600
    # One criterion always stays: 4 x .5 + .5^4 x 1 of 4 are kept on average.
    assert share == pytest.approx((2 + 0.5**4) / 4, abs=0.04)
    assert reward.num_questions == 1 + 2 + 0.5**4
    columns = reward.columns(ASKED, TEXTS, 4)
    asked = [reward.criteria_of(*each) for each in zip(ASKED, TEXTS, strict=True)]
    assert any(len(names) < 5 for names in asked)
    for row, names in enumerate(asked):
        graded = {name: columns[1 + place][row] for place, name in enumerate(criteria)}
        assert [name for name, one in graded.items() if not math.isnan(one.score)] == names
        counted = [graded[name].score for name in names if name != "logged"]
        assert columns[0][row].score == pytest.approx(sum(counted) / len(counted))
        assert not any(one.failure for one in graded.values())
    parts = [reward.score(ASKED[n : n + 1], TEXTS[n : n + 1])[0].score for n in range(4)]
    assert parts == pytest.approx([one.score for one in columns[0]], abs=1e-5)


class GradingServer(ThreadingHTTPServer):
    """Answers by recorded replies: the last line of a question, which is the criterion, and the response."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1#grader"


def place(token: str, **logprobs: float) -> dict[str, Any]:
    return {"token": token, "top_logprobs": [{"token": t, "logprob": math.log(p)} for t, p in logprobs.items()]}


RECORDED: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "in the bush": ("4", [place("4", **{"4": 0.6, "5": 0.2, " 5": 0.1, "x": 0.1})]),
    "over the dog": ("It is good.\n**Grade: 2**", []),
    "in the hand": ("I cannot say", []),
    "far": ("9", []),
}


class _Handler(BaseHTTPRequestHandler):
    server: GradingServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        _, response, criterion = body["messages"][0]["content"].split("\n")
        said, content = ("5", []) if criterion == "Short?" else RECORDED[response]
        choice: dict[str, Any] = {"message": {"content": said}, "finish_reason": "stop"}
        if body.get("top_logprobs") and content:
            choice["logprobs"] = {"content": content}
        answer = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[GradingServer]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(retries, "FIRST_PAUSE_SECONDS", 0.01)
    with serving(GradingServer()) as running:
        yield running


def test_an_endpoint_grades_by_log_probabilities_or_by_its_text(server: GradingServer, tmp_path: Path) -> None:
    reward = JudgeReward.model_validate({"model": server.url, "rubric": RUBRIC}).prepared(tmp_path)
    totals, right, short = reward.columns(ASKED, TEXTS, 4)
    expected = (4 * 0.6 + 5 * 0.3) / 0.9
    assert right[0].score == pytest.approx((expected - 1) / 4)
    assert totals[0].score == pytest.approx((3 * (expected - 1) / 4 + 1) / 4)
    assert right[1].score == 0.25
    assert [one.failure_kind for one in totals] == ["", "", "unreadable", "unreadable"]
    assert all(math.isnan(one.score) for one in totals[2:])
    assert totals[2].failure == (
        "right: no grade: the answer ends with 'I cannot say'; a grade from 1 to 5 was expected"
    )
    assert "the answer is 9; a grade from 1 to 5" in right[3].failure
    assert [one.score for one in short] == [1.0] * 4
    assert len(server.bodies) == 8
    again = reward.columns(ASKED, TEXTS, 4)
    assert len(server.bodies) == 8  # from the cache, log-probabilities included
    assert again[1][0] == right[0]
    assert (server.bodies[0]["temperature"], server.bodies[0]["top_logprobs"]) == (0, 20)
    plain = JudgeReward.model_validate({"model": server.url, "rubric": RUBRIC, "top_logprobs": 0})
    assert plain.score(ASKED[:1], TEXTS[:1])[0].score == pytest.approx((3 * 0.75 + 1) / 4)
    assert "logprobs" not in server.bodies[-1]


def test_a_budget_counts_over_processes_that_share_the_cache(server: GradingServer, tmp_path: Path) -> None:
    reward = JudgeReward.model_validate({"model": server.url, "rubric": RUBRIC, "budget": 3}).prepared(tmp_path)
    (first,) = reward.score(ASKED[:1], TEXTS[:1])
    assert not first.failure
    other = JudgeReward.model_validate(reward.model_dump())  # as another rank, or the run that resumes, has it
    kinds = [one.failure_kind for one in other.score(ASKED[:3], TEXTS[:3])]
    assert (kinds, len(server.bodies)) == (["", "budget", "budget"], 3)


def test_an_endpoint_that_is_off_is_a_failure_and_never_zero(tmp_path: Path) -> None:
    reward = JudgeReward.model_validate({"model": "http://127.0.0.1:9/v1#x", "rubric": RUBRIC, "max_wait_seconds": 0})
    found = reward.prepared(tmp_path).score(ASKED, TEXTS)
    assert {(one.failure_kind, math.isnan(one.score)) for one in found} == {("endpoint", True)}
    assert found[0].failure.startswith("right: http://127.0.0.1:9/v1/chat/completions: ")


def test_a_rubric_file_and_its_table_are_the_same(tmp_path: Path, judge_folder: Path) -> None:
    path = tmp_path / "rubric.toml"
    path.write_text(FILE)
    reward = local(judge_folder, rubric=str(path))
    assert reward.rubric == Rubric.model_validate({**RUBRIC, "template": "$prompt $response $criterion"})
    assert local(judge_folder, rubric=reward.model_dump()["rubric"]) == reward  # as the written job has it
    own = Rubric.model_validate({"criteria": {"kind": {"text": "Is it kind?"}}})
    asked = own.question("kind", [{"role": "user", "content": "Costs $5?"}], "{no} $prompt")
    assert "<response>\n{no} $prompt\n</response>" in asked
    assert "Answer with one of 1, 2, 3, 4 or 5, and nothing else." in asked


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "weight = 3",
            "weigth = 3",
            r"line 4: criteria\.right\.weigth: unknown key; text, weight, grades were expected",
        ),
        ("weight = 3", "weight = -1", r"line 4: criteria\.right\.weight: .*greater than or equal to 0"),
        ('text = "Short?"', "", r"line 7: criteria\.short\.text: missing"),
        (
            "grades = [0, 1, 2, 3, 4, 5]",
            "grades = [1]",
            r"line 9: criteria\.short\.grades: grades are \[1\]; two or more",
        ),
        ("template", "question", r"line 1: question: unknown key; criteria, grades, template were expected"),
        ("$criterion", "", r"line 1: template: found \$prompt, \$response; \$prompt, \$response and \$criterion"),
        ("[criteria.right]", "[criteria.rubric]", r"criteria: 'rubric' is no name of a criterion"),
        ("[criteria.right]", "[criteria.right", r"not TOML: .*line 3"),
        (FILE, "grades = [1, 2]", r"criteria: missing"),
        (FILE, "[criteria]", r"line 1: criteria: .*at least 1 item"),
        (FILE, "[criteria.a]\ntext = 'a'\nweight = 0", r"criteria: the weights are all 0; a weight above 0"),
    ],
)
def test_a_wrong_rubric_names_file_line_and_field(
    tmp_path: Path, judge_folder: Path, old: str, new: str, words: str
) -> None:
    path = tmp_path / "rubric.toml"
    path.write_text(FILE.replace(old, new))
    with pytest.raises(ValueError, match=rf"rubric\.toml: {words}"):
        local(judge_folder, rubric=str(path))
    with pytest.raises(ValueError, match=r"none\.toml: no such file; a TOML file with criteria"):
        local(judge_folder, rubric=str(tmp_path / "none.toml"))


def test_a_judge_without_the_grades_tokens_is_refused(judge_folder: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"the judge .*: criteria\.right: .* no token for the grade 10 \("):
        local(judge_folder, rubric={**RUBRIC, "grades": [2, 10]}).check(())
    local(judge_folder).check(())
    found = grade_tokens(tokenizer, Rubric.model_validate(RUBRIC))
    assert found["short"] == GradeTokens(
        (tokenizer.encode(" ")[0],), tuple(tokenizer.encode(digit)[0] for digit in "012345")
    )
    with pytest.raises(ValueError, match=r"URL#MODEL was expected"):
        local(Path("x"), model="http://host/v1")
