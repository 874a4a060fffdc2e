"""Labelers' accuracies, estimated only from their rankings."""

import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats

from benchmarks.known_labelers import Size, draw_world
from heed.worlds.labelers import LabelerConfig, ScriptedLabeler, Taste
from preferences.rankings import current_judgments, ranking_of
from preferences.records import Message, Ranking, ShownTask
from preferences.statistics.agreement import Reliability, labeler_reliability, labeler_weights, reliability_in
from preferences.statistics.panel import Panel

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


def test_intervals_are_those_of_derivatives_taken_numerically() -> None:
    """The derivatives are finite differences of the log posterior in θ = log(a / (1 - a)), written pair by pair."""
    rankings = [
        ranking
        for task in range(40)
        for ranking in coin_rankings({"ann": 0.9, "bo": 0.75, "cy": 0.6}, 2, 2 + task % 2, seed=task)
    ]
    rankings = [replace(one, task_id=f"{number // 5}-{one.task_id}") for number, one in enumerate(rankings)]
    rankings = [replace(one, prompt=(Message("user", str(int(one.task_id.split("-")[0]) % 17)),)) for one in rankings]
    found = labeler_reliability(rankings)
    names = sorted(found)
    pairs: dict[str, list[Ranking]] = {}
    for one in rankings:
        pairs.setdefault(one.task_id, []).append(one)
    pairs = {task: judged for task, judged in pairs.items() if len({one.labeler for one in judged}) > 1}

    def log_likelihood(theta: np.ndarray, prompt: object) -> float:
        accuracy = dict(zip(names, 1 / (1 + np.exp(-theta)), strict=True))
        total = 0.0
        for judged in pairs.values():
            if judged[0].prompt == prompt:
                said = [(accuracy[one.labeler], one.ranks == (1, 2)) for one in judged]
                both = [math.prod(a if first == truth else 1 - a for a, first in said) for truth in (True, False)]
                total += math.log(sum(both) / 2)
        return total

    def log_posterior(theta: np.ndarray) -> float:
        prior = sum(2 * math.log(a) + math.log(1 - a) for a in 1 / (1 + np.exp(-theta)))
        return prior + sum(log_likelihood(theta, prompt) for prompt in prompts)

    prompts = {judged[0].prompt for judged in pairs.values()}
    at = np.array([math.log(found[name].accuracy / (1 - found[name].accuracy)) for name in names])
    step, unit = 1e-3, np.eye(3)
    rises = [[(log_likelihood(at + step * e, p), log_likelihood(at - step * e, p)) for e in unit] for p in prompts]
    scores = np.subtract(*np.moveaxis(np.array(rises), -1, 0)) / (2 * step)
    hessian = -np.array(
        [
            [
                sum(s * t * log_posterior(at + step * (s * e + t * f)) for s in (1, -1) for t in (1, -1))
                / (4 * step**2)
                for e in unit
            ]
            for f in unit
        ]
    )
    inverse, num = np.linalg.inv(hessian), len(prompts)
    sandwich = inverse @ (num / (num - 1) * scores.T @ scores) @ inverse
    half = scipy.stats.t.ppf(0.975, num - 1) * np.sqrt(np.maximum(np.diag(inverse), np.diag(sandwich)))
    for index, name in enumerate(names):
        ends = [1 / (1 + math.exp(-(at[index] + sign * half[index]))) for sign in (-1, 1)]
        assert (found[name].low, found[name].high) == pytest.approx(ends, abs=1e-3)


def test_a_panel_gives_the_same_as_its_rankings() -> None:
    tasks, judgments = draw_world(Size(num_ordinary=40, num_gold=5, num_repeats=5), seed=3)
    answers = current_judgments(judgments).answers
    of = {task.task_id: task for task in tasks}
    panel = Panel.of(tasks, answers)
    expected = labeler_reliability([ranking_of(of[one.task_id], one) for one in answers])
    for name, found in zip(panel.labelers, reliability_in(panel), strict=True):
        assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(expected[name]), abs=1e-9)
        assert found.low < found.accuracy < found.high


def test_who_is_never_wrong_has_an_interval_and_who_cannot_be_told_has_the_widest() -> None:
    perfect = labeler_reliability(coin_rankings({"ann": 1.0, "bo": 1.0, "cy": 1.0}, 30, 3, seed=0))
    assert all(0.8 < one.low < 0.95 < one.high < 1 for one in perfect.values())
    opposed = labeler_reliability(coin_rankings({"ann": 1.0, "bo": 0.0}, 30, 2, seed=0))
    assert all((one.low, one.high) == (0, 1) for one in opposed.values())
    alone = labeler_reliability(coin_rankings({"ann": 0.8}, 5, 1, seed=0))["ann"]
    assert (math.isnan(alone.low), alone.is_below_chance, alone.num_pairs) == (True, False, 0)


def test_below_chance_is_named_and_never_has_a_negative_weight() -> None:
    rankings = coin_rankings({"ann": 0.9, "bo": 0.85, "cy": 0.9, "up": 0.2, "at": 0.5}, 300, 3, seed=4)
    found = labeler_reliability(rankings)
    assert {name for name, one in found.items() if one.is_below_chance} == {"up"}
    weights = labeler_weights(rankings, found)
    assert weights["up"] == 0
    assert min(weights.values()) >= 0
