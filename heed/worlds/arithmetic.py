"""The playground's arithmetic: small sums in words, with demonstrations that call a calculator for them; and tasks of
several steps, which add digits to a digit, one at a time, and keep the last digit.

A rule says whether any response is solved, so a policy that writes the steps can be measured.
"""

import json
import random
import re
import zlib
from itertools import accumulate, pairwise
from typing import Any

OPERATORS = {"+": "plus", "-": "minus", "*": "times"}
# As the environment `calculator` describes it (ppo/environments/tools.py).
TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Returns the value of an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "such as (3 + 4) * 2"}},
            "required": ["expression"],
        },
    },
}


def calculations(number: int, rng: random.Random) -> list[dict[str, Any]]:
    """Returns prompts with the answer that a verifier compares; sums may repeat, so each has an id."""
    return [{"prompt_id": f"sum-{place}", **_asked(*_drawn(rng))} for place in range(number)]


def calls(number: int, rng: random.Random) -> list[dict[str, Any]]:
    """Returns demonstrations whose response calls the tool `calculate`."""
    found = []
    for _ in range(number):
        first, operator, second = _drawn(rng)
        arguments = json.dumps({"expression": f"{first} {operator} {second}"})
        call = {"type": "function", "function": {"name": "calculate", "arguments": arguments}}
        messages = _asked(first, operator, second)["messages"]
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        found.append({"messages": [*messages, answer], "tools": [TOOL]})
    return found


def _drawn(rng: random.Random) -> tuple[int, str, int]:
    return rng.randrange(1, 100), rng.choice(list(OPERATORS)), rng.randrange(1, 100)


def _asked(first: int, operator: str, second: int) -> dict[str, Any]:
    answer = {"+": first + second, "-": first - second, "*": first * second}[operator]
    question = f"What is {first} {OPERATORS[operator]} {second}?"
    return {"messages": [{"role": "user", "content": question}], "answer": answer}


WRONG_SHARE = 0.25  # of the results in a careless answer
_PROMPT = re.compile(r"Start at (\d)\. Add ([\d, ]+)\. Keep the last digit\.")


def draw_prompt(rng: random.Random, *, is_heldout: bool = False) -> str:
    """Draws a task of three to five steps. Of these 3,510 tasks, a tenth is held out and never drawn for training."""
    while True:
        added = ", ".join(str(rng.randint(1, 3)) for _ in range(rng.randint(3, 5)))
        prompt = f"Start at {rng.randint(0, 9)}. Add {added}. Keep the last digit."
        if (zlib.crc32(prompt.encode()) % 10 == 0) == is_heldout:
            return prompt


def careless_steps(prompt: str, rng: random.Random, wrong_share: float = WRONG_SHARE) -> list[str]:
    """Writes the steps of an answer; each result is wrong with this probability, and the next step goes on with it."""
    total, added = _task(prompt)
    steps = []
    for number in added:
        error = rng.randint(1, 9) if rng.random() < wrong_share else 0
        result = (total + number + error) % 10
        steps.append(f"{total} + {number} = {result}")
        total = result
    return steps


def is_solved(prompt: str, response: str) -> bool:
    """Returns whether a response has all the right steps, one per line, and nothing else."""
    total, added = _task(prompt)
    totals = [*accumulate(added, lambda total, number: (total + number) % 10, initial=total)]
    right = [f"{before} + {number} = {after}" for (before, after), number in zip(pairwise(totals), added, strict=True)]
    return [line.strip() for line in response.split("\n") if line.strip()] == right


def _task(prompt: str) -> tuple[int, list[int]]:
    """Returns where a task starts, and what it adds. Raises: ValueError for another text."""
    found = _PROMPT.search(prompt)
    if found is None:
        raise ValueError(f"{prompt!r} is no counting task of the playground")
    return int(found[1]), [int(number) for number in found[2].split(", ")]
