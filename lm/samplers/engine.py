"""What an engine that samples must do. PPO uses engines through this alone, and `heed verify-sampler` tests it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from lm.config import Precision
from lm.generation import Generated
from lm.samplers.sent_weights import SentWeights


class SamplingEngine(Protocol):
    """Samples from a copy of a language model, whose weights it is sent after every update.

    Temperature is the only option: an engine that also cuts the distribution (top_p, top_k) samples from another policy
    than the one whose log-probs it reports, and every probability ratio is off by the mass it kept.
    """

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, max_new_tokens: int, temperature: float
    ) -> Generated:
        """One response per prompt, each from its own seed, up to the tokenizer's end token, which is part of it.

        The log-probs are those of softmax(logits / temperature) over the whole vocabulary, in nats, as it was sampled
        from.
        """
        ...

    def receive(self, sent: Iterable[SentWeights]) -> None:
        """Replace all weights, and forget whatever was computed with the old ones.

        Names, shapes and types are those of `slots`.
        Raises: AssertionError naming the tensors that did not arrive.
        """
        ...

    def forget_prompts(self) -> None:
        """Forget keys and values that are kept of prompts; `receive` calls it. Nothing where none are kept."""
        ...

    @property
    def digests(self) -> Mapping[str, int]:
        """The digest of each weight received last, or loaded (`lm.samplers.sent_weights.digests_of`)."""
        ...

    def slots(self) -> Iterator[tuple[str, Tensor]]:
        """Name and memory of each weight that it receives, in order; a broadcast writes into it."""
        ...

    def sleep(self) -> None:
        """Release the memory of weights and caches until `wake`."""
        ...

    def wake(self) -> None:
        """Take memory again, if it sleeps. Its weights have no values then: `receive` comes before `sample`."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


LoadEngine = Callable[[Path, Precision], SamplingEngine]  # a sampler of the model in a folder, computing in a precision
