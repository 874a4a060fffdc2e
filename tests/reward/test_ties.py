"""The probability of a tie, fitted after training or learned during it."""

import math

import numpy as np
import pytest

from preferences.records import Message, Ranking
from reward.comparisons import Comparison, Verdict
from reward.metrics import fit_log_nu, tie_metrics
from reward.objective import spread_of_ratings, starting_log_nu

PROMPT = (Message("user", "Where?"),)


def drawn_rankings(num: int, nu: float, seed: int) -> tuple[list[Ranking], dict[str, list[float]]]:
    """Pairs whose outcomes are drawn from Davidson's model with this ν, and the scores they were drawn from."""
    generator = np.random.default_rng(seed)
    rankings, scores = [], {}
    for task in range(num):
        first, second = generator.normal(size=2)
        worth = np.array([math.exp(first), nu * math.exp((first + second) / 2), math.exp(second)])
        ranks = [(1, 2), (1, 1), (2, 1)][generator.choice(3, p=worth / worth.sum())]
        rankings.append(Ranking(str(task), PROMPT, ("a", "b"), ranks, "ann"))
        scores[str(task)] = [first, second]
    return rankings, scores


def test_nu_is_recovered() -> None:
    rankings, scores = drawn_rankings(20_000, 0.6, seed=1)
    figures = tie_metrics(rankings[:15_000], rankings[15_000:], scores, seed=0)
    assert figures["nu"] == pytest.approx(0.6, rel=0.05)
    # The likelihood of the held-out outcomes is maximal at this ν: its derivative there is about 0.
    assert figures["low"] is not None
    assert figures["high"] is not None
    assert figures["low"] < figures["heldout_log_likelihood"] < figures["high"]  # type: ignore[operator]


def test_equal_scores_by_hand() -> None:
    # Of 9 pairs 3 tie; with half a tie and half another added, 3.5 of 10: ν / (2 + ν) = .35.
    tied = np.arange(9) < 3
    assert math.exp(fit_log_nu(np.zeros(9), tied)) == pytest.approx(2 * 0.35 / 0.65)
    verdicts = (Verdict((1, 1, 2)), Verdict((2, 1, 1)), Verdict((1, 2, 2)))
    others = Comparison("b", ((1,), (2,), (3,)), (Verdict((1, 1, 1)),), objective=1)
    comparisons = [Comparison("a", ((1,), (2,), (3,)), verdicts), others]
    assert math.exp(starting_log_nu(comparisons, 0)) == pytest.approx(2 * 0.35 / 0.65)


def test_a_likelihood_by_hand() -> None:
    # ν is fitted to one tie of equals: 1.5 / 2 = ν / (2 + ν), so 6. Strengths 4 and 1 then give 4, 12 and 1, of 17.
    rankings = [Ranking(name, PROMPT, ("a", "b"), ranks, "ann") for name, ranks in (("t", (1, 1)), ("h", (1, 2)))]
    figures = tie_metrics(rankings[:1], rankings[1:], {"t": [1.0, 1.0], "h": [math.log(4), 0.0]}, seed=0)
    assert figures["nu"] == pytest.approx(6 * 0.75 / 0.75 / 1, rel=1e-6)
    assert figures["heldout_log_likelihood"] == pytest.approx(math.log(4 / 17))
    assert figures["low"] is None  # from a single task
    assert figures["heldout_tie_share"] == 0.0


def test_the_spread_of_ratings_is_about_each_verdicts_mean() -> None:
    verdicts = (Verdict((1, 2), (5.0, 3.0)), Verdict((1, 2), (2.0, 2.0)), Verdict((1, 2)))
    others = Comparison("b", ((1,), (2,)), (Verdict((1, 2), (90.0, 10.0)),), objective=1)
    comparisons = [Comparison("a", ((1,), (2,)), verdicts), others]
    assert spread_of_ratings(comparisons, 0) == pytest.approx(math.sqrt(2 / 4))
    assert spread_of_ratings(comparisons, 1) == 40.0
    assert spread_of_ratings([Comparison("a", ((1,), (2,)), verdicts[2:])], 0) == 0.0
