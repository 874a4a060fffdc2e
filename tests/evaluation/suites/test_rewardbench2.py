"""RewardBench 2: accuracy and the score of Ties by hand, and a real small reward model."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from evaluation.evaluate.statistics import SuiteStatistics, suite_statistics
from evaluation.judges.judge import reward_model_score
from evaluation.suites.rewardbench2 import SUITE, mean_of_subsets, ties_score
from evaluation.suites.suite import Scored, Tools
from lm.config import ModelConfig
from lm.model import ScalarModel, init_weights
from lm.tokenizer import Messages, Tokenizer
from lm.weights import save_model
from reward.endpoint import Answer
from reward.scoring import RewardModel
from tests.evaluation.suites.models import Rewarding


def row(row_id: str, subset: str, chosen: list[str], rejected: list[str]) -> dict[str, Any]:
    """A row of the published file. In these tests, an answer's text is its reward."""
    answers = {"chosen": chosen, "rejected": rejected, "num_correct": len(chosen), "num_incorrect": len(rejected)}
    return {"id": row_id, "prompt": f"Prompt {row_id}", "subset": subset, "total_completions": 4, **answers}


ROWS = [
    row("0", "Factuality", ["3"], ["1", "2", "2.5"]),
    row("1", "Factuality", ["1"], ["1", "2", "0"]),
    row("2", "Math", ["2"], ["2", "1", "0"]),  # shares the highest reward with another
    row("3", "Math", ["-1"], ["-2", "-3", "-1.5"]),
    row("ref:0", "Ties", ["5"], ["1", "2"]),  # r = 3
    row("tied:0", "Ties", ["4", "5", "6"], ["1", "0"]),  # m = 3, s = 2: right
    row("ref:1", "Ties", ["3"], ["2"]),  # r = 1
    row("tied:1", "Ties", ["7", "9"], ["3", "1"]),  # m = 4, s = 2: only without its ref row
    row("ref:2", "Ties", ["1"], ["2"]),  # r = -1
    row("tied:2", "Ties", ["4", "4"], ["3"]),  # m = 1, s = 0
]
RIGHT_REF, RIGHT_TIED = 2 / 3, 1.0
CLOSER, CLOSER_WITH_REF = 1.0, 1 / 3
CLOSENESS = (math.tanh(3 / 2 - 1) + math.tanh(1 / 2 - 1)) / 2  # without the row whose right answers are all equal
TIES = 0.3 * RIGHT_TIED + 0.3 * RIGHT_REF + 0.2 * CLOSER + 0.2 * CLOSER_WITH_REF + 0.01 * CLOSENESS


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(path)


def by_text(conversation: Messages) -> Answer | float:
    text = conversation[-1]["content"]
    return Answer("", failure="too long") if text == "?" else float(text)


def scored_rows(tmp_path: Path, rows: list[dict[str, Any]]) -> list[Scored]:
    items = SUITE.read(write(tmp_path / "test.jsonl", rows))
    return SUITE.score(Rewarding(by_text), items, Tools())


def test_accuracy_and_ties_by_hand(tmp_path: Path) -> None:
    scored = scored_rows(tmp_path, ROWS)
    assert [one.values["accuracy"] for one in scored[:4]] == [1.0, 0.0, 0.5, 1.0]
    assert scored[5].values == {"margin": 3.0, "spread": 2.0, "num_subsets": 3.0}
    assert ties_score(scored[4:]) == pytest.approx(TIES, abs=1e-12)
    assert mean_of_subsets(scored) == pytest.approx((0.5 + 0.75 + TIES) / 3, abs=1e-12)  # subsets weigh the same
    assert math.isnan(ties_score(scored[4:5]))  # no tied row
    # All right, with equal rewards: no ratio of margin to spread.
    best = scored_rows(tmp_path, [row("ref:0", "Ties", ["3"], ["2"]), row("tied:0", "Ties", ["3", "3"], ["2"])])
    assert ties_score(best) == pytest.approx(1.0)
    # A margin of 0 is not right.
    zero = scored_rows(tmp_path, [row("ref:0", "Ties", ["2"], ["2"]), row("tied:0", "Ties", ["2", "2"], ["2"])])
    assert ties_score(zero) == 0.0


@pytest.mark.parametrize(
    ("seed", "digits", "expected"),
    [
        (0, 2, 0.47665013266823697), (1, 2, 0.6960347651197727),
        (2, 0, 0.6279757991662632), (3, 0, 0.5585446415468088),  # with equal rewards
    ],
)  # fmt: skip
def test_ties_are_scored_as_by_the_original_code(tmp_path: Path, seed: int, digits: int, expected: float) -> None:
    """Expected are the numbers of `process_single_model` in rewardbench 0.1.4 (PyPI) on these rewards."""
    generator = random.Random(seed)

    def rewards(mean: float, num: int) -> list[str]:
        return [str(round(generator.gauss(mean, 1), digits)) for _ in range(num)]

    rows = []
    for n in range(6):
        rows.append(row(f"ref:{n}", "Ties", rewards(1.5, 1), rewards(0, 2)))
        rows.append(row(f"tied:{n}", "Ties", rewards(2.5, 3), rewards(0, 2)))
    assert ties_score(scored_rows(tmp_path, rows)) == pytest.approx(expected, abs=1e-12)


def test_the_two_rows_of_a_pair_are_a_cluster(tmp_path: Path) -> None:
    items = SUITE.read(write(tmp_path / "test.jsonl", ROWS))
    assert [item.cluster for item in items] == [""] * 4 + [f"Ties/{pair}" for pair in (0, 0, 1, 1, 2, 2)]


def test_a_failed_reward_is_a_failed_item(tmp_path: Path) -> None:
    rows = [ROWS[0], row("9", "Factuality", ["1"], ["0", "?"]), *ROWS[4:6], row("tied:7", "Ties", ["2", "?"], ["1"])]
    scored = scored_rows(tmp_path, rows)
    assert scored[1].values == {}
    assert scored[1].failures == dict.fromkeys(("score", "accuracy"), "answer 3 of 3: too long")
    assert scored[4].failures == dict.fromkeys(("score", "ties_score"), "answer 2 of 3: too long")
    assert mean_of_subsets([scored[0], *scored[2:4]]) == pytest.approx((1 + ties_score(scored[2:4])) / 2)
    # A subset without any value makes the score unknown.
    whole = scored_rows(tmp_path, [ROWS[0], row("8", "Math", ["?"], ["0"])])
    assert whole[1].failures == dict.fromkeys(("score", "accuracy"), "answer 1 of 2: too long")
    assert math.isnan(mean_of_subsets(whole[:1]))


def test_statistics_of_a_subset_with_one_item_and_of_ties(tmp_path: Path) -> None:
    """The score has no interval if nothing is known about the spread in a subset; Ties is of its own rows only."""
    factuality = [row(str(n), "Factuality", ["2"], [str(n % 4)]) for n in range(8)]
    pairs = [
        one
        for n in range(7)
        for one in (row(f"ref:{n}", "Ties", ["3"], [str(n)]), row(f"tied:{n}", "Ties", ["5", "6"], [str(n)]))
    ]

    def statistics(rows: list[dict[str, Any]]) -> SuiteStatistics:
        scored = {one.item_id: one for one in scored_rows(tmp_path, rows)}
        items = SUITE.read(str(tmp_path / "test.jsonl"))
        return suite_statistics("rewardbench2", SUITE.measures, items, {"m": scored}, seed=0)

    found = statistics([*factuality, *pairs])
    score, ties = found.of("m", "score"), found.of("m", "ties_score")
    assert score is not None
    assert score.value.low < score.value.mean < score.value.high
    assert ties is not None
    assert (ties.num_items, ties.num_clusters) == (14, 7)
    single = statistics([*factuality, *pairs, row("math", "Math", ["1"], ["0"])]).of("m", "score")
    assert single is not None
    assert math.isfinite(single.value.mean)
    assert math.isnan(single.value.low)


def test_a_real_reward_model(tmp_path: Path, tiny_config: ModelConfig, tokenizer: Tokenizer) -> None:
    network = ScalarModel(tiny_config)
    init_weights(network, seed=5)
    save_model(tmp_path / "reward", network, network.state_dict(), tokenizer)
    score = reward_model_score(tmp_path / "reward", {})

    def reward(conversation: Messages) -> Answer | float:
        (found,) = score([conversation[:-1]], [conversation[-1]["content"]])
        return Answer("", failure=found.failure) if found.failure else found.score

    texts = ["the dog", "a bird", "the bush", "far"]
    rows = [row(str(n), "Focus", [texts[n]], texts[:n] + texts[n + 1 :]) | {"prompt": "What?"} for n in range(4)]
    rows += [row("4", "Focus", ["word " * 200], ["a", "b", "c"])]
    items = SUITE.read(write(tmp_path / "test.jsonl", rows))
    scored = SUITE.score(Rewarding(reward), items, Tools())
    model = RewardModel.load(tmp_path / "reward")
    expected = []
    for one in rows[:4]:
        whole = [
            model.tokenizer.encode_prompt([{"role": "user", "content": one["prompt"]}])
            + model.tokenizer.encode(f" {text}") + [model.tokenizer.turn_end_id]
            for text in (*one["chosen"], *one["rejected"])
        ]  # fmt: skip
        first, *others = model.score_sequences(whole)
        expected.append(float(first > max(others)))
    assert [one.values["accuracy"] for one in scored[:4]] == expected
    assert sum(expected) == 1  # each of the four answers was once the right one
    assert scored[4].failures["accuracy"].endswith("tokens; the reward model reads at most 96")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"subset": "Chat"}, r"r.jsonl: line 2: field 'subset' is 'Chat'; one of Factuality, .*, Ties was expected"),
        ({"chosen": "3"}, r"r.jsonl: line 2: field 'chosen' is str; a list was expected"),
        ({"rejected": ["1", None]}, r"r.jsonl: line 2: field 'rejected\[1\]' is null"),
        ({"rejected": []}, r"r.jsonl: line 2: fields 'chosen' and 'rejected' hold 1 answers; 2 or more were"),
        ({"num_correct": 2}, r"r.jsonl: line 2: field 'num_correct' is 2; a whole number from 1 to 1 was expected"),
        ({"subset": "Ties", "id": "3"}, r"r.jsonl: line 2: field 'id' is '3'; ref:N or tied:N was expected in Ties"),
        ({"subset": "Ties", "id": "tied:3"}, r"r.jsonl: line 2: field 'num_correct' is 1; a whole number from 2 to 3"),
        ({"prompt": ""}, r"r.jsonl: line 2: field 'prompt' is empty"),
        ({"id": "0"}, r"r.jsonl: line 2: the id 'Factuality/0' is already used in .*line 1"),
    ],
)
def test_malformed_rows(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SUITE.read(write(tmp_path / "r.jsonl", [ROWS[0], ROWS[0] | {"id": "1"} | change]))
