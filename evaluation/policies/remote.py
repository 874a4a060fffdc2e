"""Policies behind an OpenAI-compatible endpoint."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evaluation.answers import Asker, OnProgress
from evaluation.policies.policy import Sampling
from evaluation.verdicts import Response
from training.data import Prompt
from training.seeds import derive_seed

SEEDS = 2**31  # servers accept seeds below this


@dataclass(frozen=True)
class RemotePolicy:
    """Sends one request with its own seed per sample. Answers are cached, so reruns agree even if a server ignores
    seeds.
    """

    name: str
    prompts: Sequence[Prompt]
    sampling: Sampling
    asker: Asker

    def describe(self) -> dict[str, Any]:
        endpoint = self.asker.endpoint
        sampling = {
            name: value for name, value in asdict(self.sampling).items() if name not in ("precision", "reference")
        }
        return {
            "name": self.name,
            "kind": "endpoint",
            "spec": f"{endpoint.url}#{endpoint.model}",
            "sampling": sampling,
        }

    def respond(self, on_progress: OnProgress) -> list[Response]:
        """Raises: ValueError if any request failed. The answers received are stored for the next run."""
        wanted = [(prompt, index) for prompt in self.prompts for index in range(self.sampling.num_samples)]
        answers = self.asker.ask_all([self._request(prompt, index) for prompt, index in wanted], on_progress)
        failed = [(prompt, answer) for (prompt, _), answer in zip(wanted, answers, strict=True) if answer.failure]
        if failed:
            raise ValueError(
                f"policy {self.name!r}: {len(failed)} of {len(wanted)} requests failed, the first on prompt"
                f" {failed[0][0].prompt_id!r}: {failed[0][1].failure}. The answers received are stored: run it again"
            )
        return [
            Response(self.name, prompt.prompt_id, index, answer.text.strip(), answer.num_tokens, answer.finished)
            for (prompt, index), answer in zip(wanted, answers, strict=True)
        ]

    def _request(self, prompt: Prompt, index: int) -> dict[str, Any]:
        named = derive_seed(self.sampling.seed, "compare", self.name, prompt.prompt_id, index)
        return {
            "messages": [dict(message) for message in prompt.messages],
            "temperature": self.sampling.temperature,
            "max_tokens": self.sampling.max_new_tokens,
            "seed": named % SEEDS,
        }
