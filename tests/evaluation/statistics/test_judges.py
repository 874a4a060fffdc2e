"""Agreement of judges and labelers by hand."""

import math

import pytest

from evaluation.statistics.judges import judges_agree, labelers_agree
from evaluation.verdicts import Verdict


def verdict(prompt, judge, preference, labeler="l", *, policies=("p", "q"), first="", failure=""):
    return Verdict(str(prompt), *policies, 0, 0, judge, labeler, preference, first, failure=failure)


def test_two_judges():
    """Five prompts: the judges agree on three (one row is swapped) and disagree on one; one is a tie; one has a
    single verdict."""
    rows = [verdict(n, "one", x) for n, x in enumerate([1.0, 0.0, 0.8, 1.0, 0.5, 1.0])]
    rows += [verdict(n, "other", x) for n, x in enumerate([0.9, 0.0, 1.0, 0.0, 1.0])]
    rows[1] = verdict(1, "one", 1.0, policies=("q", "p"))
    found = judges_agree(rows, "one", "other", seed=0)
    assert (found.judge_a, found.judge_b) == ("one", "other")
    assert (found.share.mean, found.share.num_pairs) == (0.75, 4)
    assert 0.1 < found.share.low < 0.75 < found.share.high < 1
    # Ordinal alpha: δ² is 1 for the opposite verdicts, ¼ for the tie; D_o = 1.25/5, D_e = (1 - 1/10)/2.
    assert found.alpha.value == pytest.approx(1 - (1.25 / 5) / 0.45)
    assert found.alpha.num_units == 5


def test_a_judge_says_what_its_labelers_and_orders_say_together():
    rows = [verdict(0, "people", x, name) for name, x in (("ann", 1.0), ("bo", 1.0), ("cy", 0.0))]
    rows += [verdict(0, "model", 1.0, first="a"), verdict(0, "model", 0.4, first="b")]
    assert judges_agree(rows, "people", "model", seed=0).share.mean == 1.0
    assert labelers_agree(rows, "people", seed=0).share.mean == pytest.approx(1 / 3)


def test_failed_verdicts_and_single_labelers_leave_nothing_to_compare():
    rows = [verdict(0, "j", 1.0), verdict(0, "j", math.nan, "m", failure="no answer"), verdict(1, "k", 1.0)]
    assert labelers_agree(rows, "j", seed=0).alpha.reason == "no two labelers judged the same task"
    assert math.isnan(judges_agree(rows, "j", "k", seed=0).share.mean)


def test_samples_of_one_prompt_are_different_items():
    def of_sample(index, labeler, preference):
        return Verdict("0", "p", "q", index, index, "j", labeler, preference)

    rows = [of_sample(0, "l", 1.0), of_sample(1, "l", 0.0), of_sample(0, "m", 1.0), of_sample(1, "m", 0.0)]
    assert labelers_agree(rows, "j", seed=0).share.mean == 1.0
