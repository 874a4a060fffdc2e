"""Comparisons of policies on a few made-up samples whose figures can be worked by hand."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from compare.stage import best_of, best_of_n_curve, compare_policies, gold_scores, side_by_side
from evaluation.sampling import Sample
from training.data import Prompt

PROMPTS = [
    Prompt(prompt_id=name, messages=({"role": "user", "content": f"ask {name}"},), kind=kind)
    for name, kind in (("a", "story"), ("b", "list"), ("c", "story"))
]
NAN = math.nan


def gold(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """The number that a response is, a tenth off where the prompt is not the one it names."""
    return [
        float(r.split()[0]) - (0.0 if p == f"ask {r.split()[1]}" else 0.1)
        for p, r in zip(prompts, responses, strict=True)
    ]


def samples(golds: Sequence[Sequence[float]], scores: Any = None, ratios: Any = None) -> list[Sample]:
    """Samples prompt after prompt, of these gold scores."""
    return [
        Sample(
            prompt_id=prompt.prompt_id,
            index=index,
            response=f"{value} {prompt.prompt_id}",
            num_tokens=10 * (index + 1),
            finished=index == 0,
            log_ratio=NAN if ratios is None else ratios[row][index],
            score=NAN if scores is None else scores[row][index],
        )
        for row, prompt in enumerate(PROMPTS)
        for index, value in enumerate(golds[row])
    ]


FIRST = samples(
    [[0.2, 0.6], [0.9, 0.9], [0.1, 0.5]],
    scores=[[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]],
    ratios=[[0.5, 1.5], [-1.0, 1.0], [2.0, 2.0]],
)
SECOND = samples([[0.4, 0.4], [0.9, 0.2], [0.8, 0.7]])


def test_gold_scores_lie_by_prompt() -> None:
    assert gold_scores(FIRST, PROMPTS, gold).tolist() == [[0.2, 0.6], [0.9, 0.9], [0.1, 0.5]]


def test_figures_of_a_policy_by_hand() -> None:
    found = compare_policies({"first": FIRST, "second": SECOND}, PROMPTS, gold, pass_mark=0.5, seed=0)
    first, second = found["policies"]["first"], found["policies"]["second"]
    assert first["gold_score"]["mean"] == pytest.approx((0.2 + 0.6 + 0.9 + 0.9 + 0.1 + 0.5) / 6)
    assert first["pass_share"]["mean"] == pytest.approx(3 / 6)  # above the mark, not at it
    assert first["kl_nats"]["mean"] == pytest.approx((0.5 + 1.5 - 1 + 1 + 2 + 2) / 6)
    assert first["proxy_score"]["mean"] == pytest.approx(24 / 6)
    assert first["end_rate"] == 0.5
    assert first["mean_tokens"] == 15
    assert first["by_kind"] == pytest.approx({"story": (0.2 + 0.6 + 0.1 + 0.5) / 4, "list": 0.9})
    # First samples only: "0.2 a", "0.9 b", "0.1 c" have one pair of words each, all different.
    assert first["distinct_2"] == 1.0
    for name in ("gold_score", "pass_share", "kl_nats", "proxy_score"):
        assert first[name]["low"] <= first[name]["mean"] <= first[name]["high"]
    # What was not measured is None, never 0.
    assert second["kl_nats"] is None
    assert second["proxy_score"] is None


def test_win_rates_by_hand() -> None:
    pairs = compare_policies({"first": FIRST, "second": SECOND}, PROMPTS, gold, pass_mark=0.5, seed=0)["pairs"]
    assert set(pairs) == {"first/second", "second/first"}
    # a: 0.2 loses twice, 0.6 wins twice: 1/2. b: 0.9 ties 0.9 and beats 0.2, twice: 3/4. c: loses all: 0.
    assert pairs["first/second"]["win_rate"]["mean"] == pytest.approx((0.5 + 0.75 + 0) / 3)
    assert pairs["second/first"]["win_rate"]["mean"] == pytest.approx(1 - 1.25 / 3)
    assert pairs["first/second"]["win_rate"]["num_prompts"] == 3


def test_best_of_takes_the_reward_models_favourite() -> None:
    pool = samples(
        [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]], scores=[[5.0, 1.0, 9.0], [0.0, 2.0, 1.0], [3.0, 3.0, 1.0]]
    )
    assert [sample.index for sample in best_of(pool, 3)] == [2, 1, 0]
    assert [sample.index for sample in best_of(pool, 2)] == [0, 1, 0]  # of the first two only
    assert [sample.index for sample in best_of(pool, 1)] == [0, 0, 0]
    assert [sample.prompt_id for sample in best_of(pool, 3)] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="prompt 'a' has 3 samples; best-of-4 needs 4"):
        best_of(pool, 4)


def test_the_curve_of_best_of_n_by_hand() -> None:
    golds = [[0.1, 0.2, 0.3, 0.8], [0.4, 0.5, 0.6, 0.0], [0.7, 0.8, 0.9, 0.2]]
    scores = [[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0], [1.0, 9.0, 5.0, 2.0]]
    curve = best_of_n_curve(samples(golds, scores), PROMPTS, gold, seed=0)
    assert [point["n"] for point in curve] == [1, 2, 4]
    # n = 1 is the policy itself: the plain means.
    assert curve[0]["gold_score"]["mean"] == pytest.approx(sum(map(sum, golds)) / 12)
    assert curve[0]["proxy_score"]["mean"] == pytest.approx(sum(map(sum, scores)) / 12)
    assert curve[0]["kl_bound_nats"] == 0
    # n = 4 is the favourite of the whole pool.
    assert curve[2]["gold_score"]["mean"] == pytest.approx((0.8 + 0.4 + 0.8) / 3)
    assert curve[2]["proxy_score"]["mean"] == pytest.approx((4 + 4 + 9) / 3)
    assert curve[2]["kl_bound_nats"] == pytest.approx(math.log(4) - 3 / 4)
    # n = 2: the six pairs of each prompt.
    pairs = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    expected = [g[i] if s[i] > s[j] else g[j] for g, s in zip(golds, scores, strict=True) for i, j in pairs]
    assert curve[1]["gold_score"]["mean"] == pytest.approx(sum(expected) / 18)


def test_a_pool_that_is_no_power_of_two_ends_below_it() -> None:
    pool = samples([[0.1] * 3] * 3, scores=[[1.0, 2.0, 3.0]] * 3)
    assert [point["n"] for point in best_of_n_curve(pool, PROMPTS, gold, seed=0)] == [1, 2]


def test_side_by_side_shows_first_samples() -> None:
    rows = side_by_side({"first": FIRST, "second": SECOND}, PROMPTS, gold, 2)
    assert [row["prompt_id"] for row in rows] == ["a", "b"]
    assert rows[1]["kind"] == "list"
    assert rows[1]["prompt"] == "ask b"
    assert rows[0]["responses"]["first"] == {"text": "0.2 a", "gold_score": 0.2, "proxy_score": 1.0}
    assert rows[1]["responses"]["second"]["gold_score"] == 0.9
    assert side_by_side({"first": FIRST}, PROMPTS, gold, 0) == []
