"""Splits by prompt."""

import pytest

from preferences.rankings import is_heldout, split_rankings
from preferences.records import Message, Ranking


def prompt_of(text):
    return (Message("user", text),)


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
