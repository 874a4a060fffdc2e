"""A whole comparison, from rows to JSON: planted effects, counts, independence of order and names, invalid verdicts."""

import json
import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from scipy import special

from evaluation.statistics.summary import in_order, summarise
from evaluation.verdicts import Verdict, read_verdicts, write_rows
from files.records import as_json

POLICIES = ("base", "better", "same")
WINS = {("base", "better"): 0.25, ("base", "same"): 0.5, ("better", "same"): 0.75}  # win rate of the first
NUM_PROMPTS = 60
PAIR = ("base", "better")
ROW = Verdict("x1", "sft", "ppo", 0, 1, "rm", "rm", 1.0, "a", category="story", where="v.jsonl:7")


def drawn():
    """Two judges: a model that sees both orders and fails on a third of one pair; two people per prompt, who tie
    some."""
    generator = np.random.default_rng(0)
    rows = []
    for prompt in range(NUM_PROMPTS):
        category = "story" if prompt % 3 else "list"
        for (a, b), win in WINS.items():
            lengths = generator.integers(50, 400, size=2).tolist()
            better = generator.random() < win
            for first in ("a", "b"):
                failed = (a, b) == ("better", "same") and prompt % 3 == 0
                rows.append(
                    Verdict(
                        f"x{prompt}", a, b, 0, 0, "model", "model",
                        math.nan if failed else 0.9 if better else 0.1, first, length_a=lengths[0], length_b=lengths[1],
                        category=category, failure="no verdict in the answer" if failed else "",
                    )
                )  # fmt: skip
            for labeler in ("ann", "bo"):
                if (a, b) == PAIR:
                    says = 0.5 if generator.random() < 0.2 else float(better)
                    rows.append(Verdict(f"x{prompt}", a, b, 0, 0, "people", labeler, says, category=category))
    return rows


def turned(row):
    return replace(
        row, policy_a=row.policy_b, policy_b=row.policy_a, index_a=row.index_b, index_b=row.index_a,
        preference_a=1 - row.preference_a, first={"a": "b", "b": "a", "": ""}[row.first],
        length_a=row.length_b, length_b=row.length_a,
    )  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    return drawn()


@pytest.fixture(scope="module")
def found(rows):
    return summarise(rows, POLICIES, seed=0)


def test_everything_is_counted(found):
    model, people = found.judges
    assert (found.policies, found.num_prompts, found.seed) == (POLICIES, NUM_PROMPTS, 0)
    assert (model.judge, model.num_prompts, model.num_verdicts, model.num_failed) == ("model", 60, 320, 40)
    assert (people.judge, people.num_labelers, people.num_verdicts) == ("people", 2, 120)
    assert [(pair.policy_a, pair.policy_b, pair.num_failed, pair.num_prompts_missing) for pair in model.pairs] == [
        ("base", "better", 0, 0), ("base", "same", 0, 0), ("better", "same", 40, 20),
    ]  # fmt: skip
    (failures,) = found.failures
    assert (failures.judge, failures.policy_a, failures.policy_b) == ("model", "better", "same")
    assert (failures.failure, failures.num_verdicts) == ("no verdict in the answer", 40)


def test_planted_effects_are_found(found):
    worse, even, better = found.judges[0].pairs
    for pair, truth in ((worse, 0.3), (even, 0.5), (better, 0.7)):  # 0.9 for a win and 0.1 for a loss
        assert pair.win_rate.low < truth < pair.win_rate.high
        assert (pair.length_controlled.low, pair.length_controlled.high) == pytest.approx(
            (pair.win_rate.low, pair.win_rate.high), abs=0.06
        )
        assert pair.flips.changed.mean == 0
        assert pair.position_bias.mean == pytest.approx(0.5)
    assert (worse.different, even.different) == (True, False)
    assert even.power.detectable > abs(even.win_rate.mean - 0.5)
    assert worse.significance.holm_p == pytest.approx(3 * worse.significance.p)
    assert [rating.policy for rating in found.judges[0].ratings.policies] == list(POLICIES)
    assert found.judges[0].ratings.policies[1].low > 0


def test_categories_add_up(found):
    pair = found.judges[0].pairs[0]
    assert [part.category for part in pair.categories] == ["list", "story"]
    total = sum(part.win_rate.mean * part.win_rate.num_prompts for part in pair.categories)
    assert total / NUM_PROMPTS == pytest.approx(pair.win_rate.mean)
    assert all(part.holm_p >= part.p for part in pair.categories)


def test_a_policy_without_verdicts_is_an_island(found):
    people = found.judges[1]
    assert people.ratings.islands == (("base", "better"), ("same",))
    assert people.pairs[0].verdicts.ties > 5


def test_judges_and_labelers_agree_as_planted(found):
    (agreement,) = found.agreement
    assert (agreement.judge_a, agreement.judge_b, agreement.share.mean) == ("model", "people", 1.0)
    assert found.judges[1].labelers.share.mean == 1.0
    assert 0.6 < found.judges[1].labelers.alpha.value < 1
    assert found.judges[0].labelers.alpha.reason == "no two labelers judged the same task"


def test_neither_the_order_of_rows_nor_which_policy_is_a_changes_a_number(rows, found):
    shuffled = [rows[place] for place in np.random.default_rng(1).permutation(len(rows))]
    assert json.dumps(as_json(summarise(shuffled, POLICIES, seed=0))) == json.dumps(as_json(found))
    others = as_json(summarise([turned(row) for row in shuffled], POLICIES, seed=0))
    assert flat(others) == pytest.approx(flat(as_json(found)), nan_ok=True)


def test_naming_policies_in_another_order_mirrors_a_pair(rows, found):
    other = summarise(rows, ("better", "base", "same"), seed=0).judges[0].pairs[0]
    one = found.judges[0].pairs[0]
    for here, there in (
        (one.win_rate, other.win_rate),
        (one.length_controlled, other.length_controlled),
    ):
        assert (there.mean, there.low, there.high) == pytest.approx((1 - here.mean, 1 - here.high, 1 - here.low))
    assert (other.verdicts.wins, other.verdicts.losses) == (one.verdicts.losses, one.verdicts.wins)
    assert (other.significance, other.position_bias.mean) == (one.significance, pytest.approx(one.position_bias.mean))
    assert other.power.detectable == pytest.approx(one.power.detectable)


def test_rows_that_went_through_a_file_give_the_same_json(rows, found, tmp_path):
    write_rows(tmp_path / "verdicts.parquet", rows)
    again = summarise(read_verdicts(tmp_path / "verdicts.parquet"), POLICIES, seed=0)
    assert json.dumps(as_json(again), allow_nan=False) == json.dumps(as_json(found), allow_nan=False)


def test_a_judge_that_always_failed_is_counted():
    rows = [Verdict("x", "a", "b", 0, 0, "j", "j", math.nan, failure="timeout")]
    (judge,) = summarise(rows, seed=0).judges
    assert (judge.num_verdicts, judge.num_failed, judge.pairs, judge.ratings) == (0, 1, (), None)
    assert json.dumps(as_json(summarise(rows, seed=0)), allow_nan=False)


def test_refusals(rows):
    with pytest.raises(ValueError, match="no verdicts"):
        summarise([], seed=0)
    with pytest.raises(ValueError, match="a verdict names policy 'same'; base, better were expected"):
        summarise(rows, ("base", "better"), seed=0)
    with pytest.raises(ValueError, match="the same verdict is given twice"):
        summarise([*rows, rows[5]], POLICIES, seed=0)


def flat(tree):
    """Yields all numbers of a JSON tree; None counts as NaN."""
    if isinstance(tree, dict):
        return [number for value in tree.values() for number in flat(value)]
    if isinstance(tree, list):
        return [number for value in tree for number in flat(value)]
    return [math.nan] if tree is None else [float(tree)] if isinstance(tree, int | float) else []


def judged(generator: np.random.Generator) -> list[Verdict]:
    """Verdicts on random pairs of up to four policies of random strengths, with ties, categories and a few prompts."""
    strengths = generator.normal(0, 0.4, size=int(generator.integers(2, 5)))
    num_prompts = int(generator.integers(4, 40))
    return [
        Verdict(f"p{prompt}", f"m{a}", f"m{b}", 0, 0, "j", "j", won, category=("x", "y", "z")[prompt % 3])
        for prompt in range(num_prompts)
        for a, b in combinations(range(len(strengths)), 2)
        for won in [float(generator.choice([0.0, 0.5, 1.0], p=_chances(strengths[a] - strengths[b])))]
    ]


def _chances(lead: float) -> list[float]:
    win = float(special.expit(lead)) * 0.8
    return [0.8 - win, 0.2, win]


def test_interval_p_and_verdict_agree_in_every_pair_and_category(monkeypatch):
    """With Holm's correction for up to six pairs, and three categories of each. For two policies, the ratings agree
    too."""
    monkeypatch.setattr("evaluation.statistics.significance.NUM_PERMUTATIONS", 1_000)
    num_taken_back = 0
    for world in range(60):
        summary = summarise(judged(np.random.default_rng(world)), seed=0)
        for pair in summary.judges[0].pairs:
            excludes_half = pair.win_rate.low > 0.5 or pair.win_rate.high < 0.5
            assert excludes_half == pair.different == (pair.significance.holm_p < 0.05)
            num_taken_back += pair.significance.p < 0.05 <= pair.significance.holm_p
            for part in pair.categories:
                assert (part.win_rate.low > 0.5 or part.win_rate.high < 0.5) == (part.holm_p < 0.05)
        if len(summary.policies) == 2:
            (pair,) = summary.judges[0].pairs
            assert summary.judges[0].ratings is not None
            other = summary.judges[0].ratings.policies[1]
            assert (other.low > 0 or other.high < 0) == pair.different
            assert (other.best_rank == other.worst_rank) == pair.different
    assert num_taken_back > 5


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
