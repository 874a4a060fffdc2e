"""Perfect answers: lists of units (sentences, or items of a list), joined by `render`.

Flaws are injected into the units (flaws.py), so an answer stays a list until the end.
"""

import itertools
import random

from heed.worlds.grammar import PATTERNS, fill, slots_of
from heed.worlds.instructions import BriefRequest, ListRequest, QuestionRequest, Request, StepsRequest, StoryRequest
from heed.worlds.vocabulary import CATEGORIES, LIST_CATEGORIES, ORDINALS, TAG_OF, TOOL_OF, child_of, pronoun_of

STORY_TAGS = frozenset(("animal", "food", "color", "thing", "place", "feeling", "job"))


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
    return {
        TAG_OF[request.verb]: request.verb,
        "color": request.color,
        "thing": request.thing,
        "name": request.owner,
    }


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
