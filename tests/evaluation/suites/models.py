"""Models and judges for the tests of suites."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evaluation.suites.suite import Request, Unable
from lm.tokenizer import Messages
from reward.endpoint import Answer, Asker, Endpoint


def by_prompt(answers: Mapping[str, str | Answer]) -> Callable[[Request], Answer]:
    """Answers by the text of the last question; any other question fails."""

    def write(request: Request) -> Answer:
        found = answers.get(request.messages[-1]["content"], Answer("", failure="status 500"))
        return found if isinstance(found, Answer) else Answer(found, True)

    return write


@dataclass
class Written(Unable):
    """A model that answers every request by `write`, and keeps what it was asked."""

    write: Callable[[Request], Answer]
    has_chat_template: bool = False
    name: str = "written"
    asked: list[Request] = field(default_factory=list)

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        self.asked += requests
        return [self.write(request) for request in requests]


@dataclass
class Rewarding(Unable):
    """A reward model whose rewards `reward` computes."""

    reward: Callable[[Messages], Answer | float]
    has_chat_template: bool = True
    name: str = "rewarding"

    def rewards(self, conversations: Sequence[Messages]) -> list[Answer | float]:
        return [self.reward(conversation) for conversation in conversations]


@dataclass(frozen=True)
class EndpointJudge:
    """A judge behind an OpenAI-compatible endpoint."""

    url: str
    cache: Path
    model: str = "judge"
    name: str = "judge"

    def ask(self, prompts: Sequence[Messages], max_tokens: int) -> list[Answer]:
        asker = Asker(Endpoint(self.url, self.model, 20.0, 0), self.cache, concurrency=2, max_failed_share=1.0)
        bodies = [{"messages": list(prompt), "temperature": 0, "max_tokens": max_tokens} for prompt in prompts]
        return asker.ask_all(bodies, lambda _done, _total: None)
