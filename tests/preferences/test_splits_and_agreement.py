"""Splits by prompt; agreement between labelers and with the truth, against counts by hand."""

import numpy as np
import pytest

from preferences.rankings import is_heldout, split_rankings
from preferences.records import Message, Ranking
from preferences.statistics.agreement import accuracy_against, pairwise_agreement


def prompt_of(text):
    return (Message("user", text),)


def ranked(task_id, labeler, *ranks):
    return Ranking(task_id, prompt_of(task_id), tuple(f"{task_id}{i}" for i in range(len(ranks))), ranks, labeler)


# ---- splits ----


def test_no_prompt_is_on_both_sides():
    rankings = [Ranking(f"t{i}", prompt_of(f"prompt {i % 50}"), ("a", "b"), (1, 2), f"labeler {i}") for i in range(400)]
    train, heldout = split_rankings(rankings, 0.3, seed=1)
    assert not {r.prompt for r in train} & {r.prompt for r in heldout}
    assert train
    assert heldout
    assert sorted(train + heldout, key=lambda r: r.task_id) == sorted(rankings, key=lambda r: r.task_id)


def test_the_share_is_held_and_grows_without_moving_back():
    prompts = [prompt_of(f"prompt {i}") for i in range(5_000)]
    tenth = {p for p in prompts if is_heldout(p, 0.1, seed=0)}
    fifth = {p for p in prompts if is_heldout(p, 0.2, seed=0)}
    assert len(tenth) / 5_000 == pytest.approx(0.1, abs=0.02)
    assert tenth < fifth
    other_seed = {p for p in prompts if is_heldout(p, 0.1, seed=1)}
    assert len(tenth & other_seed) < 120  # about 50 by chance
    assert not any(is_heldout(p, 0.0, seed=0) for p in prompts)
    assert all(is_heldout(p, 1.0, seed=0) for p in prompts)


def test_case_and_spacing_do_not_make_another_prompt():
    for i in range(100):
        near = prompt_of(f"  Tell me\n ABOUT {i}")
        assert is_heldout(prompt_of(f"tell me about {i}"), 0.5, seed=3) == is_heldout(near, 0.5, seed=3)


def test_a_share_above_one_is_refused():
    with pytest.raises(ValueError, match=r"heldout share is 1\.5"):
        is_heldout(prompt_of("x"), 1.5, seed=0)


# ---- agreement ----


def test_agreement_by_hand():
    rankings = [
        ranked("t1", "ann", 1, 2, 3),
        ranked("t1", "bob", 1, 3, 2),  # of 3 pairs: 01 same, 02 same, 12 not -> 2 of 3
        ranked("t2", "ann", 1, 1, 2),
        ranked("t2", "bob", 1, 2, 3),  # 01 is tied for ann; 02 and 12 same -> 2 of 2
        ranked("t3", "ann", 1, 2),  # judged once
        ranked("t4", "ann", 1, 1),
        ranked("t4", "bob", 1, 2),  # nothing left to compare
    ]
    result = pairwise_agreement(rankings)
    assert (result.mean, result.num_pairs, result.num_tasks) == (4 / 5, 5, 2)
    assert result.low < 2 / 3  # of two prompts
    assert result.high == pytest.approx(1.0, abs=0.05)


def test_three_labelers_make_three_comparisons():
    rankings = [ranked("t", "ann", 1, 2), ranked("t", "bob", 1, 2), ranked("t", "cy", 2, 1)]
    result = pairwise_agreement(rankings)
    assert (result.mean, result.num_pairs, result.num_tasks) == (1 / 3, 3, 1)
    assert result.low < 1 / 3 < result.high


def test_labelers_who_always_agree_have_an_interval_with_a_width():
    """Wilson's lower end for n of n is n / (n + z²); a pair of two responses counts as one."""
    rankings = [ranked(f"t{task}", name, 1, 2) for task in range(20) for name in ("ann", "bob")]
    agreement, accuracy = pairwise_agreement(rankings), accuracy_against(rankings, lambda _: [1.0, 0.0])
    assert (agreement.mean, agreement.low, agreement.high) == pytest.approx((1.0, 20 / (20 + 1.959964**2), 1.0))
    assert (accuracy.mean, accuracy.low, accuracy.high) == pytest.approx((1.0, 20 / (20 + 1.959964**2), 1.0))


def test_agreement_without_overlap_is_unknown():
    result = pairwise_agreement([ranked("t1", "ann", 1, 2), ranked("t2", "bob", 1, 2)])
    assert (result.num_pairs, result.num_tasks) == (0, 0)
    assert result.as_dict() == {"mean": None, "low": None, "high": None, "num_pairs": 0, "num_tasks": 0}


def test_rankings_of_other_responses_are_refused():
    other = Ranking("t", prompt_of("t"), ("x", "y"), (1, 2), "bob")
    with pytest.raises(ValueError, match="'t': responses differ"):
        pairwise_agreement([ranked("t", "ann", 1, 2), other])


def test_accuracy_by_hand_from_a_mapping_or_a_function():
    rankings = [
        ranked("t1", "ann", 1, 2, 3),  # truth 3 > 2 > 1: all 3 pairs right
        ranked("t1", "bob", 3, 2, 1),  # all 3 wrong
        ranked("t2", "ann", 1, 1, 2),  # untied in both: 02 right, 12 right
        ranked("t3", "ann", 2, 1),  # the truth ties them
    ]
    scores = {"t1": [3.0, 2.0, 1.0], "t2": [5.0, 4.0, 0.0], "t3": [1.0, 1.0]}
    result = accuracy_against(rankings, scores)
    assert (result.mean, result.num_pairs, result.num_tasks) == (5 / 8, 8, 2)
    assert accuracy_against(rankings, scores.__getitem__) == result


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ({}, "'t': scores has no entry"),
        ({"t": [1.0]}, "'t': scores has 1 entries for 2"),
        ({"t": [1.0, float("nan")]}, "'t': scores is"),
    ],
)
def test_accuracy_refuses_by_task(scores, message):
    with pytest.raises(ValueError, match=message):
        accuracy_against([ranked("t", "ann", 1, 2)], scores)


def test_a_known_noise_is_recovered():
    """Two labelers who each flip a pair with probability 0.2 agree on 0.8^2 + 0.2^2 = 0.68 of pairs."""
    generator = np.random.default_rng(0)
    rankings = [
        ranked(f"t{task}", name, *((2, 1) if generator.random() < 0.2 else (1, 2)))
        for task in range(1_500)
        for name in ("ann", "bob")
    ]
    agreement = pairwise_agreement(rankings)
    accuracy = accuracy_against(rankings, lambda _: [1.0, 0.0])
    assert agreement.low < 0.68 < agreement.high
    assert accuracy.low < 0.80 < accuracy.high
    assert agreement.high - agreement.low < 0.06
