"""Models with recorded answers or rewards, and a judge behind a test's endpoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evaluation.endpoint import Answer, Asker, Endpoint
from evaluation.suites.suite import Continuation, Request
from lm.tokenizer import Messages


@dataclass
class RecordedModel:
    """Answers by the last question's text; an Answer may be a failed one. `requests` holds what it was asked."""

    answers: Mapping[str, str | Answer]
    requests: list[Request] = field(default_factory=list)
    name: str = "recorded"

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        self.requests += requests
        found = [self.answers[request.messages[-1]["content"]] for request in requests]
        return [one if isinstance(one, Answer) else Answer(one, True) for one in found]

    def logprobs(self, continuations: Sequence[Continuation]) -> list[float]:
        raise NotImplementedError

    def rewards(self, conversations: Sequence[Messages]) -> list[Answer | float]:
        raise NotImplementedError


@dataclass
class RewardingModel:
    """A reward model whose rewards `reward` computes."""

    reward: Callable[[Messages], Answer | float]
    name: str = "rewarding"

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        raise NotImplementedError

    def logprobs(self, continuations: Sequence[Continuation]) -> list[float]:
        raise NotImplementedError

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
        requests = [{"messages": list(prompt), "temperature": 0, "max_tokens": max_tokens} for prompt in prompts]
        return asker.ask_all(requests, lambda _done, _total: None)
