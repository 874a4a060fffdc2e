"""One generator's responses in placement `continuous`: begun, continued with newer weights, and handed to learners.

Shape letters: B responses, R response tokens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from safetensors.torch import load, save

from lm.generation import Partial
from lm.samplers.heed_engine import HeedSampler
from ppo.config import PPOConfig
from ppo.prompts import Mixture
from ppo.rollout import Rollout
from ppo.schedule import FREE, Schedule
from training.packing import Sampler

GroupPrompt = tuple[int, Sequence[int]]  # row of the prompt in the job's prompts, and its tokens


@dataclass
class Begun(Partial):
    """A response in parts, with the digest of the weights that drew its tokens, each from its first token on."""

    prompt_row: int = 0
    drawn_by: dict[int, int] = field(default_factory=dict)

    @property
    def digests(self) -> list[int]:
        """Returns the digest of the weights that drew each token."""
        ends = [*list(self.drawn_by)[1:], len(self.tokens)]
        spans = zip(self.drawn_by.items(), ends, strict=True)
        return [digest for (first, digest), end in spans for _ in range(end - first)]


class Part(NamedTuple):
    """One generator's part of a batch."""

    places: list[int]  # of its responses in the batch
    rollout: Rollout | None  # None if it has none of them
    num_dropped: int  # responses that all generators have dropped so far


@dataclass(frozen=True)
class Unfinished:
    """Responses that no iteration has learned from: in progress, or waiting in the queue."""

    schedule: Schedule
    responses: list[Begun]

    def as_bytes(self, max_new_tokens: int) -> bytes:
        """Returns a safetensors file."""
        rollout = rollout_of(self.responses, max_new_tokens, pad_id=0)
        return save(
            {
                **rollout.tensors(),
                "numbers_B": torch.tensor([response.number for response in self.responses]),
                "seeds_B": torch.tensor([response.seed for response in self.responses]),
                "schedule": torch.tensor(list(self.schedule.as_json().encode()), dtype=torch.uint8),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        tensors = load(data)
        numbers, seeds = tensors.pop("numbers_B").tolist(), tensors.pop("seeds_B").tolist()
        schedule = Schedule.from_json(bytes(tensors.pop("schedule").tolist()).decode())
        rollout, responses = Rollout(**tensors), list[Begun]()
        for place, (prompt, tokens) in enumerate(zip(*rollout.token_lists(), strict=True)):
            logprobs = rollout.behaviour_logprobs_BR[place, : len(tokens)].tolist()
            digests = rollout.sampled_by_BR[place, : len(tokens)].tolist()
            drawn_by = {first: digest for first, digest in enumerate(digests) if [digest] != digests[first - 1 : first]}
            row, is_finished = int(rollout.prompt_rows_B[place]), bool(rollout.finished_B[place])
            response = Begun(numbers[place], prompt, seeds[place], tokens, logprobs, is_finished, row, drawn_by)
            responses.append(response)
        return cls(schedule, responses)


class Rounds:
    """The responses of one generator, and the schedule that all generators share.

    Generator g of G has rows g, g + G, g + 2 G, ...
    """

    def __init__(
        self,
        schedule: Schedule,
        seed_of: Callable[[int], int],
        generator: int,
        num_generators: int,
        union: Callable[[Sequence[int]], Sequence[int]],
        *,
        round_tokens: int,
        max_new_tokens: int,
        temperature: float,
        pad_id: int,
    ) -> None:
        """`seed_of` returns the seed of a response by its number. `union` returns the rows that any generator passes;
        all of them call it together.
        """
        self.schedule, self._seed_of, self._union = schedule, seed_of, union
        self.round_tokens, self.max_new_tokens = round_tokens, max_new_tokens
        self.temperature, self.pad_id = temperature, pad_id
        self._generator, self._num_generators = generator, num_generators
        self._prompts: dict[int, GroupPrompt] = {}  # by group: of those that have not begun
        self._responses: dict[int, Begun] = {}  # by number: of this generator, until they are handed over
        self._version = -1
        self._before = self._unfinished()

    def sample(self, sampler: HeedSampler, version: int, digest: int, prompts: Mapping[int, GroupPrompt]) -> Part:
        """Sample with the present weights until the queue has a batch, and take it.

        `version` is the iteration that started with these weights, and `digest` identifies them. `prompts` are those of
        further groups, enough of them for all that may begin.
        """
        self._prompts |= prompts
        if version != self._version:
            self._version, self._before = version, self._unfinished()
        schedule, own = self.schedule, self._in_progress()
        for response in own.values():
            response.drawn_by[len(response.tokens)] = digest
        again = list(own.values())

        def next_round(ended: Sequence[Partial]) -> Sequence[Partial] | None:
            rows = {response.number: row for row, response in own.items()}
            ended_rows = [rows[response.number] for response in ended]
            for row in ended_rows:
                del own[row]
            for number in schedule.end(self._union(ended_rows)):
                self._responses.pop(number, None)
            if schedule.has_batch:
                return None
            entering = [*again]
            again.clear()
            for row, number in schedule.begin(version):
                if self._is_own(row):
                    own[row] = self._responses[number] = self._begun(number, digest)
                    entering.append(own[row])
            return entering

        if not schedule.has_batch:
            held = [*(prompt for _, prompt in self._prompts.values()), *(response.prompt for response in again)]
            sampler.sample_in_rounds(
                next_round,
                num_steps=self.round_tokens,
                num_rows=sum(map(self._is_own, range(schedule.num_rows))),
                num_columns=max(map(len, held)) + self.max_new_tokens,
                max_new_tokens=self.max_new_tokens,
                temperature=self.temperature,
            )
        self._prompts = {group: prompt for group, prompt in self._prompts.items() if group >= schedule.next_group}
        return self._take()

    def unfinished(self, version: int) -> Unfinished:
        """Returns this generator's responses as they were when the weights of this version began to sample."""
        return self._before if version == self._version else self._unfinished()

    def restore(self, found: Unfinished) -> None:
        """Continue with the responses of a checkpoint, of which this generator takes its share."""
        self.schedule, row_of = found.schedule, {number: row for row, number in enumerate(found.schedule.rows)}
        own = (response for response in found.responses if self._is_own(row_of.get(response.number, response.number)))
        self._responses, self._prompts, self._version = {response.number: response for response in own}, {}, -1

    def _begun(self, number: int, digest: int) -> Begun:
        row, prompt = self._prompts[number // self.schedule.group_size]
        return Begun(number, prompt, self._seed_of(number), prompt_row=row, drawn_by={0: digest})

    def _take(self) -> Part:
        numbers = self.schedule.take()
        places = [place for place, number in enumerate(numbers) if number in self._responses]
        responses = [self._responses.pop(numbers[place]) for place in places]
        rollout = rollout_of(responses, self.max_new_tokens, self.pad_id) if responses else None
        return Part(places, rollout, self.schedule.num_dropped)

    def _in_progress(self) -> dict[int, Begun]:
        """Returns this generator's responses in progress, by row."""
        rows = enumerate(self.schedule.rows)
        return {row: self._responses[number] for row, number in rows if number != FREE and self._is_own(row)}

    def _is_own(self, row: int) -> bool:
        return row % self._num_generators == self._generator

    def _unfinished(self) -> Unfinished:
        return Unfinished(deepcopy(self.schedule), deepcopy([*self._responses.values()]))


def rollout_of(responses: Sequence[Begun], max_new_tokens: int, pad_id: int) -> Rollout:
    """Returns the responses as a rollout, in order."""
    return Rollout.of(
        [response.prompt_row for response in responses],
        [response.prompt for response in responses],
        [response.tokens for response in responses],
        [response.is_finished for response in responses],
        [response.logprobs for response in responses],
        max_new_tokens=max_new_tokens,
        pad_id=pad_id,
        sampled_by=[response.digests for response in responses],
    )


def joined(parts: Iterable[Part]) -> Rollout:
    """Returns the batch that the generators' parts make up."""
    found = [part for part in parts if part.rollout is not None]
    order = torch.tensor([place for part in found for place in part.places]).argsort()
    return Rollout.join([part.rollout for part in found if part.rollout is not None]).rows(order)


class Supply:
    """Passes prompts to the generators before they need them."""

    def __init__(self, config: PPOConfig, prompts: Sequence[Sequence[int]], order: Sampler | Mixture) -> None:
        self.config, self.prompts, self.order = config, prompts, order
        self.num_passed = self.num_batches = 0  # groups and batches

    def of_next_batch(self, num_dropped: int) -> dict[int, GroupPrompt]:
        """Returns the prompts of all groups that may begin before one more batch has ended, without those passed.

        No more groups are in progress than there are rows, and one that has not all begun. While a batch is sampled,
        these may be dropped, and as many in its last round. `num_dropped` counts responses in batches that have ended.
        """
        config, self.num_batches = self.config, self.num_batches + 1
        samples, at_once = config.advantage.samples_per_prompt, config.rows_in_progress + 1
        in_flight = 2 * (config.placement.max_staleness + 1)
        per_batch = config.sampled_batch_size // samples
        end = self.num_batches * per_batch + num_dropped // samples + (in_flight + 1) * at_once
        groups, self.num_passed = range(self.num_passed, end), max(end, self.num_passed)
        rows = {number: self.order.batch(number).tolist() for number in {group // per_batch for group in groups}}
        of_groups = [rows[group // per_batch][group % per_batch] for group in groups]
        return {group: (row, self.prompts[row]) for group, row in zip(groups, of_groups, strict=True)}
