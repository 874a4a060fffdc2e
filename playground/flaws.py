"""Flaws of the demonstrations: what a careless writer does to a perfect answer.

A flaw takes the request and the units of an answer and returns other units. Each kind has its own set, with the chance
of each; `write_answer` draws whether an answer is flawed and how.
"""

import random
from collections.abc import Callable
from dataclasses import replace

from playground.answers import decline, describe, explain, list_items, perfect_answer, render, step_words, tell_story
from playground.grammar import PATTERNS, fill
from playground.instructions import (
    BriefRequest,
    ListRequest,
    QuestionRequest,
    Request,
    StepsRequest,
    StoryRequest,
    draw_decline,
    kind_of,
)
from playground.vocabulary import CATEGORIES, LIST_CATEGORIES, TAG_OF

Flaw = Callable[[Request, list[str], random.Random], list[str]]


def _cheer(request: Request, units: list[str], rng: random.Random) -> list[str]:
    """Adds a cheerful sentence that answers nothing."""
    return [*units, rng.choice(PATTERNS["cheer"])]


def _repeat(request: Request, units: list[str], rng: random.Random) -> list[str]:
    place = rng.randrange(len(units))
    return [*units[: place + 1], units[place], *units[place + 1 :]]


def _stop_early(request: Request, units: list[str], rng: random.Random) -> list[str]:
    """Cuts the last unit in its middle."""
    words = units[-1].split()
    cut = " ".join(words[: max(1, len(words) // 2)])
    return [*units[:-1], cut]


def _decline_harmless(request: Request, units: list[str], rng: random.Random) -> list[str]:
    return [PATTERNS["decline"][0]]


def _stray(request: Request, units: list[str], rng: random.Random) -> list[str]:
    """Adds a fact about someone else."""
    stray = fill(rng.choice(PATTERNS["fact"][:4]), rng, {})
    return [*units, stray] if rng.random() < 0.5 else [stray, *units]


def _forget_words(request: Request, units: list[str], rng: random.Random) -> list[str]:
    """Tells the story without one or more of the required words."""
    assert isinstance(request, StoryRequest)
    kept = rng.sample(request.words, rng.randrange(len(request.words)))
    return tell_story(request.hero, tuple(kept), rng)


def _no_ending(request: Request, units: list[str], rng: random.Random) -> list[str]:
    return units[:-2]


def _other_hero(request: Request, units: list[str], rng: random.Random) -> list[str]:
    assert isinstance(request, StoryRequest)
    return tell_story(rng.choice(CATEGORIES["name"]), request.words, rng)


def _wrong_answer(request: Request, units: list[str], rng: random.Random) -> list[str]:
    """States another of the facts, or changes one word of the right answer."""
    assert isinstance(request, QuestionRequest)
    if rng.random() < 0.4:
        return [rng.choice(request.facts)]
    return [_swap_word(units[0], rng)]


def _swap_word(sentence: str, rng: random.Random) -> str:
    """Puts another word of the same category in the place of a random one."""
    words = sentence.rstrip(".").split()
    places = [i for i, word in enumerate(words) if word in TAG_OF]
    if not places:
        return sentence
    place = rng.choice(places)
    words[place] = rng.choice([word for word in CATEGORIES[TAG_OF[words[place]]] if word != words[place]])
    return " ".join(words) + "."


def _all_facts(request: Request, units: list[str], rng: random.Random) -> list[str]:
    """Rambles: states every fact but the one asked for, after it."""
    assert isinstance(request, QuestionRequest)
    return units + [fact for fact in request.facts if fact not in units]


def _wrong_count(request: Request, units: list[str], rng: random.Random) -> list[str]:
    assert isinstance(request, ListRequest)
    num_items = rng.choice([n for n in (1, 2, 3, 4, 5, 6) if n != request.num_items])
    return list_items(replace(request, num_items=num_items), rng)


def _repeat_item(request: Request, units: list[str], rng: random.Random) -> list[str]:
    place = rng.randrange(1, len(units)) if len(units) > 1 else 0
    return [*units[:place], units[0], *units[place + 1 :]]


def _wrong_item(request: Request, units: list[str], rng: random.Random) -> list[str]:
    """Puts an item of another category, or one that was banned, in a random place."""
    assert isinstance(request, ListRequest)
    others = [tag for tag in LIST_CATEGORIES.values() if tag != LIST_CATEGORIES[request.plural]]
    wrong = rng.choice((*request.banned, rng.choice(CATEGORIES[rng.choice(others)])))
    place = rng.randrange(len(units))
    return [*units[:place], wrong, *units[place + 1 :]]


def _ramble(request: Request, units: list[str], rng: random.Random) -> list[str]:
    """Tells the stated details one by one, past the bound."""
    assert isinstance(request, BriefRequest)
    given = {"animal": request.animal, **dict(request.details)}
    one_each = [pattern for pattern in PATTERNS["brief"][:4] if any(f"{{{tag}}}" in pattern for tag in given)]
    patterns = [pattern for pattern in one_each if any(f"{{{tag}}}" in pattern for tag, _ in request.details)]
    return [fill(pattern, rng, given) for pattern in rng.sample(patterns, rng.choice((2, 3)))]


def _wrong_detail(request: Request, units: list[str], rng: random.Random) -> list[str]:
    return [_swap_word(units[0], rng), *units[1:]]


def _one_detail(request: Request, units: list[str], rng: random.Random) -> list[str]:
    assert isinstance(request, BriefRequest)
    tag, word = rng.choice(request.details)
    pattern = next(pattern for pattern in PATTERNS["brief"][:4] if f"{{{tag}}}" in pattern)
    return [fill(pattern, rng, {"animal": request.animal, tag: word})]


def _comply(request: Request, units: list[str], rng: random.Random) -> list[str]:
    assert isinstance(request, StepsRequest)
    return explain(request, rng)


def _rude(request: Request, units: list[str], rng: random.Random) -> list[str]:
    return [PATTERNS["rude"][0], *units[1:]]


def _no_reason(request: Request, units: list[str], rng: random.Random) -> list[str]:
    return units[:1]


def _wrong_reason(request: Request, units: list[str], rng: random.Random) -> list[str]:
    assert isinstance(request, StepsRequest)
    return [units[0], decline(draw_decline(rng), rng)[1]]


def _wrong_num_steps(request: Request, units: list[str], rng: random.Random) -> list[str]:
    assert isinstance(request, StepsRequest)
    return explain(replace(request, num_steps=rng.choice([n for n in (2, 3, 4) if n != request.num_steps])), rng)


def _wrong_tool(request: Request, units: list[str], rng: random.Random) -> list[str]:
    return [_swap_word(unit, rng) if any(tool in unit for tool in CATEGORIES["tool"]) else unit for unit in units]


def _no_deed(request: Request, units: list[str], rng: random.Random) -> list[str]:
    """Ends on some other deed."""
    assert isinstance(request, StepsRequest)
    other = fill(PATTERNS["step"][4], rng, {**step_words(request), "deed": rng.choice(CATEGORIES["deed"]), "ordinal": "Last"})
    return [*units[:-1], _swap_word(other, rng)]


def _full_story(request: Request, units: list[str], rng: random.Random) -> list[str]:
    """Answers with two sentences, one of them wrong."""
    assert isinstance(request, BriefRequest)
    return units + describe(replace(request, max_words=9), rng)


FLAWS: dict[str, dict[Flaw, float]] = {
    "story": {_forget_words: 4, _no_ending: 1.5, _cheer: 2, _repeat: 1.5, _other_hero: 1, _stop_early: 1},
    "question": {_wrong_answer: 4, _all_facts: 2, _cheer: 2, _stray: 1, _decline_harmless: 0.5, _repeat: 0.5},
    "list": {_wrong_count: 3, _repeat_item: 3, _wrong_item: 3, _cheer: 1.5, _stop_early: 0.5, _decline_harmless: 0.3},
    "brief": {_ramble: 4, _wrong_detail: 2, _one_detail: 2, _cheer: 2, _full_story: 1, _stop_early: 0.5},
    "decline": {_comply: 4, _rude: 1.5, _no_reason: 2, _wrong_reason: 2, _cheer: 1},
    "help": {_decline_harmless: 2, _wrong_num_steps: 3, _wrong_tool: 2, _no_deed: 2, _cheer: 1.5, _repeat: 1},
}
# Flaws that suit any units, and so may follow another flaw.
SECOND_FLAWS: tuple[Flaw, ...] = (_cheer, _repeat, _stray)


def write_answer(request: Request, rng: random.Random, flaw_rate: float, second_flaw_rate: float) -> str:
    """An answer as a careless writer gives it: perfect with chance 1 - flaw_rate, else with one flaw or two."""
    units = perfect_answer(request, rng)
    if rng.random() < flaw_rate:
        flaws = FLAWS[kind_of(request)]
        units = rng.choices(list(flaws), weights=list(flaws.values()))[0](request, units, rng)
        if rng.random() < second_flaw_rate:
            units = rng.choice(SECOND_FLAWS)(request, units, rng)
    return render(request, units)
