"""One generator's responses in placement `continuous`: begun, continued with newer weights, and handed to learners.

Whatever a generator has left after a batch is known to the driver, so another process can continue from there, with the
same weights and the same rounds.

Shape letters: B responses, R response tokens.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from typing import NamedTuple, Self

import torch
from safetensors.torch import load, save
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lm.generation import Partial
from lm.samplers.heed_engine import HeedSampler
from lm.tensor_parallel import Rendezvous
from ppo.config import PPOConfig
from ppo.placement import Continuous
from ppo.prompts import Mixture
from ppo.rollout import Rollout
from ppo.schedule import FREE, Schedule
from training.notices import UnrepeatableError
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


@dataclass(frozen=True)
class Unfinished:
    """Responses that no iteration has learned from: in progress, or waiting in the queue."""

    schedule: Schedule
    responses: list[Begun]

    def copy(self) -> Self:
        """Returns a copy that further sampling does not change."""
        copied = [
            replace(one, tokens=[*one.tokens], logprobs=[*one.logprobs], drawn_by={**one.drawn_by})
            for one in self.responses
        ]
        return type(self)(deepcopy(self.schedule), copied)

    def shares(self, num_generators: int) -> list[Self]:
        """Split the responses among generators: those in progress by their rows, and those that have ended evenly."""
        row_of = {number: row for row, number in enumerate(self.schedule.rows)}
        owners = [row_of.get(one.number, one.number) % num_generators for one in self.responses]
        of_generator = [
            [one for one, owner in zip(self.responses, owners, strict=True) if owner == generator]
            for generator in range(num_generators)
        ]
        return [type(self)(self.schedule, responses) for responses in of_generator]

    def as_bytes(self, max_new_tokens: int) -> bytes:
        """Returns a safetensors file."""
        rollout = rollout_of(self.responses, max_new_tokens, pad_id=0) if self.responses else None
        return save(
            {
                **(rollout.tensors() if rollout is not None else {}),
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
        responses = list[Begun]()
        if not numbers:
            return cls(schedule, responses)
        rollout = Rollout(**tensors)
        for place, (prompt, tokens) in enumerate(zip(*rollout.token_lists(), strict=True)):
            logprobs = rollout.behaviour_logprobs_BR[place, : len(tokens)].tolist()
            digests = rollout.sampled_by_BR[place, : len(tokens)].tolist()
            drawn_by = {first: digest for first, digest in enumerate(digests) if [digest] != digests[first - 1 : first]}
            row, is_finished = int(rollout.prompt_rows_B[place]), bool(rollout.finished_B[place])
            response = Begun(numbers[place], prompt, seeds[place], tokens, logprobs, is_finished)
            response.prompt_row, response.drawn_by = row, drawn_by
            if rollout.routes_BTLK.numel():
                response.routes = rollout.routes_BTLK[place, : len(prompt) + len(tokens) - 1].clone()
            responses.append(response)
        return cls(schedule, responses)


class Part(NamedTuple):
    """One generator's part of a batch, and what it has left, from which another process can continue."""

    places: list[int]  # of its responses in the batch
    rollout: Rollout | None  # None if it has none of them
    left: Unfinished


class EndedRows:
    """The rows whose responses ended, by round: each generator writes its own and reads those of all.

    They are in a store outside of generators. So if one is lost, the others wait for the round that it has not written,
    and the process that takes its place reads again what they wrote.
    """

    def __init__(self, meeting: Rendezvous, opening: int, generator: int, num_generators: int) -> None:
        """`opening` tells the schedules apart that use the same store one after the other."""
        timeout = timedelta(seconds=meeting.timeout_seconds)
        self._store = TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
        self._opening, self._generator, self._num_generators = opening, generator, num_generators
        self._written: dict[int, list[str]] = {}  # keys, by batch

    def union(self, batch: int, number: int, rows: Sequence[int]) -> list[int]:
        """Returns the rows that any generator writes in this round of a batch, lowest first. Waits for all of them.

        Raises: UnrepeatableError if the process that this one replaces wrote other rows.
        """
        keys = [f"{self._opening} {batch} {number} {one}" for one in range(self._num_generators)]
        own, found = json.dumps(rows), self._store.compare_set(keys[self._generator], "", json.dumps(rows)).decode()
        if found != own:
            raise UnrepeatableError(
                f"round {number} of batch {batch}: generator {self._generator} was replaced and drew other tokens:"
                f" responses end in rows {own} instead of {found}"
            )
        self._written.setdefault(batch, []).append(keys[self._generator])
        return sorted(row for text in self._store.multi_get(keys) for row in json.loads(text))

    def forget(self, num_batches: int) -> None:
        """Remove what this generator wrote in the first batches, which nobody repeats."""
        for batch in [batch for batch in self._written if batch < num_batches]:
            for key in self._written.pop(batch):
                self._store.delete_key(key)


class Rounds:
    """The responses of one generator, and the schedule that all generators share.

    Generator g of G has rows g, g + G, g + 2 G, ...
    """

    def __init__(
        self,
        begun: Unfinished,
        prompts: Mapping[int, GroupPrompt],
        seed_of: Callable[[int], int],
        generator: int,
        num_generators: int,
        union: Callable[[int, int, list[int]], Sequence[int]],
        *,
        round_tokens: int,
        max_new_tokens: int,
        temperature: float,
        pad_id: int,
        records_routes: bool,
    ) -> None:
        """Continue with this generator's responses in `begun`; `prompts` are those of groups that have not begun.

        `seed_of` returns the seed of a response by its number. `union` returns the rows that any generator passes in a
        round of a batch.
        """
        begun = begun.copy()
        self.schedule, self._seed_of, self._union = begun.schedule, seed_of, union
        self.round_tokens, self.max_new_tokens = round_tokens, max_new_tokens
        self.temperature, self.pad_id, self.records_routes = temperature, pad_id, records_routes
        self._generator, self._num_generators = generator, num_generators
        self._prompts = dict(prompts)  # by group
        self._responses = {one.number: one for one in begun.responses}  # of this generator, until they are handed over

    def sample(self, sampler: HeedSampler, version: int, digest: int, prompts: Mapping[int, GroupPrompt]) -> Part:
        """Sample with the present weights until the queue has a batch, and take it.

        `version` is the iteration that started with these weights, and `digest` identifies them. `prompts` are those of
        further groups, enough of them for all that may begin.
        """
        self._prompts |= prompts
        schedule, batch, numbers = self.schedule, self.schedule.num_batches, count()
        again = [self._responses[number] for row, number in enumerate(schedule.rows) if self._is_own(row, number)]
        for response in again:
            response.drawn_by[len(response.tokens)] = digest

        def next_round(ended: Sequence[Partial]) -> Sequence[Partial] | None:
            number = next(numbers)
            if number:
                rows = [schedule.rows.index(response.number) for response in ended]
                for dropped in schedule.end(self._union(batch, number, rows)):
                    self._responses.pop(dropped, None)
            if schedule.has_batch:
                return None
            entering = [self._begun(number, digest) for row, number in schedule.begin(version) if self._is_own(row)]
            self._responses |= {response.number: response for response in entering}
            return entering if number else [*again, *entering]

        if not schedule.has_batch:
            held = [*(prompt for _, prompt in self._prompts.values()), *(response.prompt for response in again)]
            sampler.sample_in_rounds(
                next_round,
                num_steps=self.round_tokens,
                num_rows=sum(map(self._is_own, range(schedule.num_rows))),
                num_columns=max(map(len, held)) + self.max_new_tokens,
                max_new_tokens=self.max_new_tokens,
                temperature=self.temperature,
                records_routes=self.records_routes,
            )
        self._prompts = not_begun(self._prompts, schedule)
        return self._take()

    def _begun(self, number: int, digest: int) -> Begun:
        row, prompt = self._prompts[number // self.schedule.group_size]
        return Begun(number, prompt, self._seed_of(number), prompt_row=row, drawn_by={0: digest})

    def _take(self) -> Part:
        numbers = self.schedule.take()
        places = [place for place, number in enumerate(numbers) if number in self._responses]
        responses = [self._responses.pop(numbers[place]) for place in places]
        rollout = rollout_of(responses, self.max_new_tokens, self.pad_id) if responses else None
        return Part(places, rollout, Unfinished(self.schedule, [*self._responses.values()]).copy())

    def _is_own(self, row: int, number: int = 0) -> bool:
        """Whether this generator has the row, and a response of this number is in it."""
        return number != FREE and row % self._num_generators == self._generator


def not_begun(prompts: Mapping[int, GroupPrompt], schedule: Schedule) -> dict[int, GroupPrompt]:
    """Returns the prompts of groups of which no response has begun, or not all."""
    return {group: prompt for group, prompt in prompts.items() if group >= schedule.next_group}


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
        routes=[response.routes for response in responses] if len(responses[0].routes) else (),
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

    def schedule(self) -> Schedule:
        """Returns the schedule before anything has begun."""
        config, samples, placement = self.config, self.config.advantage.samples_per_prompt, self.config.placement
        assert isinstance(placement, Continuous), f"placement {placement.kind!r}; continuous was expected"
        return Schedule(config.rows_in_progress, samples, config.sampled_batch_size // samples, placement.max_age)

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
