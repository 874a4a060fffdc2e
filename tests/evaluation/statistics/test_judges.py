"""Position bias, flips, and the agreement of judges and labelers, by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from benchmarks.compare_worlds import comparisons
from evaluation.statistics.summary import NO_ORDER, ONE_ORDER, flips, judges_agree, labelers_agree, position_bias
from evaluation.verdicts import Verdict
from preferences.statistics.intervals import score_interval


def shown(rows):
    """Makes comparisons from rows (prompt, 1 if a was first, preference for a)."""
    prompt_V, first_V, won_V = (np.array(column) for column in zip(*rows, strict=True))
    return comparisons(won_V.astype(np.float64), prompt_V, first_V=first_V)


def shown_verdict(prompt, preference, first, labeler="l", policies=("p", "q"), failure=""):
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
        shown_verdict(0, 1.0, "a"), shown_verdict(0, 1.0, "b"),
        shown_verdict(1, 1.0, "a"), shown_verdict(1, 0.0, "b"),
        shown_verdict(2, 0.9, "a"), shown_verdict(2, 0.5, "b"),
        shown_verdict(3, 0.2, "a"), shown_verdict(3, 0.7, "a", policies=("q", "p")),
        shown_verdict(4, 1.0, "a"), shown_verdict(5, 1.0, ""),
        shown_verdict(6, 1.0, "a"), shown_verdict(6, math.nan, "b", failure="no answer"),
        shown_verdict(7, 1.0, "a", "l"), shown_verdict(7, 0.0, "b", "m"),
    ]  # fmt: skip
    found = flips(rows)
    wilson = stats.binomtest(2, 4).proportion_ci(method="wilson")
    assert (found.changed.mean, found.changed.num_pairs, found.changed.num_tasks) == (0.5, 4, 4)
    assert (found.changed.low, found.changed.high) == pytest.approx((wilson.low, wilson.high))
    assert found.reversed.mean == 0.25


def test_without_both_orders_there_is_no_flip_rate():
    found = flips([shown_verdict(0, 1.0, "a")])
    assert math.isnan(found.changed.mean)
    assert found.changed.num_pairs == 0


def verdict(prompt, judge, preference, labeler="l", *, policies=("p", "q"), first="", failure=""):
    return Verdict(str(prompt), *policies, 0, 0, judge, labeler, preference, first, failure=failure)


def test_two_judges():
    """Five prompts: the judges agree on three (one row is swapped) and disagree on one; one is a tie; one has a
    single verdict."""
    rows = [verdict(n, "one", x) for n, x in enumerate([1.0, 0.0, 0.8, 1.0, 0.5, 1.0])]
    rows += [verdict(n, "other", x) for n, x in enumerate([0.9, 0.0, 1.0, 0.0, 1.0])]
    rows[1] = verdict(1, "one", 1.0, policies=("q", "p"))
    found = judges_agree(rows, "one", "other")
    assert (found.judge_a, found.judge_b) == ("one", "other")
    assert (found.share.mean, found.share.num_pairs) == (0.75, 4)
    assert 0.1 < found.share.low < 0.75 < found.share.high < 1
    # Ordinal alpha: δ² is 1 for the opposite verdicts, ¼ for the tie; D_o = 1.25/5, D_e = (1 - 1/10)/2.
    assert found.alpha.value == pytest.approx(1 - (1.25 / 5) / 0.45)
    assert found.alpha.num_units == 5


def test_a_judge_says_what_its_labelers_and_orders_say_together():
    rows = [verdict(0, "people", x, name) for name, x in (("ann", 1.0), ("bo", 1.0), ("cy", 0.0))]
    rows += [verdict(0, "model", 1.0, first="a"), verdict(0, "model", 0.4, first="b")]
    assert judges_agree(rows, "people", "model").share.mean == 1.0
    assert labelers_agree(rows, "people").share.mean == pytest.approx(1 / 3)


def test_failed_verdicts_and_single_labelers_leave_nothing_to_compare():
    rows = [verdict(0, "j", 1.0), verdict(0, "j", math.nan, "m", failure="no answer"), verdict(1, "k", 1.0)]
    assert labelers_agree(rows, "j").alpha.reason == "no two labelers judged the same task"
    assert math.isnan(judges_agree(rows, "j", "k").share.mean)


def test_samples_of_one_prompt_are_different_items():
    def of_sample(index, labeler, preference):
        return Verdict("0", "p", "q", index, index, "j", labeler, preference)

    rows = [of_sample(0, "l", 1.0), of_sample(1, "l", 0.0), of_sample(0, "m", 1.0), of_sample(1, "m", 0.0)]
    assert labelers_agree(rows, "j").share.mean == 1.0
