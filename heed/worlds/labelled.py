"""The playground's labelled data, for classification: grammatical sentences, entities, and questions on a text.

The labels follow from how a row is made. Words of one category are in no other, so a word's category shows the type of
its entity; only where an entity begins depends on the words before it.
"""

import random
import re
from collections.abc import Callable
from typing import Any

from heed.worlds.answers import perfect_answer, render
from heed.worlds.grammar import CATEGORIES, TAG_OF, parse_sentence, split_sentences
from heed.worlds.instructions import draw_question, draw_story, questions_on

ENTITIES = {"name": "PERSON", "place": "PLACE", "animal": "ANIMAL", "thing": "THING", "food": "FOOD"}
BEFORE = ("color", "size")  # words of these categories belong to the entity that they stand before
UNANSWERED_SHARE, SPOILT_SHARE = 1 / 3, 1 / 2
_PIECES = re.compile(r"\w+|[^\w\s]")


def _story(rng: random.Random) -> list[str]:
    request = draw_story(rng)
    return split_sentences(render(request, perfect_answer(request, rng)))


def grammar_row(rng: random.Random) -> dict[str, Any]:
    """Draws a sentence of a story; in half of them two words have changed places, or one is of another category."""
    sentence = rng.choice(_story(rng))
    if rng.random() >= SPOILT_SHARE:
        return {"text": sentence, "label": "grammatical"}
    while parse_sentence(spoilt := _spoilt(sentence, rng)).groups:
        pass
    return {"text": spoilt, "label": "ungrammatical"}


def _spoilt(sentence: str, rng: random.Random) -> str:
    words = sentence[:-1].split(" ")
    if rng.random() < 0.5:
        one, other = rng.sample(range(len(words)), 2)
        words[one], words[other] = words[other], words[one]
    else:
        words[rng.randrange(len(words))] = rng.choice(CATEGORIES[rng.choice([*CATEGORIES])])
    return " ".join(words) + sentence[-1]


def entity_row(rng: random.Random) -> dict[str, Any]:
    """Draws two or three sentences of a story, word by word, with the types of entities in IOB2."""
    sentences = _story(rng)
    start = rng.randrange(len(sentences))
    words = _PIECES.findall(" ".join(sentences[start : start + rng.choice((2, 3))]))
    tags = ["O"] * len(words)
    for place, word in enumerate(words):
        kind = ENTITIES.get(TAG_OF.get(word, ""))
        if kind is None:
            continue
        first = place - 1 if place and TAG_OF.get(words[place - 1].lower()) in BEFORE else place
        tags[first : place + 1] = [f"B-{kind}", f"I-{kind}"][: place + 1 - first]
    return {"tokens": words, "tags": tags}


def question_row(rng: random.Random) -> dict[str, Any]:
    """Draws facts and a question on them, as a row of SQuAD 2.0; a third ask what the facts do not say."""
    facts = draw_question(rng).facts
    context = " ".join(facts)
    if rng.random() >= UNANSWERED_SHARE:
        asked = rng.choice(questions_on(facts))
        told = parse_sentence(asked.answer).slots
        text = " ".join(word for tag, words in told.items() if tag not in ("name", *asked.given) for word in words)
        answer = {"text": text, "answer_start": context.index(f" {text}") + 1}
        return {"question": asked.question, "context": context, "answers": [answer]}
    while True:  # a question on other facts, about somebody or something that these do not name
        other = rng.choice(questions_on(draw_question(rng).facts))
        if not any(re.search(rf"\b{word}\b", context) for word in _named(other.question)):
            return {"question": other.question, "context": context, "answers": []}


def _named(question: str) -> list[str]:
    return [word for word in _PIECES.findall(question) if TAG_OF.get(word) in ("name", "thing")]


DRAWN: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "grammar": grammar_row, "entities": entity_row, "questions": question_row
}  # fmt: skip


def draw_rows(kind: str, num_rows: int, rng: random.Random, seen: set[str]) -> list[dict[str, Any]]:
    """Draws distinct rows that are not in `seen`, and adds them to it."""
    rows: list[dict[str, Any]] = []
    while len(rows) < num_rows:
        row = DRAWN[kind](rng)
        if str(row) not in seen:
            seen.add(str(row))
            rows.append({**row, "id": str(len(rows))} if kind == "questions" else row)
    return rows
