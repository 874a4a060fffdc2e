"""Splits by conversation."""

import pytest

from preferences.rankings import is_heldout, opening, split_rankings
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


def conversation(first, *later, system=""):
    """The prompts of a conversation's turns."""
    turns = [Message("system", system)] if system else []
    turns.append(Message("user", first))
    prompts = [tuple(turns)]
    for number, text in enumerate(later):
        turns += [Message("assistant", f"response {number}"), Message("user", text)]
        prompts.append(tuple(turns))
    return prompts


@pytest.mark.parametrize("system", ["", "You write poems."])
def test_all_turns_of_a_conversation_are_on_the_same_side(system):
    conversations = [conversation(f"question {i}", "and then?", "go on", system=system) for i in range(500)]
    sides = [{is_heldout(prompt, 0.3, seed=2) for prompt in prompts} for prompts in conversations]
    assert all(len(own) == 1 for own in sides)
    assert sum(own == {True} for own in sides) / 500 == pytest.approx(0.3, abs=0.06)
    rankings = [
        Ranking(f"t{i}-{turn}", prompt, ("a", "b"), (1, 2), "ann")
        for i, prompts in enumerate(conversations[:50])
        for turn, prompt in enumerate(prompts)
    ]
    train, heldout = split_rankings(rankings, 0.3, seed=2)
    assert {opening(r.prompt) for r in train}.isdisjoint(opening(r.prompt) for r in heldout)
    assert len(train) + len(heldout) == 150


def test_what_opens_a_conversation():
    tool = (Message("system", "s"), Message("user", "u"), Message("assistant", "a"), Message("tool", "t"))
    assert opening(tool) == tool[:2]
    assert opening(tool[:2]) == tool[:2]
    assert opening(tool[:1]) == tool[:1]  # no user has spoken


def test_prompts_of_one_turn_keep_the_sides_that_they_had_when_whole_prompts_were_split():
    """Written down from that version: a run that was trained then is still measured on rankings it has not seen."""
    sides = [is_heldout((Message("system", "Be brief."), Message("user", f"q{i}")), 0.4, seed=7) for i in range(24)]
    assert "".join(str(int(side)) for side in sides) == "101101000001111100011100"
