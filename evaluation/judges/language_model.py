"""Uses a language model behind an OpenAI-compatible endpoint as judge: every pair in both orders, at temperature 0."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evaluation.answers import Asker, OnProgress
from evaluation.endpoint import Answer
from evaluation.judges.judge import SAME_TEXT, Pair
from evaluation.judges.template import fill, read_verdict
from evaluation.verdicts import Side, Verdict


@dataclass(frozen=True)
class LanguageModelJudge:
    """Gives two verdicts per pair, one with each response first, which separates position bias from preference.

    Identical responses are ties and are not sent. An answer that does not end in a verdict is a failed verdict.
    """

    name: str
    asker: Asker
    template: str
    max_tokens: int

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": "language model",
            "spec": f"{self.asker.endpoint.url}#{self.asker.endpoint.model}",
            "template_sha256": hashlib.sha256(self.template.encode()).hexdigest(),
            "max_tokens": self.max_tokens,
            "temperature": 0,
        }

    def judge(self, pairs: Sequence[Pair], on_progress: OnProgress) -> list[Verdict]:
        """Raises: ValueError with the first cause if too many requests fail."""
        sides: tuple[Side, Side] = ("a", "b")
        asked = [(pair, first) for pair in pairs if not pair.is_same for first in sides]
        answers = iter(self.asker.ask_all([self._request(pair, first) for pair, first in asked], on_progress))
        verdicts: list[Verdict] = []
        for pair in pairs:
            if pair.is_same:
                verdicts.append(pair.verdict(self.name, SAME_TEXT))
            else:
                verdicts += [self._verdict(pair, first, next(answers)) for first in sides]
        return verdicts

    def _request(self, pair: Pair, first: Side) -> dict[str, Any]:
        texts = (pair.a.text, pair.b.text) if first == "a" else (pair.b.text, pair.a.text)
        question = fill(self.template, pair.prompt.messages, *texts)
        return {
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }

    def _verdict(self, pair: Pair, first: Side, answer: Answer) -> Verdict:
        first_wins, failure = read_verdict(answer.text) if not answer.failure else (0.0, answer.failure)
        if failure and answer.finished is False:
            failure = f"{failure}; the answer was truncated at {self.max_tokens} tokens"
        return pair.verdict(self.name, first_wins if first == "a" else 1 - first_wins, first=first, failure=failure)
