"""Heed's own sampler: the same core as the learner's, so both compute the same log-probs up to rounding."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

import torch
from torch import Tensor

from lm.config import Precision
from lm.decoding import FixedSteps, fixed_steps
from lm.generation import Generated, generate
from lm.model import LanguageModel
from lm.samplers.engine import SamplingEngine, SentWeights, digests_of, held_tensors, noted, take
from lm.sampling import Choice
from lm.source import load_for_inference, on_meta
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class HeedSampler(SamplingEngine):
    """Holds the policy in compute precision, and samples from it with `lm.generation`."""

    def __init__(self, policy: LanguageModel, end_ids: Sequence[int], *, keeps_steps: bool = False) -> None:
        """`keeps_steps`: on its own GPU it keeps its cache and recorded steps; weights arrive in place."""
        self._config, self._dtype = policy.config, policy.head.weight.dtype
        self._device, self.end_ids = policy.head.weight.device, end_ids
        self._policy: LanguageModel | None = policy
        self._digests = digests_of(held_tensors(policy))
        kept = fixed_steps(policy, "auto") if keeps_steps else None
        self.steps: FixedSteps | Literal["auto"] = kept or "auto"

    @classmethod
    def load(cls, folder: Path, precision: Precision, *, keeps_steps: bool = False) -> Self:
        policy = load_for_inference(ModelFolder(folder, LanguageModel), DTYPES[precision])
        return cls(policy, Tokenizer.load(folder).end_ids, keeps_steps=keeps_steps)

    @property
    def policy(self) -> LanguageModel:
        assert self._policy is not None, "the sampler sleeps: it has dropped its weights"
        return self._policy

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, max_new_tokens: int, temperature: float
    ) -> Generated:
        return generate(
            self.policy,
            prompts,
            max_new_tokens=max_new_tokens,
            end_ids=self.end_ids,
            choice=Choice(temperature),
            seeds=seeds,
            steps=self.steps,
        )

    def receive(self, sent: Iterable[SentWeights]) -> None:
        self._digests = {}
        take(self.policy, noted(sent, self._digests))

    def forget_prompts(self) -> None:
        """Does nothing: keys and values are not kept between calls."""

    @property
    def digests(self) -> Mapping[str, int]:
        return self._digests

    def slots(self) -> Iterator[tuple[str, Tensor]]:
        yield from held_tensors(self.policy).items()

    def sleep(self) -> None:
        self._policy = None

    def wake(self) -> None:
        if self._policy is None:
            policy = on_meta(lambda: LanguageModel(self._config)).to(self._dtype)
            self._policy = policy.to_empty(device=self._device).eval()
            self._policy.tie()

    def close(self) -> None:
        """Does nothing: the memory is released with the process."""
