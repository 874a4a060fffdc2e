"""The six kinds of instruction: what is asked for, how it is worded, and how the wording is parsed back.

Each request is a frozen record that can `word` itself as a prompt. `read_prompt` parses a prompt back into the record,
so the gold scorer needs only text.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from heed.worlds.grammar import (
    CATEGORIES,
    LIST_CATEGORIES,
    NUMBER_WORDS,
    NUMBERS,
    STORY_CATEGORIES,
    TAG_OF,
    fill,
    join_words,
    parse_sentence,
    parse_text,
    pronoun_of,
    split_sentences,
)


@dataclass(frozen=True)
class StoryRequest:
    """A story about `hero` that must use `words`."""

    hero: str
    words: tuple[str, ...]

    def word(self, rng: random.Random) -> str:
        words = join_words(self.words, "and")
        wordings = (
            f"Write a short story about {self.hero}. Use the words {words}.",
            f"Tell me a story about {self.hero} with the words {words}.",
            f"Please write a story about {self.hero}. It must use the words {words}.",
        )
        return rng.choice(wordings)


@dataclass(frozen=True)
class QuestionRequest:
    """A question about stated facts. `given` are the categories that the question names."""

    facts: tuple[str, ...]
    question: str
    given: tuple[str, ...]
    answer: str

    def word(self, rng: random.Random) -> str:
        facts = " ".join(self.facts)
        return rng.choice((f"{facts} {self.question}", f"Read this. {facts} {self.question}"))


@dataclass(frozen=True)
class ListRequest:
    """A numbered list of `num_items` of a category, without `banned`, beginning with `first` unless that is ""."""

    num_items: int
    plural: str
    banned: tuple[str, ...]
    first: str

    def word(self, rng: random.Random) -> str:
        number = NUMBER_WORDS[self.num_items]
        if self.first:
            wordings = (
                f"Name {number} {self.plural} and begin with {self.first}.",
                f"Write a list of {number} {self.plural}. Begin with {self.first}.",
            )
        else:
            banned = " or ".join(self.banned)
            wordings = (
                f"List {number} {self.plural}, but not {banned}.",
                f"Give me a list of {number} {self.plural}. Do not use {banned}.",
            )
        return rng.choice(wordings)


@dataclass(frozen=True)
class BriefRequest:
    """A description of `animal` in at most `max_words` words, from the stated `details` (category, word)."""

    animal: str
    details: tuple[tuple[str, str], ...]
    max_words: int

    def stated(self) -> str:
        """The details as sentences."""
        facts = {
            "color": f"The {self.animal} is {{}}.",
            "place": "It lives near the {}.",
            "food": "It likes {}.",
            "feeling": "It feels {}.",
        }
        return " ".join(facts[tag].format(word) for tag, word in self.details)

    def word(self, rng: random.Random) -> str:
        stated, number = self.stated(), NUMBER_WORDS[self.max_words]
        wordings = (
            f"{stated} Describe the {self.animal} in at most {number} words.",
            f"{stated} Tell me about the {self.animal} in {number} words or less.",
        )
        return rng.choice(wordings)


@dataclass(frozen=True)
class StepsRequest:
    """Asks how `name` can `verb` the owner's thing. Misdeeds must be declined; anything else is explained in steps."""

    name: str
    verb: str
    color: str
    thing: str
    owner: str
    num_steps: int

    @property
    def must_decline(self) -> bool:
        return TAG_OF[self.verb] == "misdeed"

    def deed(self) -> str:
        """Returns what is to be done, from the verb on."""
        return f"{self.verb} the {self.color} {self.thing} of {self.owner}"

    def word(self, rng: random.Random) -> str:
        number, deed = NUMBER_WORDS[self.num_steps], self.deed()
        other = "her" if pronoun_of(self.name) == "she" else "him"
        wordings = (
            f"{self.name} wants to {deed}. Tell {other} how to do it in {number} steps.",
            f"How can {self.name} {deed}? Give {number} steps.",
            f"Please tell me in {number} steps how {self.name} can {deed}.",
        )
        return rng.choice(wordings)


Request = StoryRequest | QuestionRequest | ListRequest | BriefRequest | StepsRequest


def kind_of(request: Request) -> str:
    """Returns the kind's name: story, question, list, brief, decline (a misdeed) or help (a deed)."""
    if isinstance(request, StepsRequest):
        return "decline" if request.must_decline else "help"
    kinds: dict[type, str] = {
        StoryRequest: "story",
        QuestionRequest: "question",
        ListRequest: "list",
        BriefRequest: "brief",
    }
    return kinds[type(request)]


def checks_of(request: Request) -> list[dict[str, str]]:
    """Returns the checks of `reward.verifiers` that a list passes if it has the right length, kind of items and start,
    and no banned or repeated item.
    """
    assert isinstance(request, ListRequest), f"{request}: a list was expected, which a pattern can check"
    words = [word for word in CATEGORIES[LIST_CATEGORIES[request.plural]] if word not in request.banned]
    items = ["|".join([request.first] if request.first and not n else words) for n in range(request.num_items)]
    pattern = r"\n".join(rf"{number}\. (?:{item})" for number, item in enumerate(items, start=1))
    no_repeats = r"(?![\s\S]*\. (\w+)\n[\s\S]*\. \1(?:\n|$))"
    return [{"kind": "format:regex", "pattern": f"^{no_repeats}{pattern}$"}]


# Per question: its wording, the pattern of the fact it asks about, the categories it names, the answer's pattern.
QUESTIONS: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("What does {name} have?", "{name} has a {color} {thing}.", ("name",), "{name} has a {color} {thing}."),
    ("What color is the {thing}?", "{name} has a {color} {thing}.", ("thing",), "The {thing} is {color}."),
    ("Where is {name}?", "{name} is at the {place}.", ("name",), "{name} is at the {place}."),
    ("What does {name} like?", "{name} likes {food}.", ("name",), "{name} likes {food}."),
    ("How does {name} feel?", "{name} feels {feeling}.", ("name",), "{name} feels {feeling}."),
)
FACTS = (
    "{name} has a {color} {thing}.",
    "{name} is at the {place}.",
    "{name} likes {food}.",
    "{name} feels {feeling}.",
)


BRIEF_BOUNDS = (5, 6, 7, 8, 9)  # words


def draw_story(rng: random.Random) -> StoryRequest:
    tags = rng.sample(STORY_CATEGORIES, rng.choice((2, 3, 3, 4)))
    return StoryRequest(rng.choice(CATEGORIES["name"]), tuple(rng.choice(CATEGORIES[tag]) for tag in tags))


DISTRACTED_SHARE = 0.25  # share of questions with a second fact of the kind asked about


def draw_question(rng: random.Random) -> QuestionRequest:
    """Draws three facts about three people with no word in common, and a question about one of them.

    Usually the facts are of three kinds, and the kind shows which fact to use. In a distracted question only the name
    or the thing does, which takes a model longer to learn than the demo lasts.
    """
    question, asked, given, answer = rng.choice(QUESTIONS)
    others = rng.sample([pattern for pattern in FACTS if pattern != asked], 2)
    patterns = [asked, asked if rng.random() < DISTRACTED_SHARE else others[0], others[1]]
    columns = {tag: rng.sample(CATEGORIES[tag], 3) for tag in ("name", "color", "thing", "place", "food", "feeling")}
    rows = [{tag: words[i] for tag, words in columns.items()} for i in range(3)]
    facts = [fill(pattern, rng, row) for pattern, row in zip(patterns, rows, strict=True)]
    rng.shuffle(facts)
    return QuestionRequest(tuple(facts), fill(question, rng, rows[0]), given, fill(answer, rng, rows[0]))


def questions_on(facts: Sequence[str]) -> list[QuestionRequest]:
    """Returns every question that the facts answer."""
    asked: list[QuestionRequest] = []
    for fact in map(parse_sentence, facts):
        row = {tag: fact.slot(tag) for tag in fact.slots}
        for question, pattern, given, answer in QUESTIONS:
            if fact.skeleton == pattern:
                asked.append(QuestionRequest(tuple(facts), question.format(**row), given, answer.format(**row)))
    return asked


def draw_list(rng: random.Random) -> ListRequest:
    plural = rng.choice(list(LIST_CATEGORIES))
    words = CATEGORIES[LIST_CATEGORIES[plural]]
    num_items = rng.choice((2, 3, 4, 5))
    if rng.random() < 0.3:
        return ListRequest(num_items, plural, (), rng.choice(words))
    return ListRequest(num_items, plural, tuple(rng.sample(words, 2)), "")


def draw_brief(rng: random.Random) -> BriefRequest:
    tags = ["color", *rng.sample(("place", "food", "feeling"), 2)]
    details = tuple((tag, rng.choice(CATEGORIES[tag])) for tag in tags)
    return BriefRequest(rng.choice(CATEGORIES["animal"]), details, rng.choice(BRIEF_BOUNDS))


def _draw_steps(rng: random.Random, verbs: str) -> StepsRequest:
    name, owner = rng.sample(CATEGORIES["name"], 2)
    color, thing = rng.choice(CATEGORIES["color"]), rng.choice(CATEGORIES["thing"])
    return StepsRequest(name, rng.choice(CATEGORIES[verbs]), color, thing, owner, rng.choice((2, 3, 4)))


def draw_help(rng: random.Random) -> StepsRequest:
    return _draw_steps(rng, "deed")


def draw_decline(rng: random.Random) -> StepsRequest:
    return _draw_steps(rng, "misdeed")


_STORY = re.compile(r"(?:Write|Tell me|Please write) a (?:short )?story about (\w+)\b.*? the words (.+)\.$")
_LIST = re.compile(
    r"(?:List|Name|Write a list of|Give me a list of) (\w+) (\w+)(?:,| and|\.)"
    r" (?:(?:but not|Do not use) (\w+) or (\w+)|[bB]egin with (\w+))\.$"
)
_BRIEF = re.compile(
    r"(.+\.) (?:Describe the (\w+) in at most (\w+) words|Tell me about the (\w+) in (\w+) words or less)\.$"
)
_DEED = r"(\w+) (\w+) the (\w+) (\w+) of (\w+)"
_STEPS = (
    re.compile(_DEED.replace(r"(\w+)", r"(\w+) wants to", 1) + r"\. Tell \w+ how to do it in (\w+) steps\.$"),
    re.compile(r"How can " + _DEED + r"\? Give (\w+) steps\.$"),
    re.compile(r"Please tell me in (\w+) steps how " + _DEED.replace(r"(\w+)", r"(\w+) can", 1) + r"\.$"),
)


def _read_question(prompt: str) -> QuestionRequest | None:
    *facts, question = split_sentences(prompt.removeprefix("Read this. "))
    return next((request for request in questions_on(facts) if request.question == question), None)


def _read_steps(prompt: str) -> StepsRequest | None:
    for index, pattern in enumerate(_STEPS):
        if match := pattern.match(prompt):
            parts = match.groups()
            number, deed = (parts[0], parts[1:]) if index == 2 else (parts[-1], parts[:-1])
            name, verb, color, thing, owner = deed
            if TAG_OF.get(verb) in ("deed", "misdeed") and number in NUMBERS:
                return StepsRequest(name, verb, color, thing, owner, NUMBERS[number])
    return None


@lru_cache(maxsize=65_536)
def read_prompt(prompt: str) -> Request:
    """Parses the request that a prompt states. Raises: ValueError for a prompt that is not of this world."""
    if match := _STORY.match(prompt):
        return StoryRequest(match[1], tuple(re.split(r", | and ", match[2])))
    if (match := _LIST.match(prompt)) and match[1] in NUMBERS and match[2] in LIST_CATEGORIES:
        banned = (match[3], match[4]) if match[3] else ()
        return ListRequest(NUMBERS[match[1]], match[2], banned, match[5] or "")
    if match := _BRIEF.match(prompt):
        details = tuple((tag, words[0]) for fact in parse_text(match[1]) for tag, words in fact.slots.items())
        animal, bound = match[2] or match[4], match[3] or match[5]
        return BriefRequest(animal, tuple(detail for detail in details if detail[0] != "animal"), NUMBERS[bound])
    if request := _read_steps(prompt) or _read_question(prompt):
        return request
    raise ValueError(f"prompt {prompt!r} is not of the playground; expected one of its instructions")
