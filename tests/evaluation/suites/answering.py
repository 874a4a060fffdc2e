"""Models for tests of suites."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from evaluation.endpoint import Answer
from evaluation.measures.kl import Policy
from evaluation.suites.suite import Continuation, Request
from lm.sequence_logprobs import sequence_logprobs
from lm.tokenizer import Messages


@dataclass
class Answering:
    """Gives the answer that it has for a prompt; a failed one for any other."""

    answers: Mapping[str, str]
    name: str = "answering"
    asked: list[Request] = field(default_factory=list)

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        self.asked += requests
        prompts = [request.messages[-1]["content"] for request in requests]
        return [
            Answer(self.answers[prompt]) if prompt in self.answers else Answer("", failure="status 500")
            for prompt in prompts
        ]

    def logprobs(self, continuations: Sequence[Continuation]) -> list[float]:  # noqa: ARG002
        raise ValueError(f"{self.name}: it gives no probabilities")

    def rewards(self, conversations: Sequence[Messages]) -> list[Answer | float]:  # noqa: ARG002
        raise ValueError(f"{self.name}: it is no reward model")


@dataclass
class Scoring(Answering):
    """A model directory, asked for log-probabilities only."""

    policy: Policy | None = None

    def logprobs(self, continuations: Sequence[Continuation]) -> list[float]:
        assert self.policy is not None
        tokenizer = self.policy.tokenizer
        whole = tokenizer.encode_plain([one.text + one.continuation for one in continuations])
        before = tokenizer.encode_plain([one.text for one in continuations])
        cuts = [len(tokens) for tokens in before]
        answers = [tokens[cut:] for tokens, cut in zip(whole, cuts, strict=True)]
        return sequence_logprobs(self.policy.model, [t[:c] for t, c in zip(whole, cuts, strict=True)], answers, 1.0)
