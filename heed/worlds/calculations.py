"""Small sums in words, with their answers, and demonstrations that call a calculator for them."""

import json
import random
from typing import Any

OPERATORS = {"+": "plus", "-": "minus", "*": "times"}


def calculations(number: int, rng: random.Random) -> list[dict[str, Any]]:
    """Returns prompts with the answer that a verifier compares; sums may repeat, so each has an id."""
    return [{"prompt_id": f"sum-{place}", **_asked(*_drawn(rng))} for place in range(number)]


def calls(number: int, rng: random.Random) -> list[dict[str, Any]]:
    """Returns demonstrations whose response calls the tool `calculate`, as Hermes and Qwen models do."""
    found = []
    for _ in range(number):
        first, operator, second = _drawn(rng)
        call = {"name": "calculate", "arguments": {"expression": f"{first} {operator} {second}"}}
        messages = _asked(first, operator, second)["messages"]
        answer = {"role": "assistant", "content": f"<tool_call>{json.dumps(call)}</tool_call>"}
        found.append({"messages": [*messages, answer]})
    return found


def _drawn(rng: random.Random) -> tuple[int, str, int]:
    return rng.randrange(1, 100), rng.choice(list(OPERATORS)), rng.randrange(1, 100)


def _asked(first: int, operator: str, second: int) -> dict[str, Any]:
    answer = {"+": first + second, "-": first - second, "*": first * second}[operator]
    question = f"What is {first} {OPERATORS[operator]} {second}?"
    return {"messages": [{"role": "user", "content": question}], "answer": answer}
