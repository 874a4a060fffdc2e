"""The playground's grades: answers graded by three criteria, from which a language model learns to judge.

The criteria are the factors of the gold score (heed/worlds/gold.py), from 1 (factor 0) to 5 (factor 1). Their weighted
mean is not the gold score, which is a product, and some of the grades are wrong: a judge that learned from them errs.
"""

import random
from string import Template
from typing import Any

from heed.worlds.answers import write_answer
from heed.worlds.gold import judge
from heed.worlds.instructions import Request

# The rubric of a judge that is trained on these rows, as `[ppo.reward] rubric` takes it.
RUBRIC: dict[str, Any] = {
    "template": "$prompt\n$response\n$criterion",
    "criteria": {"form": {"text": "form"}, "fit": {"text": "length"}, "asked": {"text": "answer"}},
}
GRADES = (1, 2, 3, 4, 5)
FLAW_RATE, SECOND_FLAW_RATE = 0.75, 0.4
SPOILT_SHARE = 0.4  # of the answers, by words that are lost, repeated, swapped or cut off


def num_answers(num_rows: int) -> int:
    """Returns how many answers this many rows grade, each by all criteria."""
    return -(-num_rows // len(RUBRIC["criteria"]))


def graded_rows(prompt: str, request: Request, rng: random.Random, noise: float) -> list[dict[str, Any]]:
    """Draws an answer to a prompt. Returns a conversation per criterion: what a judge is asked, and the grade; a
    `noise` share of the grades is drawn at random.
    """
    response = write_answer(request, rng, FLAW_RATE, SECOND_FLAW_RATE)
    if rng.random() < SPOILT_SHARE:
        response = _spoilt(response, rng)
    factors = judge(request, response)
    rows = []
    for name, criterion in RUBRIC["criteria"].items():
        grade = round(1 + (GRADES[-1] - 1) * getattr(factors, name))
        grade = rng.choice(GRADES) if rng.random() < noise else grade
        asked = Template(RUBRIC["template"]).substitute(prompt=prompt, response=response, criterion=criterion["text"])
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": str(grade)}]
        rows.append({"messages": turns})
    return rows


def _spoilt(response: str, rng: random.Random) -> str:
    """Loses, repeats or swaps words of an answer, or cuts it off."""
    words = response.split(" ")
    for _ in range(rng.randint(1, 4)):
        place, kind = rng.randrange(len(words)), rng.choice(("lose", "repeat", "swap", "cut"))
        other = rng.randrange(len(words))
        if kind == "lose" and len(words) > 1:
            del words[place]
        elif kind == "repeat":
            words.insert(place, words[place])
        elif kind == "swap":
            words[place], words[other] = words[other], words[place]
        elif kind == "cut":
            words = words[: max(1, place)]
    return " ".join(words)
