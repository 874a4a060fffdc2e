"""Labelers' accuracies, estimated only from their rankings."""

import math

import numpy as np
import pytest

from heed.worlds.labelers import LabelerConfig, ScriptedLabeler, Taste
from preferences.records import Message, Ranking, ShownTask
from preferences.statistics.agreement import Reliability, labeler_reliability, labeler_weights

PROMPT = (Message("user", "Which?"),)


def coin_rankings(accuracies: dict[str, float], num_tasks: int, per_task: int, seed: int) -> list[Ranking]:
    """Pairs in which the first response is better; each labeler says so with their own probability."""
    generator = np.random.default_rng(seed)
    names = sorted(accuracies)
    rankings = []
    for task in range(num_tasks):
        for name in generator.choice(names, size=per_task, replace=False):
            ranks = (1, 2) if generator.random() < accuracies[name] else (2, 1)
            rankings.append(Ranking(str(task), (Message("user", str(task)),), ("a", "b"), ranks, name))
    return rankings


def test_planted_accuracies_are_found() -> None:
    planted = {"ann": 0.92, "bo": 0.75, "cy": 0.5, "di": 0.66}
    found = labeler_reliability(coin_rankings(planted, 6000, 2, seed=1))
    for name, accuracy in planted.items():
        assert found[name].accuracy == pytest.approx(accuracy, abs=0.04), name
    assert sum(reliability.num_pairs for reliability in found.values()) == 12_000


def test_scripted_labelers_noise_is_found() -> None:
    """Rankings of four by labelers who differ only in noise; their accuracy is measured against the gold score."""
    gold = [0.1, 0.35, 0.6, 0.85]
    texts = ("a", "b", "c", "d")
    labelers = [
        ScriptedLabeler(
            name, lambda _, shown: [gold[texts.index(text)] for text in shown],
            LabelerConfig(noise=noise, position_bias=0, tie_threshold=0.02), Taste(0, 0, "", 0), seed=3,
        )
        for name, noise in (("careful", 0.1), ("usual", 0.35), ("careless", 0.9))
    ]  # fmt: skip
    rankings, right = [], dict.fromkeys(("careful", "usual", "careless"), 0.0)
    for task in range(500):
        for labeler in labelers:
            ranks = labeler.judge(ShownTask(str(task), PROMPT, texts)).ranks
            rankings.append(Ranking(str(task), PROMPT, texts, ranks, labeler.name))
            right[labeler.name] += np.mean([ranks[i] > ranks[j] for i in range(4) for j in range(i + 1, 4)]) / 500
    found = labeler_reliability(rankings)
    # Some pairs are easy for everyone, so the three seem to agree more than their noise implies.
    for name, share in right.items():
        assert found[name].accuracy == pytest.approx(share, abs=0.1), name
    weights = labeler_weights(rankings, found)
    assert weights["careful"] > 1.5 * weights["usual"] > 2 * weights["careless"] > 0
    assert np.mean([weights[ranking.labeler] for ranking in rankings]) == pytest.approx(1.0)


def test_a_round_by_hand() -> None:
    """Three labelers judge one pair, two against one, at the fixed point of the two equations."""
    ranks = {"ann": (1, 2), "bo": (1, 2), "cy": (2, 1)}
    found = labeler_reliability([Ranking("t", PROMPT, ("a", "b"), r, name) for name, r in ranks.items()])
    accuracy = {name: reliability.accuracy for name, reliability in found.items()}
    odds = {name: math.log(a / (1 - a)) for name, a in accuracy.items()}
    first = 1 / (1 + math.exp(-(odds["ann"] + odds["bo"] - odds["cy"])))
    assert accuracy["ann"] == accuracy["bo"] == pytest.approx((2 + first) / 4, abs=1e-4)
    assert accuracy["cy"] == pytest.approx((2 + 1 - first) / 4, abs=1e-4)
    assert accuracy["ann"] > accuracy["cy"]


def test_who_is_alone_or_ties_is_not_judged_by_it() -> None:
    rankings = coin_rankings({"ann": 0.9, "bo": 0.9}, 300, 2, seed=2)
    alone = [Ranking(f"x{i}", PROMPT, ("a", "b"), (1, 2), "cy") for i in range(5)]
    tied = [Ranking(str(i), PROMPT, ("a", "b"), (1, 1), "di") for i in range(5)]
    found = labeler_reliability([*rankings, *alone, *tied])
    assert found["ann"].accuracy == pytest.approx(found["bo"].accuracy) == pytest.approx(0.9, abs=0.04)
    for name in ("cy", "di"):
        assert found[name].num_pairs == 0
        assert found[name].accuracy == pytest.approx(found["ann"].accuracy)


def test_nobody_better_than_chance_is_refused() -> None:
    rankings = coin_rankings({"ann": 0.5}, 3, 1, seed=0)
    with pytest.raises(ValueError, match="no labeler agrees with the others more than by chance"):
        labeler_weights(rankings, {"ann": Reliability(0.4, 10)})


def test_two_labelers_get_the_same_since_nothing_shows_who_is_right() -> None:
    found = labeler_reliability(coin_rankings({"ann": 0.95, "bo": 0.65}, 300, 2, seed=0))
    assert found["ann"].accuracy == pytest.approx(found["bo"].accuracy, abs=1e-9)


def test_below_chance_never_has_a_negative_weight() -> None:
    rankings = coin_rankings({"ann": 0.9, "bo": 0.85, "cy": 0.9, "up": 0.2, "at": 0.5}, 300, 3, seed=4)
    found = labeler_reliability(rankings)
    assert {name for name, one in found.items() if one.accuracy < 0.4} == {"up"}
    weights = labeler_weights(rankings, found)
    assert weights["up"] == 0
    assert min(weights.values()) >= 0
