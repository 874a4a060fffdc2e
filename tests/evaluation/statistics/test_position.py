"""Position bias and flips against hand calculations."""

import math

import numpy as np
import pytest
from scipy import stats

from benchmarks.compare_worlds import comparisons
from evaluation.statistics.position import NO_ORDER, ONE_ORDER, flips, position_bias
from evaluation.verdicts import Verdict
from preferences.statistics.intervals import score_interval


def shown(rows):
    """Makes comparisons from rows (prompt, 1 if a was first, preference for a)."""
    prompt_V, first_V, won_V = (np.array(column) for column in zip(*rows, strict=True))
    return comparisons(won_V.astype(np.float64), prompt_V, first_V=first_V)


def verdict(prompt, preference, first, labeler="l", policies=("p", "q"), failure=""):
    return Verdict(str(prompt), *policies, 0, 0, "j", labeler, preference, first, failure=failure)


def test_both_orders_cancel_strength():
    """Prompts 0 to 7: a wins in both orders; 8 and 9: the response shown first wins."""
    rows = [(p, first, 1) for p in range(8) for first in (1, -1)]
    found = position_bias(shown(rows + [(p, first, first > 0) for p in (8, 9) for first in (1, -1)]))
    expected = score_interval(np.repeat([0.5, 1.0], [8, 2]))
    assert found.mean == pytest.approx(0.6)
    assert (found.low, found.high) == pytest.approx(expected)
    assert (found.num_prompts, found.num_verdicts) == (10, 20)


def test_one_order_a_prompt_is_held_apart_from_strength():
    """a is first on 60 prompts and wins 48, b on 20 and wins 8: ½·(0.8 + 0.4), not (48 + 8)/80."""
    rows = [(p, 1, p < 48) for p in range(60)] + [(60 + p, -1, p < 12) for p in range(20)]
    found = position_bias(shown(rows))
    assert found.mean == pytest.approx(0.6)
    half = 1.96 * math.sqrt(0.8 * 0.2 / 60 + 0.6 * 0.4 / 20) / 2
    assert found.high - found.low == pytest.approx(2 * half, rel=0.1)


def test_verdicts_turned_around_say_the_same():
    rows = [(p, 1 if p % 3 else -1, p % 2) for p in range(30)]
    pair = shown(rows)
    one, other = position_bias(pair), position_bias(pair.between(1, 0))
    assert (one.mean, one.low, one.high) == pytest.approx((other.mean, other.low, other.high))


def test_several_pairs_are_taken_together():
    """Policies 0 and 1 have a bias of +½, 1 and 2 have none, on the same prompts."""
    rows = [(0, 1, p, first, first > 0) for p in range(20) for first in (1, -1)]
    rows += [(1, 2, p, first, 1) for p in range(20) for first in (1, -1)]
    a_V, b_V, prompt_V, first_V, won_V = (np.array(column) for column in zip(*rows, strict=True))
    found = position_bias(comparisons(won_V.astype(float), prompt_V, pairs=(a_V, b_V), first_V=first_V))
    assert found.mean == pytest.approx(0.75)
    assert found.num_prompts == 20
    assert found.low > 0.6


def test_pairs_that_were_shown_in_one_order_only_are_left_out():
    rows = [(0, 1, p, first, first > 0) for p in range(20) for first in (1, -1)]
    rows += [(1, 2, p, 1, 1) for p in range(20)]
    a_V, b_V, prompt_V, first_V, won_V = (np.array(column) for column in zip(*rows, strict=True))
    found = position_bias(comparisons(won_V.astype(float), prompt_V, pairs=(a_V, b_V), first_V=first_V))
    assert (found.mean, found.num_verdicts) == (1.0, 40)


def test_unknown_and_single_orders_have_a_reason():
    assert position_bias(shown([(0, 0, 1), (1, 0, 0)])).reason == NO_ORDER
    assert position_bias(shown([(0, 1, 1), (1, 1, 0)])).reason == ONE_ORDER


def test_flips_by_hand():
    """Of four prompts judged in both orders, one is reversed and one becomes a tie; a swapped row is the same
    verdict."""
    rows = [
        verdict(0, 1.0, "a"), verdict(0, 1.0, "b"),
        verdict(1, 1.0, "a"), verdict(1, 0.0, "b"),
        verdict(2, 0.9, "a"), verdict(2, 0.5, "b"),
        verdict(3, 0.2, "a"), verdict(3, 0.7, "a", policies=("q", "p")),
        verdict(4, 1.0, "a"), verdict(5, 1.0, ""),
        verdict(6, 1.0, "a"), verdict(6, math.nan, "b", failure="no answer"),
        verdict(7, 1.0, "a", "l"), verdict(7, 0.0, "b", "m"),
    ]  # fmt: skip
    found = flips(rows)
    wilson = stats.binomtest(2, 4).proportion_ci(method="wilson")
    assert (found.changed.mean, found.changed.num_pairs, found.changed.num_tasks) == (0.5, 4, 4)
    assert (found.changed.low, found.changed.high) == pytest.approx((wilson.low, wilson.high))
    assert found.reversed.mean == 0.25


def test_without_both_orders_there_is_no_flip_rate():
    found = flips([verdict(0, 1.0, "a")])
    assert math.isnan(found.changed.mean)
    assert found.changed.num_pairs == 0
