"""Models, judges and scorers for the tests of suites."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation.endpoint import Answer, Asker, Endpoint
from evaluation.suites.suite import Continuation, Request
from lm.tokenizer import Messages


@dataclass
class Written:
    """A model that answers every request by `write`, and keeps what it was asked."""

    write: Callable[[Request], Answer]
    has_chat_template: bool = False
    name: str = "written"
    asked: list[Request] = field(default_factory=list)

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        self.asked += requests
        return [self.write(request) for request in requests]

    def logprobs(self, continuations: Sequence[Continuation]) -> list[float]:
        raise ValueError(f"{self.name} has no probabilities of {len(continuations)} texts")

    def rewards(self, conversations: Sequence[Messages]) -> list[Answer | float]:
        raise ValueError(f"{self.name} has no rewards for {len(conversations)} conversations")


@dataclass
class Served:
    """A judge behind the OpenAI-compatible server of the tests."""

    server: Any
    cache: Path
    name: str = "served"

    def ask(self, prompts: Sequence[Messages], max_tokens: int) -> list[Answer]:
        endpoint = Endpoint.of(f"{self.server.url}#{self.name}", self.name, timeout_seconds=5, num_retries=0)
        bodies = [{"messages": list(prompt), "temperature": 0, "max_tokens": max_tokens} for prompt in prompts]
        return Asker(endpoint, self.cache, 2, 1.0).ask_all(bodies, lambda _done, _total: None)


@dataclass
class ByTable:
    """A scorer that looks answers up, and keeps what it was shown."""

    table: dict[str, float | str]
    shown: list[tuple[str, str]] = field(default_factory=list)

    def score(self, asked: Sequence[Messages], answers: Sequence[str]) -> list[float | str]:
        self.shown += [(messages[-1]["content"], answer) for messages, answer in zip(asked, answers, strict=True)]
        return [self.table[answer] for answer in answers]
