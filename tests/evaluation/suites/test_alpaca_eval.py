"""AlpacaEval: both orders of every pair, the win rate by hand, and the win rate at equal length."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from evaluation.compare.judges import function_judge
from evaluation.statistics.win_rates import length_controlled
from evaluation.suites.alpaca_eval import SUITE, at_equal_length
from evaluation.suites.suite import Scored, Tools
from evaluation.verdicts import Verdict, comparisons_of
from reward.endpoint import Answer
from tests.conftest import SHOWN, ChatServer
from tests.evaluation.suites.models import EndpointJudge, Written, by_prompt

ROWS = [
    {"instruction": "Name a bird.", "output": "A wren.", "dataset": "koala", "generator": "base"},
    {"instruction": "Name a fish.", "output": "An eel.", "dataset": "koala", "generator": "base"},
    {"instruction": "Add the two.", "input": "2 and 3", "output": "5", "dataset": "vicuna", "generator": "base"},
    {"instruction": "Say hello.", "output": "Hello.", "dataset": "vicuna", "generator": "base"},
    {"instruction": "Name a tree.", "output": "An oak.", "dataset": "oasst", "generator": "base"},
]
ANSWERS = {
    "Name a bird.": "A wren, which is small.",  # longer
    "Name a fish.": "Eel.",  # shorter
    "Add the two.\n\n2 and 3": "5",  # identical
    "Say hello.": "mumble",
    "Name a tree.": Answer("", failure="the prompt does not fit"),
}


def write(path: Path, rows: object) -> str:
    path.write_text(json.dumps(rows))
    return str(path)


def test_a_judge_that_prefers_the_longer_answer(tmp_path: Path, chat_server: ChatServer) -> None:
    items = SUITE.read(write(tmp_path / "alpaca_eval.json", ROWS))
    assert [(item.item_id, item.group) for item in items[:3]] == [("0", "koala"), ("1", "koala"), ("2", "vicuna")]

    def answer(_model: str, asked: str, _seed: int) -> str:
        first, second = SHOWN.search(asked).groups()
        if "mumble" in (first, second):
            return "Verdict: 1" if first == "mumble" else "I cannot say."
        return f"Verdict: {1 if len(first) > len(second) else 2}"

    chat_server.answer = answer
    judge = EndpointJudge(chat_server.url, tmp_path / "answers.sqlite")
    longer, shorter, same, unparsed, failed = SUITE.score(Written(by_prompt(ANSWERS)), items, Tools(judge))
    assert longer.values == {"win_rate": 1.0, "position_consistency": 1.0, "length_difference": 16.0}
    assert shorter.values == {"win_rate": 0.0, "position_consistency": 1.0, "length_difference": -3.0}
    assert same.values == {"win_rate": 0.5, "length_difference": 0.0}  # the judge was not asked
    assert len(chat_server.bodies) == 6
    # One order without a verdict is a failed item: the other order alone would count the judge's bias.
    assert unparsed.values == {}
    assert unparsed.failures["win_rate"].startswith("the judge: no verdict: the answer ends with 'I cannot say.'")
    assert set(unparsed.failures) == {measure.name for measure in SUITE.measures}
    assert (failed.values, failed.failures["win_rate"]) == ({}, "the prompt does not fit")
    values = [one.values["win_rate"] for one in (longer, shorter, same)]
    assert sum(values) / 3 == 0.5  # a win, a loss and a tie; failures are left out


def test_a_judge_that_prefers_the_first_answer_is_inconsistent(tmp_path: Path, chat_server: ChatServer) -> None:
    items = SUITE.read(write(tmp_path / "alpaca_eval.json", ROWS[:2]))
    judge = EndpointJudge(chat_server.url, tmp_path / "answers.sqlite", model="first")
    baseline = Written(by_prompt({"Name a bird.": "A jay.", "Name a fish.": Answer("", failure="timed out")}))
    model = Written(by_prompt(ANSWERS))
    biased, failed = SUITE.score(model, items, Tools(judge, baseline=baseline.answer))
    assert baseline.asked == model.asked
    assert [(request.item_id, request.max_new_tokens) for request in model.asked] == [("0", 2048), ("1", 2048)]
    assert biased.values == {"win_rate": 0.5, "position_consistency": 0.0, "length_difference": 17.0}
    assert failed.failures["win_rate"] == "the baseline: timed out"
    shown = [SHOWN.search(body["messages"][0]["content"]).groups() for body in chat_server.bodies]
    assert sorted(shown) == [("A jay.", "A wren, which is small."), ("A wren, which is small.", "A jay.")]
    without = SUITE.read(write(tmp_path / "without.json", [ROWS[0], ROWS[1] | {"output": None}]))
    unasked = Written(by_prompt(ANSWERS))
    with pytest.raises(ValueError, match=r"1 of 2 items, such as '1', have no field 'output'; .* --baseline SPEC"):
        SUITE.score(unasked, without, Tools(judge))
    assert unasked.asked == []


def test_a_function_judges_by_its_scores(tmp_path: Path) -> None:
    """The higher score wins in both orders; there is no position, and a text without a score is a failure."""
    (tmp_path / "judges.py").write_text(
        "def length(prompts, responses):\n    return [None if r == 'mumble' else len(r) for r in responses]\n"
    )
    items = SUITE.read(write(tmp_path / "alpaca_eval.json", ROWS))
    scorer = function_judge("length", f"{tmp_path / 'judges.py'}:length")
    longer, shorter, same, unscored, failed = SUITE.score(
        Written(by_prompt(ANSWERS)), items, Tools(scorer=scorer)
    )  # fmt: skip
    assert longer.values == {"win_rate": 1.0, "length_difference": 16.0}
    assert shorter.values == {"win_rate": 0.0, "length_difference": -3.0}
    assert same.values == {"win_rate": 0.5, "length_difference": 0.0}
    assert "judges.py:length returned None" in unscored.failures["win_rate"]
    assert failed.failures["win_rate"] == "the prompt does not fit"


def test_the_win_rate_at_equal_length_is_a_logistic_fits() -> None:
    """Against scikit-learn: intercept and tanh(Δ/σ), where a preference of ½ is half a win and half a loss."""
    generator = np.random.default_rng(3)
    longer = generator.normal(200, 300, 400).round()
    chance = 1 / (1 + np.exp(0.4 - 1.5 * np.tanh(longer / 300)))
    won = generator.binomial(2, chance) / 2
    scored = [
        Scored(str(n), {"win_rate": y, "length_difference": x})
        for n, (y, x) in enumerate(zip(won, longer, strict=True))
    ]
    features = np.tanh(longer / np.sqrt((longer**2).mean()))[:, None]
    model = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000)
    labels, weights = np.repeat([1, 0], len(won)), np.concatenate([won, 1 - won])
    model.fit(np.concatenate([features, features]), labels, sample_weight=weights)
    expected = 1 / (1 + math.exp(-model.intercept_[0]))
    assert at_equal_length(scored) == pytest.approx(expected, abs=1e-5)
    assert expected < won.mean() - 0.1  # the longer answers had been preferred for their length
    assert math.isnan(at_equal_length(scored[:3]))
    verdicts = [
        Verdict(f"p{n}", "model", "base", 0, 0, "j", "j", float(y), length_a=1000 + int(x), length_b=1000)
        for n, (y, x) in enumerate(zip(won, longer, strict=True))
    ]
    compared = comparisons_of(verdicts, ("model", "base")).between(0, 1)
    assert at_equal_length(scored) == pytest.approx(length_controlled(compared).mean, abs=1e-9)  # as `heed compare`
    alike = [Scored(str(n), {"win_rate": 1.0, "length_difference": float(n)}) for n in range(9)]
    assert math.isnan(at_equal_length(alike))
    by_length = [Scored(str(n), {"win_rate": float(n > 4), "length_difference": n - 4.5}) for n in range(10)]
    assert at_equal_length(by_length) == pytest.approx(0.5)  # by the prior: there is no finite maximum
