"""Heed's own sampler: the same core as the learner's, so both compute the same log-probs up to rounding."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, Self

import torch
from torch import Tensor

from lm.config import Precision
from lm.decoding import FixedSteps, fixed_steps
from lm.generation import Generated, Limits, NextRound, generate, generate_in_rounds
from lm.model import LanguageModel
from lm.samplers.engine import SamplingEngine, SentWeights, chunks, digests_of, held_tensors, noted, require_same, take
from lm.sampling import Choice
from lm.source import inference_device, load_for_inference, on_meta
from lm.tensor_parallel import LanguageModelPart, Team
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder

KEPT_SHARE = 1 / 16  # of a GPU's memory, for the cache of a sampler that shares the GPU with other roles
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class HeedSampler(SamplingEngine):
    """Holds the policy, or this rank's part of it, in compute precision, and samples from it with `lm.generation`.

    The ranks of a team make all calls together, with the same arguments, and get the same samples.
    """

    def __init__(
        self,
        policy: LanguageModel,
        end_ids: Sequence[int],
        *,
        kept_share: float = 0.0,
        max_rows: int = 0,
        digests: Mapping[str, int] | None = None,
    ) -> None:
        """A GPU keeps the cache and the recorded steps between calls if the cache takes at most `kept_share` of its
        memory; weights must then arrive in place, without `sleep`. At most `max_rows` are sampled at once (0 =
        `lm.generation.SAMPLED_AT_ONCE`).

        `digests` are those of the whole weights, if `policy` is only a part.
        """
        self._max_rows, self._kept_share = max_rows, kept_share
        self._dtype, self._device, self.end_ids = policy.head.weight.dtype, policy.head.weight.device, end_ids
        self._policy: LanguageModel | None = policy
        # Not methods, which would refer to this object: a cycle keeps weights until Python's garbage collection.
        self._build_whole: Callable[[], LanguageModel] = partial(LanguageModel, policy.config)
        self._build: Callable[[], LanguageModel] = self._build_whole
        if isinstance(policy, LanguageModelPart):
            self._build_whole = partial(LanguageModel, policy.whole)
            self._build = partial(LanguageModelPart, policy.whole, policy.team)
        self._digests = dict(digests or digests_of(held_tensors(policy)))
        kept = fixed_steps(policy, "auto") if kept_share else None
        self.steps: FixedSteps | Literal["auto"] = kept or "auto"

    @classmethod
    def load(
        cls,
        folder: Path,
        precision: Precision,
        *,
        end_ids: Sequence[int] = (),
        kept_share: float = 0.0,
        max_rows: int = 0,
        team: Team | None = None,
    ) -> Self:
        """Load the model of a directory, or this rank's part of it. `end_ids` end a response; empty = those of the
        directory's tokenizer.

        Raises: ValueError if the team cannot share the model.
        """
        source, dtype = ModelFolder(folder, LanguageModel), DTYPES[precision]
        end_ids = end_ids or Tokenizer.load(folder).end_ids
        if team is None:
            return cls(load_for_inference(source, dtype), end_ids, kept_share=kept_share, max_rows=max_rows)
        part = _Part(source, team, dtype)
        policy = load_for_inference(part, dtype)
        return cls(policy, end_ids, kept_share=kept_share, max_rows=max_rows, digests=part.digests)

    @property
    def policy(self) -> LanguageModel:
        assert self._policy is not None, "the sampler sleeps: it has dropped its weights"
        return self._policy

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, max_new_tokens: Limits, temperature: float
    ) -> Generated:
        found = generate(
            self.policy,
            prompts,
            max_new_tokens=max_new_tokens,
            end_ids=self.end_ids,
            choice=Choice(temperature),
            seeds=seeds,
            max_rows=self._max_rows,
            steps=self.steps,
        )
        self._forget_large_steps()
        return found

    def sample_in_rounds(
        self,
        next_round: NextRound,
        *,
        num_steps: int,
        num_rows: int,
        num_columns: int,
        max_new_tokens: int,
        temperature: float,
        records_routes: bool,
    ) -> None:
        """Sample with the present weights, a round at a time (`lm.generation.generate_in_rounds`)."""
        generate_in_rounds(
            self.policy,
            next_round,
            num_steps=num_steps,
            num_rows=num_rows,
            num_columns=num_columns,
            max_new_tokens=max_new_tokens,
            end_ids=self.end_ids,
            choice=Choice(temperature),
            steps=self.steps,
            records_routes=records_routes,
        )
        self._forget_large_steps()

    def _forget_large_steps(self) -> None:
        if isinstance(self.steps, FixedSteps) and self.steps.num_bytes > self._kept_share * _memory_of(self._device):
            self.steps.forget()

    def receive(self, sent: Iterable[SentWeights]) -> None:
        self._digests = {}
        arriving, policy = noted(sent, self._digests), self.policy
        take(policy, map(partial(self._cut, policy), arriving) if isinstance(policy, LanguageModelPart) else arriving)

    def _cut(self, policy: LanguageModelPart, chunk: SentWeights) -> SentWeights:
        """Returns this rank's part of each tensor, with digests of its own. Checks whole tensors, and cuts them."""
        if chunk.part_digests is not None:
            return SentWeights(chunk.weights, chunk.part_digests)
        whole = {name: tensor.to(self._device) for name, tensor in chunk.weights.items()}
        require_same(chunk.digests, whole)
        return SentWeights.of({name: policy.cut(name, tensor) for name, tensor in whole.items()})

    @property
    def digests(self) -> Mapping[str, int]:
        return self._digests

    def slots(self) -> Iterator[Mapping[str, Tensor]]:
        own = held_tensors(self.policy)
        for chunk in chunks(held_tensors(on_meta(self._build_whole).to(self._dtype)).items()):
            yield {name: own[name] for name in chunk}

    def sleep(self) -> None:
        self._policy = None

    def wake(self) -> None:
        if self._policy is None:
            policy = on_meta(self._build).to(self._dtype)
            self._policy = policy.to_empty(device=self._device).eval()
            self._policy.tie()

    def close(self) -> None:
        """Does nothing: the memory is released with the process."""


def _memory_of(gpu: torch.device) -> int:
    return torch.cuda.mem_get_info(gpu)[1]


@dataclass(frozen=True)
class _Part:
    """A rank's part of a model as a source: tensors are cut as they are read. `digests` are those of whole tensors."""

    source: ModelFolder[LanguageModel]
    team: Team
    dtype: torch.dtype
    digests: dict[str, int] = field(default_factory=dict)

    def build(self) -> LanguageModelPart:
        return LanguageModelPart(self.source.build().config, self.team)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        model = on_meta(self.build)
        for name, tensor in self.source.tensors():
            whole = tensor.to(inference_device(), self.dtype)
            self.digests.update(digests_of({name: whole}))
            yield name, model.cut(name, whole)
