"""The playground's texts: for pretraining, and labelled for classification.

Pretraining text teaches the language and the ingredients of the skills, not the form of instructions. It joins passages
up to its length: stories, facts with questions and answers, lists, descriptions, explanations, and wishes that people
should or should not have.

Labelled data are grammatical sentences, entities, and questions on a text. The labels follow from how a row is made.
Words of one category are in no other, so a word's category shows the type of its entity; only where an entity begins
depends on the words before it.
"""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from heed.worlds.answers import perfect_answer, render
from heed.worlds.grammar import (
    BOYS,
    CATEGORIES,
    GIRLS,
    NUMBER_WORDS,
    PATTERNS,
    TAG_OF,
    join_words,
    parse_sentence,
    split_sentences,
)
from heed.worlds.instructions import (
    BRIEF_BOUNDS,
    Request,
    draw_brief,
    draw_decline,
    draw_help,
    draw_list,
    draw_question,
    draw_story,
    questions_on,
)


def _story(rng: random.Random) -> str:
    request = draw_story(rng)
    story = _answer(request, rng)
    title = f"This is a story about {request.hero} with the words {join_words(request.words, 'and')}."
    return f"{title} {story}" if rng.random() < 0.6 else story


def _questions(rng: random.Random) -> str:
    """Writes facts, and up to four questions about them with their answers."""
    facts = draw_question(rng).facts
    asked = questions_on(facts)
    asked = rng.sample(asked, min(4, len(asked)))
    return " ".join([*facts, *(sentence for request in asked for sentence in (request.question, request.answer))])


def _list(rng: random.Random) -> str:
    request = draw_list(rng)
    without = f" without {' or '.join(request.banned)}" if request.banned else f", first {request.first}"
    heading = f"Here are {NUMBER_WORDS[request.num_items]} {request.plural}{without}."
    return f"{heading}\n{_answer(request, rng)}\n"


def _descriptions(rng: random.Random) -> str:
    """Writes what is known about an animal, and descriptions of it within three word limits."""
    request = draw_brief(rng)
    text = request.stated()
    for max_words in rng.sample(BRIEF_BOUNDS, 3):
        bounded = replace(request, max_words=max_words)
        heading = f"This is the {request.animal} in at most {NUMBER_WORDS[max_words]} words."
        text = f"{text} {heading} {_answer(bounded, rng)}"
    return text


def _explanation(rng: random.Random) -> str:
    request = draw_help(rng)
    return f"This is how to {request.deed()} in {NUMBER_WORDS[request.num_steps]} steps. {_answer(request, rng)}"


def _wish(rng: random.Random) -> str:
    """Writes what someone wants to do, then steps or a refusal. Only the verb decides which."""
    request = draw_help(rng) if rng.random() < 0.5 else draw_decline(rng)
    return f"{request.name} wants to {request.deed()}. {_answer(request, rng)}"


def _answer(request: Request, rng: random.Random) -> str:
    return render(request, perfect_answer(request, rng))


def _echo(rng: random.Random) -> str:
    """Writes what one person says and another repeats.

    Every instruction needs the skill of copying from the context. Plain prose teaches it to a small model only after
    many more tokens than the demo has.
    """
    speaker, listener = rng.sample(GIRLS + BOYS, 2)
    if rng.random() < 0.75:
        # Random words: only the first occurrence predicts which word comes next.
        said = " ".join(rng.choice(_ALL_WORDS) for _ in range(rng.randint(4, 12))) + "."
    else:
        said = " ".join(draw_question(rng).facts)
    return f"{speaker} said: {said} {listener} said it again: {said}"


_ALL_WORDS = tuple(word for words in CATEGORIES.values() for word in words if " " not in word)
PASSAGES = {_story: 4, _questions: 4, _list: 4, _descriptions: 2, _explanation: 2, _wish: 4, _echo: 8}
CHEER_RATE = 0.08  # share of passages that end with a cheerful sentence


def write_text(rng: random.Random, min_words: int, max_words: int) -> str:
    """Joins passages until the text reaches a length drawn between the bounds. It exceeds it by at most a passage."""
    num_words, num_written = rng.randint(min_words, max_words), 0
    text = ""
    while num_written < num_words:
        passage = rng.choices(list(PASSAGES), weights=list(PASSAGES.values()))[0](rng)
        if rng.random() < CHEER_RATE:
            passage = f"{passage}{'' if passage.endswith(chr(10)) else ' '}{rng.choice(PATTERNS['cheer'])}"
        text = f"{text}{'' if not text or text.endswith(chr(10)) else ' '}{passage}"
        num_written += len(passage.split())
    return text.strip()


ENTITIES = {"name": "PERSON", "place": "PLACE", "animal": "ANIMAL", "thing": "THING", "food": "FOOD"}
BEFORE = ("color", "size")  # words of these categories belong to the entity that they stand before
UNANSWERED_SHARE, SPOILT_SHARE = 1 / 3, 1 / 2
_PIECES = re.compile(r"\w+|[^\w\s]")


def _story_sentences(rng: random.Random) -> list[str]:
    request = draw_story(rng)
    return split_sentences(render(request, perfect_answer(request, rng)))


def grammar_row(rng: random.Random) -> dict[str, Any]:
    """Draws a sentence of a story; in half of them two words have changed places, or one is of another category."""
    sentence = rng.choice(_story_sentences(rng))
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
    sentences = _story_sentences(rng)
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
