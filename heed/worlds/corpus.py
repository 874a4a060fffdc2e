"""Pretraining text: passages that teach the language and the ingredients of the skills, not the form of instructions.

A text joins passages up to its length: stories, facts with questions and answers, lists, descriptions, explanations,
and wishes that people should or should not have.
"""

import random
from dataclasses import replace

from heed.worlds.answers import perfect_answer, render
from heed.worlds.grammar import BOYS, CATEGORIES, GIRLS, NUMBER_WORDS, PATTERNS, join_words
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
