"""What a comparison needs from a policy, and how policies are sampled."""

from dataclasses import dataclass
from typing import Any, Protocol

from evaluation.answers import OnProgress
from evaluation.verdicts import Response
from lm.config import Precision


@dataclass(frozen=True)
class Sampling:
    """How policies are sampled. Seeds are derived from policy, prompt and sample, so no two share one.

    `reference` is a model directory; "" measures no KL.
    """

    num_samples: int
    temperature: float
    max_new_tokens: int
    seed: int
    precision: Precision
    reference: str = ""

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.max_new_tokens < 1 or not self.temperature >= 0 or self.seed < 0:
            raise ValueError(
                f"num_samples is {self.num_samples}, max_new_tokens {self.max_new_tokens},"
                f" temperature {self.temperature}, seed {self.seed}; at least 1, 1, 0 and 0 were expected"
            )


class Policy(Protocol):
    """A policy and the prompts that it answers. Implementations validate their inputs in the constructor."""

    @property
    def name(self) -> str: ...

    def describe(self) -> dict[str, Any]:
        """Returns everything that its responses depend on, as JSON: equal descriptions mean equal responses."""

    def respond(self, on_progress: OnProgress) -> list[Response]:
        """Returns its responses to all prompts, prompt by prompt, at least one per prompt."""
