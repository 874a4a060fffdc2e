"""Invalid verdicts are errors that name the row, and the order of rows makes no difference."""

import math
from dataclasses import replace

import numpy as np
import pytest

from evaluation.statistics.checks import in_order
from evaluation.verdicts import Verdict

ROW = Verdict("x1", "sft", "ppo", 0, 1, "rm", "rm", 1.0, "a", category="story", where="v.jsonl:7")


def turned(row):
    """Returns the same verdict with policies a and b exchanged."""
    return replace(
        row, policy_a=row.policy_b, policy_b=row.policy_a, index_a=row.index_b, index_b=row.index_a,
        preference_a=1 - row.preference_a, first={"a": "b", "b": "a", "": ""}[row.first],
    )  # fmt: skip


@pytest.mark.parametrize("again", [ROW, replace(ROW, preference_a=0.0), turned(ROW)])
def test_a_verdict_given_twice_is_named(again):
    with pytest.raises(
        ValueError,
        match=r"v.jsonl:9, prompt 'x1', .*: the same verdict is given twice, first at v.jsonl:7, prompt 'x1'",
    ):
        in_order([ROW, replace(again, where="v.jsonl:9")])


@pytest.mark.parametrize(
    "other",
    [
        replace(ROW, first="b"), replace(ROW, index_b=2), replace(ROW, labeler="ann"), replace(ROW, judge="gold"),
        replace(ROW, prompt_id="x2"), replace(ROW, policy_b="bon"),
    ],
)  # fmt: skip
def test_another_order_sample_labeler_judge_prompt_or_policy_is_no_repetition(other):
    assert len(in_order([ROW, other])) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score_a": math.inf, "score_b": 1.0}, "scores are inf and 1.0; finite numbers were expected"),
        ({"score_a": math.nan, "score_b": 1.0}, "scores are nan and 1.0; a verdict that did not fail must have both"),
        ({"index_a": -1}, "samples are -1 and 1; 0 or more was expected"),
        ({"length_b": -5}, "lengths are 0 and -5; 0 or more was expected"),
    ],
)
def test_odd_rows_are_named(change, message):
    with pytest.raises(ValueError, match=rf"v.jsonl:7, prompt 'x1', 'sft' against 'ppo', judge 'rm'.*: {message}"):
        in_order([replace(ROW, **change)])


def test_a_row_without_a_file_is_named_by_number():
    rows = [replace(ROW, where="", prompt_id=f"x{number}") for number in range(3)]
    with pytest.raises(ValueError, match=r"verdict 3 \(from 0\), prompt 'x2', .*, first at verdict 2 \(from 0\)"):
        in_order([*rows, rows[2]])


def test_a_prompt_with_two_categories_is_named():
    with pytest.raises(ValueError, match=r"v.jsonl:8.*: category is 'list', but 'story' at v.jsonl:7"):
        in_order([ROW, replace(ROW, labeler="ann", category="list", where="v.jsonl:8")])


def test_a_failed_verdict_may_have_one_score():
    assert in_order([replace(ROW, preference_a=math.nan, failure="timeout", score_a=0.5)])


def test_neither_the_order_of_rows_nor_which_policy_is_a_matters():
    rows = [
        replace(ROW, prompt_id=f"x{p}", labeler=name, first=side) for p in range(4) for name in "lm" for side in "ab"
    ]
    shuffled = [rows[place] for place in np.random.default_rng(0).permutation(len(rows))]
    assert in_order(shuffled) == in_order(rows)
    assert [turned(row) for row in in_order([turned(row) for row in shuffled])] == in_order(rows)
