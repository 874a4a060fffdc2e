"""The protocol of sampling engines, and how far their log-probs may be from the learner's: no more than rounding.

PPO uses engines through this protocol alone, and `heed verify-sampler` tests it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from torch import Tensor

from lm.config import Precision
from lm.generation import Generated
from lm.samplers.sent_weights import SentWeights

# Mean |difference| for one layer, in nats per token; see `max_difference`.
ROUNDING: dict[Precision, float] = {"fp32": 0.0005, "bf16": 0.02}
# Over tokens from π_sampler, the mean ratio π_learner / π_sampler is 1 up to rounding. It may be off by
# MAX_RATIO_ERROR, or by MAX_STANDARD_ERRORS of its standard errors if that is more: a few unlikely tokens can move it.
MAX_RATIO_ERROR = 0.02
MAX_STANDARD_ERRORS = 4.0
# One broken rank of many hardly moves the mean over all tokens, so each response of at least MIN_TOKENS tokens is also
# judged alone: its mean difference may be RESPONSE_FACTOR times the limit.
MIN_TOKENS = 16
RESPONSE_FACTOR = 4


class SamplingEngine(Protocol):
    """Samples from a copy of a language model, and receives its weights after every update.

    Temperature is the only option: an engine that also cuts the distribution (top_p, top_k) samples from another policy
    than the one whose log-probs it reports, and every probability ratio is off by the mass it kept.
    """

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, max_new_tokens: int, temperature: float
    ) -> Generated:
        """Sample one response per prompt, each from its own seed, up to and including the tokenizer's end token.

        The log-probs are those of the distribution that was sampled from, softmax(logits / temperature) over the whole
        vocabulary, in nats.
        """
        ...

    def receive(self, sent: Iterable[SentWeights]) -> None:
        """Replace all weights, and forget everything that was computed with the old ones.

        Names, shapes and types are those of `slots`.
        Raises: AssertionError naming the tensors that did not arrive.
        """
        ...

    def forget_prompts(self) -> None:
        """Forget the cached keys and values of prompts, if there are any. `receive` calls this."""
        ...

    @property
    def digests(self) -> Mapping[str, int]:
        """The digest of each weight received last, or loaded (`lm.samplers.sent_weights.digests_of`)."""
        ...

    def slots(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and memory of each weight that it receives, in order; a broadcast writes into this memory."""
        ...

    def sleep(self) -> None:
        """Release the memory of weights and caches until `wake`."""
        ...

    def wake(self) -> None:
        """Allocate memory again, if asleep. The weights then have no values: call `receive` before `sample`."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


LoadEngine = Callable[[Path, Precision], SamplingEngine]  # loads the model in a folder, to compute in a precision


def max_difference(precision: Precision, num_layers: int) -> float:
    """Returns how far rounding may take sampler and learner apart: mean |difference| of log-probs, in nats per token.

    Each layer rounds what it adds to the residual stream. These errors are independent, so their sum grows with the
    square root of the number of layers. Measured with Heed's own sampler in bf16: .005 with the 2 layers of the debug
    job, .044 with the 30 of SmolLM2-135M, a trained model whose logits are larger; in fp32, 2e-7 with 2 layers.
    """
    return ROUNDING[precision] * math.sqrt(num_layers)


@dataclass(frozen=True)
class Agreement:
    """How well the log-probs of sampled tokens agree. Differences are log π_learner - log π_sampler, in nats."""

    difference: float  # mean of the absolute values
    ratio: float  # mean of π_learner / π_sampler
    ratio_error: float  # standard error of `ratio`
    worst_response: float  # largest mean absolute difference of a response with at least MIN_TOKENS tokens; 0 = none

    @classmethod
    def of(cls, difference_C: Tensor, lengths: Sequence[int]) -> Self:
        """Measures agreement from each token's difference, response after response, and the responses' lengths."""
        ratio_C = difference_C.exp()
        by_response = [
            float(part.abs().mean()) for part in difference_C.split(list(lengths)) if len(part) >= MIN_TOKENS
        ]
        return cls(
            float(difference_C.abs().mean()),
            float(ratio_C.mean()),
            float(ratio_C.std(correction=0)) / len(difference_C) ** 0.5,
            max(by_response, key=lambda value: math.inf if math.isnan(value) else value, default=0.0),
        )

    def holds(self, most: float) -> bool:
        """Returns whether both are the same policy, up to rounding of `most` nats per token (`max_difference`).

        NaN counts as a difference.
        """
        return (
            self.difference <= most
            and self.worst_response <= RESPONSE_FACTOR * most
            and abs(self.ratio - 1) <= max(MAX_RATIO_ERROR, MAX_STANDARD_ERRORS * self.ratio_error)
        )
