"""Answers to the playground's instructions: perfect ones, and those of a careless writer.

An answer is a list of units (sentences, or items of a list) until `render` joins it. A flaw takes a draft and returns
the units of a worse answer. Each kind of request has its own flaws with their weights. `write_answer` draws whether an
answer is flawed, and how.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from heed.worlds.grammar import (
    CATEGORIES,
    LIST_CATEGORIES,
    ORDINALS,
    PATTERNS,
    STORY_CATEGORIES,
    TAG_OF,
    TOOL_OF,
    child_of,
    fill,
    pronoun_of,
    slots_of,
)
from heed.worlds.instructions import (
    BriefRequest,
    ListRequest,
    QuestionRequest,
    Request,
    StepsRequest,
    StoryRequest,
    draw_decline,
    kind_of,
)

STORY_TAGS = frozenset(STORY_CATEGORIES)


def render(request: Request, units: list[str]) -> str:
    """Joins units into the answer's text: numbered lines for a list, otherwise sentences separated by spaces."""
    if isinstance(request, ListRequest):
        numbers = itertools.count(1)
        return "\n".join(f"{next(numbers)}. {unit}" if unit in TAG_OF else unit for unit in units)
    return " ".join(units)


def tell_story(hero: str, words: tuple[str, ...], rng: random.Random) -> list[str]:
    """Writes an opening, two to four middles and a closing, without repeating a pattern or changing the topic."""
    needed = {TAG_OF[word]: word for word in words}
    mentioned: dict[str, str] = {}
    sentences: list[str] = []
    left = set(needed)

    def say(pattern: str) -> None:
        who = hero if not sentences or rng.random() < 0.25 else pronoun_of(hero)
        given = {"name": hero, "child": child_of(hero), "who": who, **mentioned, **needed}
        text = fill(pattern, rng, given)
        sentences.append(text)
        left.difference_update(slots_of(pattern))
        # Slots that were filled at random stay fixed, so that a later "the dog" is the same dog.
        mentioned.update({tag: word for word in text.strip(".").replace(",", "").split() if (tag := _tag(word))})

    say(rng.choice(PATTERNS["opening"]))
    num_middles = rng.choice((2, 2, 3))
    patterns = list(PATTERNS["middle"])
    while left or num_middles > 0:
        pattern = _next_pattern(patterns, left, set(mentioned) | set(needed), rng)
        patterns.remove(pattern)
        say(pattern)
        num_middles -= 1
    closings = [
        pattern for pattern in PATTERNS["closing"] if set(slots_of(pattern)) - {"who", "feeling"} <= set(mentioned)
    ]
    say(rng.choice(closings))
    return sentences


def _tag(word: str) -> str:
    tag = TAG_OF.get(word, "")
    return tag if tag in STORY_TAGS else ""


def _next_pattern(patterns: list[str], left: set[str], known: set[str], rng: random.Random) -> str:
    """Picks a random pattern about the hero or a known word that uses words still needed, if there is one."""
    on_topic = [p for p in patterns if "who" in slots_of(p) or not known.isdisjoint(slots_of(p))]
    needed = [p for p in on_topic if not left.isdisjoint(slots_of(p))]
    return rng.choice(needed or on_topic)


def list_items(request: ListRequest, rng: random.Random) -> list[str]:
    words = CATEGORIES[LIST_CATEGORIES[request.plural]]
    free = [word for word in words if word not in request.banned and word != request.first]
    head = [request.first] if request.first else []
    return head + rng.sample(free, request.num_items - len(head))


def describe(request: BriefRequest, rng: random.Random) -> list[str]:
    """Writes one sentence with two of the stated details, within the word limit."""
    details = dict(request.details)
    fitting = [
        pattern
        for pattern in PATTERNS["brief"]
        if len(slots_of(pattern)) == 3
        and set(slots_of(pattern)) <= {"animal", *details}
        and len(pattern.split()) <= request.max_words
    ]
    return [fill(rng.choice(fitting), rng, {"animal": request.animal, **details})]


def explain(request: StepsRequest, rng: random.Random) -> list[str]:
    """Writes steps that bring the right tool and end with the deed (or the misdeed, for wrong compliance)."""
    ordinals = ORDINALS[request.num_steps]
    go, take, bring, ask, do = PATTERNS["step"]
    tool = TOOL_OF.get(request.verb) or rng.choice(CATEGORIES["tool"])
    given = {**step_words(request), "tool": tool}
    before = [bring, *rng.sample((go, take, ask), request.num_steps - 2)]
    rng.shuffle(before)
    last = PATTERNS["misstep"][0] if request.must_decline else do
    patterns = zip(ordinals, [*before, last], strict=True)
    return [fill(pattern, rng, {**given, "ordinal": ordinal}) for ordinal, pattern in patterns]


def decline(request: StepsRequest, rng: random.Random) -> list[str]:
    reason = fill(rng.choice(PATTERNS["reason"]), rng, step_words(request))
    return [rng.choice(PATTERNS["decline"]), reason]


def step_words(request: StepsRequest) -> dict[str, str]:
    """Returns the request's words by slot."""
    return {TAG_OF[request.verb]: request.verb, "color": request.color, "thing": request.thing, "name": request.owner}


def perfect_answer(request: Request, rng: random.Random) -> list[str]:
    """Returns the units of an answer that the gold scorer gives 1."""
    if isinstance(request, StoryRequest):
        return tell_story(request.hero, request.words, rng)
    if isinstance(request, QuestionRequest):
        return [request.answer]
    if isinstance(request, ListRequest):
        return list_items(request, rng)
    if isinstance(request, BriefRequest):
        return describe(request, rng)
    return decline(request, rng) if request.must_decline else explain(request, rng)


@dataclass(frozen=True)
class Draft:
    """A request, the units of a perfect answer to it, and the generator that a flaw draws from."""

    request: Request
    units: list[str]
    rng: random.Random


Flaw = Callable[[Draft], list[str]]


def _cheer(draft: Draft) -> list[str]:
    """Adds a cheerful sentence that answers nothing."""
    return [*draft.units, draft.rng.choice(PATTERNS["cheer"])]


def _repeat(draft: Draft) -> list[str]:
    place = draft.rng.randrange(len(draft.units))
    return [*draft.units[: place + 1], draft.units[place], *draft.units[place + 1 :]]


def _stop_early(draft: Draft) -> list[str]:
    """Cuts the last unit in half."""
    words = draft.units[-1].split()
    cut = " ".join(words[: max(1, len(words) // 2)])
    return [*draft.units[:-1], cut]


def _decline_harmless(draft: Draft) -> list[str]:
    return [draft.rng.choice(PATTERNS["decline"])]


def _stray(draft: Draft) -> list[str]:
    """Adds a fact about someone else."""
    stray = fill(draft.rng.choice(PATTERNS["fact"][:4]), draft.rng, {})
    return [*draft.units, stray] if draft.rng.random() < 0.5 else [stray, *draft.units]


def _forget_words(draft: Draft) -> list[str]:
    """Tells the story without one or more of the required words."""
    assert isinstance(draft.request, StoryRequest)
    kept = draft.rng.sample(draft.request.words, draft.rng.randrange(len(draft.request.words)))
    return tell_story(draft.request.hero, tuple(kept), draft.rng)


def _no_ending(draft: Draft) -> list[str]:
    return draft.units[:-2]


def _other_hero(draft: Draft) -> list[str]:
    assert isinstance(draft.request, StoryRequest)
    return tell_story(draft.rng.choice(CATEGORIES["name"]), draft.request.words, draft.rng)


def _wrong_answer(draft: Draft) -> list[str]:
    """States another of the facts, or changes one word of the right answer."""
    assert isinstance(draft.request, QuestionRequest)
    if draft.rng.random() < 0.4:
        return [draft.rng.choice(draft.request.facts)]
    return [_swap_word(draft.units[0], draft.rng)]


def _swap_word(sentence: str, rng: random.Random) -> str:
    """Replaces a random word with another one of the same category."""
    words = sentence.rstrip(".").split()
    places = [i for i, word in enumerate(words) if word in TAG_OF]
    if not places:
        return sentence
    place = rng.choice(places)
    words[place] = rng.choice([word for word in CATEGORIES[TAG_OF[words[place]]] if word != words[place]])
    return " ".join(words) + "."


def _all_facts(draft: Draft) -> list[str]:
    """Rambles: states every fact but the one asked for, after it."""
    assert isinstance(draft.request, QuestionRequest)
    return draft.units + [fact for fact in draft.request.facts if fact not in draft.units]


def _wrong_count(draft: Draft) -> list[str]:
    assert isinstance(draft.request, ListRequest)
    num_items = draft.rng.choice([n for n in (1, 2, 3, 4, 5, 6) if n != draft.request.num_items])
    return list_items(replace(draft.request, num_items=num_items), draft.rng)


def _repeat_item(draft: Draft) -> list[str]:
    place = draft.rng.randrange(1, len(draft.units)) if len(draft.units) > 1 else 0
    return [*draft.units[:place], draft.units[0], *draft.units[place + 1 :]]


def _wrong_item(draft: Draft) -> list[str]:
    """Replaces a random item with one of another category, or with a banned one."""
    assert isinstance(draft.request, ListRequest)
    others = [tag for tag in LIST_CATEGORIES.values() if tag != LIST_CATEGORIES[draft.request.plural]]
    wrong = draft.rng.choice((*draft.request.banned, draft.rng.choice(CATEGORIES[draft.rng.choice(others)])))
    place = draft.rng.randrange(len(draft.units))
    return [*draft.units[:place], wrong, *draft.units[place + 1 :]]


def _ramble(draft: Draft) -> list[str]:
    """States the details one by one, beyond the word limit."""
    assert isinstance(draft.request, BriefRequest)
    given = {"animal": draft.request.animal, **dict(draft.request.details)}
    one_each = [pattern for pattern in PATTERNS["brief"][:4] if any(f"{{{tag}}}" in pattern for tag in given)]
    patterns = [pattern for pattern in one_each if any(f"{{{tag}}}" in pattern for tag, _ in draft.request.details)]
    return [fill(pattern, draft.rng, given) for pattern in draft.rng.sample(patterns, draft.rng.choice((2, 3)))]


def _wrong_detail(draft: Draft) -> list[str]:
    return [_swap_word(draft.units[0], draft.rng), *draft.units[1:]]


def _one_detail(draft: Draft) -> list[str]:
    assert isinstance(draft.request, BriefRequest)
    tag, word = draft.rng.choice(draft.request.details)
    pattern = next(pattern for pattern in PATTERNS["brief"][:4] if f"{{{tag}}}" in pattern)
    return [fill(pattern, draft.rng, {"animal": draft.request.animal, tag: word})]


def _comply(draft: Draft) -> list[str]:
    assert isinstance(draft.request, StepsRequest)
    return explain(draft.request, draft.rng)


def _rude(draft: Draft) -> list[str]:
    return [PATTERNS["rude"][0], *draft.units[1:]]


def _no_reason(draft: Draft) -> list[str]:
    return draft.units[:1]


def _wrong_reason(draft: Draft) -> list[str]:
    assert isinstance(draft.request, StepsRequest)
    return [draft.units[0], decline(draw_decline(draft.rng), draft.rng)[1]]


def _wrong_num_steps(draft: Draft) -> list[str]:
    assert isinstance(draft.request, StepsRequest)
    return explain(
        replace(draft.request, num_steps=draft.rng.choice([n for n in (2, 3, 4) if n != draft.request.num_steps])),
        draft.rng,
    )


def _wrong_tool(draft: Draft) -> list[str]:
    return [
        _swap_word(unit, draft.rng) if any(tool in unit for tool in CATEGORIES["tool"]) else unit
        for unit in draft.units
    ]


def _no_deed(draft: Draft) -> list[str]:
    """Ends with another deed."""
    assert isinstance(draft.request, StepsRequest)
    other = fill(
        PATTERNS["step"][4],
        draft.rng,
        {**step_words(draft.request), "deed": draft.rng.choice(CATEGORIES["deed"]), "ordinal": "Last"},
    )
    return [*draft.units[:-1], _swap_word(other, draft.rng)]


def _full_story(draft: Draft) -> list[str]:
    """Answers with two sentences, one of them wrong."""
    assert isinstance(draft.request, BriefRequest)
    return draft.units + describe(replace(draft.request, max_words=9), draft.rng)


# Randomly wrong words teach a model to ignore the prompt, and no later stage restores that skill. So such flaws are
# rare; most flaws are of form and length, which learning from preferences can correct.
FLAWS: dict[str, dict[Flaw, float]] = {
    "story": {_forget_words: 3, _no_ending: 2, _cheer: 2, _repeat: 2, _stop_early: 1, _other_hero: 0.5},
    "question": {_all_facts: 3, _cheer: 2, _stray: 2, _wrong_answer: 1.5, _repeat: 1, _decline_harmless: 0.5},
    "list": {_wrong_count: 3, _repeat_item: 3, _wrong_item: 2, _cheer: 2, _decline_harmless: 0.5},
    "brief": {_ramble: 4, _one_detail: 2, _cheer: 2, _full_story: 1.5, _wrong_detail: 1, _stop_early: 0.5},
    "decline": {_comply: 4, _no_reason: 2, _rude: 1.5, _cheer: 1.5, _wrong_reason: 1},
    "help": {_wrong_num_steps: 3, _decline_harmless: 2.5, _cheer: 2, _repeat: 1.5, _wrong_tool: 1, _no_deed: 1},
}
# Flaws that fit any units, so they may follow another flaw.
SECOND_FLAWS: tuple[Flaw, ...] = (_cheer, _repeat, _stray)


def write_answer(request: Request, rng: random.Random, flaw_rate: float, second_flaw_rate: float) -> str:
    """Writes an answer: perfect with probability 1 - flaw_rate, otherwise with one or two flaws."""
    units = perfect_answer(request, rng)
    if rng.random() < flaw_rate:
        flaws = FLAWS[kind_of(request)]
        units = rng.choices(list(flaws), weights=list(flaws.values()))[0](Draft(request, units, rng))
        if rng.random() < second_flaw_rate:
            units = rng.choice(SECOND_FLAWS)(Draft(request, units, rng))
    return render(request, units)
