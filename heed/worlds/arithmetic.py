"""The playground's arithmetic: small sums in words, with demonstrations that call a calculator for them."""

import json
import random
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
