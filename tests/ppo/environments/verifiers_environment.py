"""Environments of the package verifiers: a game over several turns, and a tool."""

from typing import Any

import verifiers as vf
from datasets import Dataset

ROWS = [{"question": "Say the word.", "answer": "plum", "info": {"hint": "a fruit"}}]


class Game(vf.MultiTurnEnv):
    """Says the hint until the answer is said, at most three times. Some words do something else."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        said = messages[-1].content
        if said == "crash":
            raise OSError("the disk is full")
        if said == "fail":
            raise vf.Error("the game is broken")
        if said == "rewrite":
            messages[0].content = "Say another word."
        if said == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
        return [{"role": "user", "content": state["info"]["hint"]}]


def was_said(completion: Any, answer: str) -> float:
    return 1.0 / len([turn for turn in completion if turn["role"] == "assistant"]) if answer in str(completion) else 0.0


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def load_environment(kind: str = "game", max_turns: int = 3) -> vf.Environment:
    data = Dataset.from_list(ROWS)
    if kind == "group":
        return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[lambda completions: [0.0] * len(completions)]))
    rubric = vf.Rubric(funcs=[was_said])
    if kind == "tool":
        return vf.ToolEnv(dataset=data, rubric=rubric, tools=[add], max_turns=max_turns)
    return Game(dataset=data, rubric=rubric, system_prompt="You play.", max_turns=max_turns)
