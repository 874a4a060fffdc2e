"""Judges that prefer a position, where one policy was shown first more often than the other."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import special

from benchmarks.compare_worlds import comparisons
from evaluation.statistics.ratings import rate
from evaluation.statistics.significance import ALPHA
from evaluation.statistics.summary import summarise
from evaluation.statistics.win_rates import length_controlled, pair_test, verdict_weights
from evaluation.verdicts import Comparisons, Side, Verdict
from preferences.statistics.intervals import score_interval

Rows = Sequence[tuple[int, int, float]]  # prompt, 1 if a was first and -1 if b was, preference for a


def shown(rows: Rows, cluster_V: np.ndarray | None = None) -> Comparisons:
    prompt_V, first_V, won_V = (np.array(column) for column in zip(*rows, strict=True))
    return comparisons(won_V.astype(np.float64), prompt_V, first_V=first_V, cluster_V=cluster_V)


def world(generator: np.random.Generator, num: int, share: float, bias: float, strength: float = 0.0) -> Rows:
    """A verdict per prompt: a is shown first with probability `share`, and being first adds `bias` log-odds."""
    first_P = np.where(generator.random(num) < share, 1, -1)
    first_P[:2] = 1, -1
    won_P = generator.random(num) < special.expit(strength + bias * first_P)
    return [(p, int(first_P[p]), float(won_P[p])) for p in range(num)]


@pytest.mark.parametrize("num", [20, 100])
def test_a_biased_judge_and_an_unbalanced_order_make_no_difference_of_equal_policies(num: int) -> None:
    """As if all verdicts weighed the same, a would win in 34% of the worlds with 20 prompts and in 90% with 100."""
    num_worlds = 100
    false, plain = 0, 0
    for seed in range(num_worlds):
        rows = world(np.random.default_rng(seed), num, share=0.8, bias=1.5)
        test = pair_test(shown(rows), seed=seed)
        low, high = test.interval()
        false += test.p < ALPHA
        assert (low > 0.5 or high < 0.5) == (test.p < ALPHA)
        plain += pair_test(shown([(p, 0, won) for p, _, won in rows]), seed=seed).p < ALPHA
    assert plain / num_worlds > 0.25
    assert false / num_worlds <= 0.06


def test_the_interval_covers_the_mean_of_both_orders() -> None:
    truth, covered = (special.expit(2.5) + special.expit(-0.5)) / 2, 0
    for seed in range(100):
        rows = world(np.random.default_rng(seed), 40, share=0.8, bias=1.5, strength=1.0)
        low, high = pair_test(shown(rows), seed=0).ends(1.96)
        covered += low < truth < high
    assert covered >= 0.92 * 100


def test_the_win_rate_is_the_mean_of_both_orders() -> None:
    """a is first on 60 prompts and wins 48, b on 20 and a wins 8: ½·(0.8 + 0.4), not (48 + 8)/80."""
    rows = [(p, 1, float(p < 48)) for p in range(60)] + [(60 + p, -1, float(p < 8)) for p in range(20)]
    pair = shown(rows)
    test = pair_test(pair, seed=0)
    assert test.mean == pytest.approx(0.6)
    ends = [score_interval(np.repeat([1.0, 0.0], counts)) for counts in ((48, 12), (8, 12))]
    low = 0.6 - math.hypot(0.8 - ends[0][0], 0.4 - ends[1][0]) / 2
    high = 0.6 + math.hypot(ends[0][1] - 0.8, ends[1][1] - 0.4) / 2
    assert test.interval() == pytest.approx((low, high), abs=5e-3)
    turned = pair_test(pair.between(1, 0), seed=0)
    assert (turned.mean, turned.p) == pytest.approx((0.4, test.p), abs=1e-5)
    assert turned.interval() == pytest.approx((1 - test.interval()[1], 1 - test.interval()[0]), abs=1e-6)
    # The ratings are of the same win rate.
    rating = rate(pair, anchor="p0", seed=0).policies[1]
    assert rating.value == pytest.approx(-float(special.logit(0.6)))
    assert (rating.low, rating.high) == pytest.approx(tuple(-special.logit(test.interval()[::-1])))


def test_weights_by_hand() -> None:
    """Prompts 0 and 1 were shown in both orders, 2 twice with a first, and 3 with b first."""
    rows = [(0, 1, 1.0), (0, -1, 0.0), (1, 1, 1.0), (1, -1, 1.0), (2, 1, 1.0), (2, 1, 0.0), (3, -1, 0.0)]
    weights = verdict_weights(shown(rows))
    assert weights == pytest.approx([4 / 6, 4 / 6, 4 / 6, 4 / 6, 4 / 12, 4 / 12, 4 / 6])
    assert pair_test(shown(rows), seed=0).mean == pytest.approx(((1 + 1 + 0.5) / 3 + (0 + 1 + 0) / 3) / 2)
    # Unknown or single orders weigh as before.
    assert verdict_weights(shown([(0, 1, 1.0), (0, 1, 0.0), (1, 1, 0.0)])).tolist() == [0.5, 0.5, 1]
    assert verdict_weights(shown([(0, 1, 1.0), (0, -1, 0.0), (1, 0, 0.0)])).tolist() == [0.5, 0.5, 1]


def test_both_orders_of_every_prompt_are_tested_as_before() -> None:
    generator = np.random.default_rng(3)
    rows = [(p, first, float(generator.random() < 0.6)) for p in range(30) for first in (1, -1)]
    unknown = pair_test(shown([(p, 0, won) for p, _, won in rows]), seed=0)
    test = pair_test(shown(rows), seed=0)
    assert (test.p, *test.interval()) == (unknown.p, *unknown.interval())


def test_clusters_that_were_shown_in_both_orders_widen_the_interval() -> None:
    """Ten clusters of eight equal verdicts, six of them with a first."""
    rows = [(p, 1 if p % 8 < 6 else -1, float(p // 8 < 7)) for p in range(80)]
    alone = pair_test(shown(rows), seed=0).interval()
    test = pair_test(shown(rows, np.arange(80) // 8), seed=0)
    low, high = test.interval()
    assert test.p > 0.15
    assert high - low > 1.8 * (alone[1] - alone[0])


def test_equal_length_is_at_equal_orders() -> None:
    generator = np.random.default_rng(5)
    rows = world(generator, 400, share=0.9, bias=1.5)
    pair = comparisons(
        np.array([won for _, _, won in rows]),
        np.arange(400),
        first_V=np.array([first for _, first, _ in rows]),
        longer_V=generator.normal(size=400),
    )
    assert length_controlled(pair).mean == pytest.approx(pair_test(pair, seed=0).mean, abs=0.03)


def verdicts(rows: Sequence[tuple[int, Side, float]]) -> list[Verdict]:
    return [Verdict(f"p{p}", "a", "b", 0, 0, "j", "j", won, first) for p, first, won in rows]


@pytest.mark.parametrize(("place", "which"), [(1.0, "first"), (0.0, "second")])
def test_a_judge_that_follows_position_shows_nothing(place: float, which: str) -> None:
    both: list[tuple[int, Side, float]] = [(p, "a", place) for p in range(100)]
    both += [(p, "b", float(p == 0) if place else 1.0) for p in range(100)]
    for rows in (both, [both[p + 100 * (p % 2)] for p in range(100)]):
        (pair,) = summarise(verdicts(rows), seed=0).judges[0].pairs
        assert (pair.conclusion.kind, pair.different) == ("none", False)
        assert pair.conclusion.reason.startswith(f"the judge follows position: it prefers the response shown {which}")
        assert math.isnan(pair.conclusion.low)


def test_a_policy_that_was_always_shown_first_cannot_be_compared() -> None:
    (pair,) = summarise(verdicts([(p, "a", float(p < 90)) for p in range(100)]), seed=0).judges[0].pairs
    assert (pair.conclusion.kind, pair.different) == ("none", False)
    assert "shown in both orders" in pair.conclusion.reason


def test_a_prompt_with_equal_texts_leaves_the_orders_weighed() -> None:
    """a was shown first on four prompts in five, and the judge takes the first in 70%. Equal texts have no order."""
    rows: list[tuple[int, Side, float]] = [(p, "a", float(p < 112)) for p in range(160)]
    rows += [(160 + p, "b", float(p >= 28)) for p in range(40)]
    for more in ([], [(200, "", 0.5)]):
        (pair,) = summarise(verdicts([*rows, *more]), seed=0).judges[0].pairs
        assert (pair.conclusion.kind, pair.different) == ("undecided", False)
        assert pair.win_rate.mean == pytest.approx(0.5)


def test_one_known_order_among_unknown_ones_withholds_nothing() -> None:
    (pair,) = summarise(verdicts([(p, "" if p else "a", float(p < 150)) for p in range(200)]), seed=0).judges[0].pairs
    assert (pair.conclusion.kind, pair.different) == ("better", True)
    assert "known for some verdicts only" in pair.position_bias.reason


def test_a_strong_bias_alone_withholds_nothing() -> None:
    """A judge that prefers the first by 1.5 log-odds still shows a strong policy."""
    rows = world(np.random.default_rng(1), 300, share=0.8, bias=1.5, strength=1.0)
    named = verdicts([(p, "a" if first > 0 else "b", won) for p, first, won in rows])
    (pair,) = summarise(named, seed=0).judges[0].pairs
    assert (pair.conclusion.kind, pair.different) == ("better", True)
