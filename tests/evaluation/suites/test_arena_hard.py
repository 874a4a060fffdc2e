"""Arena-Hard: five-level verdicts in both orders, against the authors' logistic regression on repeated verdicts."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from evaluation.endpoint import Answer
from evaluation.suites.arena_hard import SUITE, read_label, weighted_mean
from evaluation.suites.suite import Scored, Tools
from tests.conftest import ChatServer
from tests.evaluation.suites.models import EndpointJudge, Written, by_prompt

BENCHMARKS = Path(__file__).parents[4] / "shared/data/benchmarks"
LABELS = ("A>>B", "A>B", "A=B", "B>A", "B>>A")


def write(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def judged(
    tmp_path: Path, server: ChatServer, name: str, verdicts: list[tuple[str, str]], failures: tuple[str, ...] = ()
) -> list[Scored]:
    """Scores a model by recorded labels: of the order with the model's answer as A, and of that with it as B."""
    rows = [{"uid": f"u{n}", "category": "c", "prompt": f"Question {n}."} for n in range(len(verdicts))]
    items = SUITE.read(write(tmp_path / f"{name}.jsonl", rows))

    def answer(_model: str, asked: str, _seed: int) -> str:
        number = int(asked.partition("Question ")[2].partition(".")[0])
        is_first = asked.index(f"{name}'s answer") < asked.index("the baseline's answer")
        return f"A is [[A=B]]? No. My verdict: {verdicts[number][0 if is_first else 1]}"

    server.answer = answer
    judge = EndpointJudge(server.url, tmp_path / f"{name}.sqlite")
    baseline = Written(lambda _request: Answer("the baseline's answer"))
    answers = {row["prompt"]: f"{name}'s answer" for row in rows}
    answers |= {prompt: Answer("", failure="timed out") for prompt in failures}
    model = Written(by_prompt(answers))
    scored = SUITE.score(model, items, Tools(judge, baseline=baseline.answer))
    assert baseline.asked == model.asked
    assert [(request.item_id, request.max_new_tokens) for request in model.asked] == [(i.item_id, 4096) for i in items]
    return scored


def test_verdicts_by_hand(tmp_path: Path, chat_server: ChatServer) -> None:
    verdicts = [
        ("[[A>>B]]", "[[B>>A]]"),  # the model, significantly, twice
        ("[[A>B]]", "[[A>>B]]"),  # it slightly, then the baseline significantly
        ("[[A=B]]", "[[B>A]]"),
        ("[[A>B]]", "neither"),
        ("[[A>B]]", "[[B>A]]"),
    ]
    scored = judged(tmp_path, chat_server, "m", verdicts, failures=("Question 4.",))
    assert scored[0].values == {"score": 1.0, "win_rate": 1.0, "verdict_weight": 6.0, "position_consistency": 1.0}
    assert scored[1].values == {"score": 0.25, "win_rate": 0.5, "verdict_weight": 4.0, "position_consistency": 0.0}
    assert scored[2].values == {"score": 0.75, "win_rate": 0.75, "verdict_weight": 2.0, "position_consistency": 0.0}
    # The other [[A=B]] in the reply is not the last.
    assert scored[3].values == {"score": 0.75, "win_rate": 0.75, "verdict_weight": 2.0, "position_consistency": 0.0}
    assert scored[4].failures == dict.fromkeys((measure.name for measure in SUITE.measures), "timed out")
    assert weighted_mean(scored) == pytest.approx((6 + 1 + 1.5 + 1.5) / (6 + 4 + 2 + 2))
    assert math.isnan(weighted_mean(scored[4:]))


def test_labels() -> None:
    for reply, lead in (
        ("[[A>>B]]", 2), ("so [[a>b]] it is", 1), ("[[A>B]] or [[B=A]]", 0), ("[B>A]", -1), ("[[A<<B]]", -2),
        ("[[A=B]] beats [B>>A]", 0),
    ):  # fmt: skip
        assert read_label(reply) == (lead, "")
    assert read_label("A>>B")[1].startswith("no verdict in the answer")
    assert read_label("[[A>>>B]]")[1].startswith("the verdict is 'A>>>B'")


def test_the_score_is_that_of_the_authors_fit(tmp_path: Path, chat_server: ChatServer) -> None:
    """Their fit is over all models at once: a column of ±log 10 per model, each battle twice, a tie won once of two.

    A verdict that says "significantly" is three battles.
    """
    generator = np.random.default_rng(7)
    scores: dict[str, float] = {}
    battles: list[tuple[int, float]] = []  # (the model's column, who won it for the model)
    for column, (name, chances) in enumerate(
        {"strong": (0.4, 0.3, 0.1, 0.1, 0.1), "weak": (0.05, 0.15, 0.2, 0.3, 0.3)}.items(), start=1
    ):
        drawn = generator.choice(5, size=(40, 2), p=chances)
        verdicts = [(f"[[{LABELS[first]}]]", f"[[{LABELS[4 - second]}]]") for first, second in drawn]
        scores[name] = weighted_mean(judged(tmp_path, chat_server, name, verdicts))
        for level in drawn.ravel():
            won = {0: 1.0, 1: 1.0, 2: 0.5, 3: 0.0, 4: 0.0}[int(level)]
            battles += [(column, won)] * (3 if level in (0, 4) else 1)
    features, labels = np.zeros((2 * len(battles), 3)), np.zeros(2 * len(battles))
    for place, (column, won) in enumerate(battles):
        for copy in (place, place + len(battles)):
            features[copy, column], features[copy, 0] = math.log(10), -math.log(10)
        labels[place], labels[place + len(battles)] = won > 0, won == 1.0
    fit = LogisticRegression(fit_intercept=False, C=np.inf, tol=1e-10, max_iter=10_000).fit(features, labels)
    elo = 400 * fit.coef_[0]
    for column, name in enumerate(scores, start=1):
        assert scores[name] == pytest.approx(1 / (1 + 10 ** ((elo[0] - elo[column]) / 400)), abs=1e-5)
    assert scores["weak"] < 0.4 < 0.6 < scores["strong"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"uid": "b", "category": "c"}, r"q.jsonl: line 2: field 'prompt' is missing"),
        ({"uid": "b", "category": "c", "prompt": " "}, r"q.jsonl: line 2: field 'prompt' is empty"),
        ({"uid": "b", "prompt": "x"}, r"q.jsonl: line 2: field 'category' is missing"),
        ({"uid": "", "category": "c", "prompt": "x"}, r"q.jsonl: line 2: field 'uid' is empty"),
        ({"uid": "a", "category": "c", "prompt": "x"}, r"q.jsonl: line 2: the id 'a' is already used in .* line 1"),
        ({"uid": "b", "category": "c", "prompt": "x", "cluster": 3}, r"q.jsonl: line 2: field 'cluster' is int"),
    ],
)
def test_malformed_rows(tmp_path: Path, row: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SUITE.read(write(tmp_path / "q.jsonl", [{"uid": "a", "category": "c", "prompt": "x"}, row]))


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="Arena-Hard's questions are not on this machine")
def test_the_published_questions() -> None:
    old = SUITE.read(str(BENCHMARKS / "arena_hard_v0.1_question.jsonl.gz"))
    assert (len(old), len({item.cluster for item in old})) == (500, 250)
    new = SUITE.read(str(BENCHMARKS / "arena_hard_v2.0_question.jsonl.gz"))
    groups = [item.group for item in new]
    assert (groups.count("hard_prompt"), groups.count("creative_writing")) == (500, 250)
    assert {item.cluster for item in new} == {""}


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="Arena-Hard's leaderboard is not on this machine")
def test_the_published_intervals_take_repeated_verdicts_for_independent_ones() -> None:
    """docs/evaluate.md says so. A model has 1,000 verdicts, so 1,000 to 3,000 of them with the repeated ones.

    The variance p(1-p)/n of n independent verdicts gives the n that an interval of half width 1.96·sd stands for.
    """
    with (BENCHMARKS / "arena_hard_leaderboard_20240731.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["model"] != "gpt-4-0314"]  # the baseline
    sizes = []
    for row in rows:
        score, low, high = (float(row[name]) / 100 for name in ("score", "rating_q025", "rating_q975"))
        assert row["CI"] == f"({100 * (low - score):+.2f}, {100 * (high - score):+.2f})"
        sizes.append(score * (1 - score) * (2 * 1.96 / (high - low)) ** 2)
    assert len(rows) == 59
    assert 1000 < min(sizes) < max(sizes) < 3000
