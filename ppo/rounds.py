"""One generator's responses in placement `continuous`: begun, continued with newer weights, and handed to learners.

Whatever a generator has left after a batch is known to the driver, so another process can continue from there, with the
same weights and the same rounds.

The session of conversation n is with generator n modulo their number, whoever has its row. Between two rounds, its
tokens go from one to the other, so every generator has as many rows as any other.

Shape letters: B responses, R response tokens.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import chain, count
from typing import NamedTuple, Self

import torch
from safetensors.torch import load, save
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from files.rows import Row
from lm.generation import Partial
from lm.samplers.heed_engine import HeedSampler
from lm.tensor_parallel import Rendezvous
from lm.tokenizer import Messages
from ppo.config import PPOConfig
from ppo.environments.sessions import Sessions, Talk, Topic
from ppo.placement import Continuous
from ppo.prompts import Mixture
from ppo.rollout import FAILURES, Asked, Rollout
from ppo.schedule import FREE, Schedule
from training.notices import UnrepeatableError
from training.packing import Sampler

NO_ROWS = Schedule(num_rows=0, group_size=1, groups_per_batch=1)
AHEAD = 4  # every so many rows, the session of one more conversation is opened before it begins


class GroupPrompt(NamedTuple):
    """A prompt: its row in the job's prompts, its tokens, and what an environment reads of it."""

    row: int
    tokens: Sequence[int]
    messages: Messages
    fields: Row


@dataclass
class Begun(Talk):
    """A response in parts, with the digest of the weights that drew its tokens, each from its first token on; 0 = an
    environment wrote them.
    """

    prompt_row: int = 0
    drawn_by: dict[int, int] = field(default_factory=dict)

    @property
    def digests(self) -> list[int]:
        """Returns the digest of the weights that drew each token."""
        ends = [*list(self.drawn_by)[1:], len(self.tokens)]
        spans = zip(self.drawn_by.items(), ends, strict=False)  # none before the first token
        return [digest for (first, digest), end in spans for _ in range(end - first)]

    @property
    def num_routed(self) -> int:
        """Number of tokens that had been read, prompt included, when the policy's last one was drawn."""
        written = self.dialogue.written
        return len(self.prompt) - 1 + len(written) - (written[::-1].index(True) if any(written) else len(written))


@dataclass(frozen=True)
class Unfinished:
    """Responses that no iteration has learned from: in progress, or waiting in the queue."""

    schedule: Schedule
    responses: list[Begun]

    def copy(self) -> Self:
        """Returns a copy that further sampling does not change."""
        copied = [
            replace(
                one,
                tokens=[*one.tokens],
                logprobs=[*one.logprobs],
                drawn_by={**one.drawn_by},
                written=[*one.written],
                rewards=[*one.rewards],
            )
            for one in self.responses
        ]
        return type(self)(deepcopy(self.schedule), copied)

    def without_failures(self, most: float) -> Self:
        """Returns all if at most so many responses have failed; otherwise without their groups, of which a resumed run
        could not learn.
        """
        failed = [one.number // self.schedule.group_size for one in self.responses if one.failure]
        if len(failed) <= most:
            return self
        found = self.copy()
        found.schedule.leave_out(set(failed))
        left = [one for one in found.responses if one.number // found.schedule.group_size not in failed]
        return type(self)(found.schedule, left)

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
            response.written = rollout.written_BR[place, : len(tokens)].tolist()
            response.rewards = rollout.turn_rewards_BR[place, : len(tokens)].tolist()
            response.failure = FAILURES[int(rollout.failure_B[place])]
            if rollout.routes_BTLK.numel():
                response.routes = rollout.routes_BTLK[place, : response.num_routed].clone()
            responses.append(response)
        return cls(schedule, responses)


class Work(NamedTuple):
    """What a generator did until a batch was there."""

    num_drawn: int = 0  # tokens
    num_possible: int = 0  # tokens that its rows would have drawn if none had ended within a round
    num_reread: int = 0  # tokens of begun responses, prompts included, that were read with newer weights
    waited_seconds: float = 0.0  # before, for these weights


class Part(NamedTuple):
    """One generator's part of a batch, and what it has left, from which another process can continue."""

    places: list[int]  # of its responses in the batch
    rollout: Rollout | None  # None if it has none of them
    left: Unfinished
    work: Work = Work()


class Exchange:
    """What happened in rounds: each generator writes what happened to its responses and reads what did to all, and
    conversations go from one to another.

    This is in a store outside of generators. So if one is lost, the others wait for the round that it has not written,
    and the process that takes its place reads again what they wrote.
    """

    def __init__(
        self, opening: int = 0, generator: int = 0, num_generators: int = 1, meeting: Rendezvous | None = None
    ) -> None:
        """`opening` tells the schedules apart that use the same store one after the other. A lone generator needs no
        `meeting`.
        """
        self.generator, self.num_generators, self._opening = generator, num_generators, opening
        if meeting is not None:
            timeout = timedelta(seconds=meeting.timeout_seconds)
            self._store = TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
        self._written: dict[int, list[str]] = {}  # keys, by batch

    def union(self, batch: int, number: int, responses: Sequence[int]) -> list[int]:
        """Returns the responses that any generator writes in this round of a batch, lowest first. Waits for all.

        Raises: UnrepeatableError if the process that this one replaces wrote other responses.
        """
        if self.num_generators == 1:
            return sorted(responses)
        keys = [f"{self._opening} {batch} {number} {one}" for one in range(self.num_generators)]
        own = json.dumps(responses)
        found = self._store.compare_set(keys[self.generator], "", own).decode()
        if found != own:
            raise UnrepeatableError(
                f"round {number} of batch {batch}: generator {self.generator} was replaced and drew other tokens:"
                f" responses {own} end instead of {found}"
            )
        self._written.setdefault(batch, []).append(keys[self.generator])
        return sorted(response for text in self._store.multi_get(keys) for response in json.loads(text))

    def give(self, batch: int, number: int, conversation: int, data: bytes) -> None:
        """Write a conversation for the generator that has its session, or its row, after this round.

        Raises: UnrepeatableError if the process that this one replaces wrote another.
        """
        key = self._key(batch, number, conversation)
        if self._store.check([key]) and self._store.get(key) != data:
            raise UnrepeatableError(
                f"round {number} of batch {batch}: generator {self.generator} was replaced, and conversation"
                f" {conversation} has other tokens: its environment does not repeat its replies"
            )
        self._store.set(key, data)  # type: ignore[arg-type]  # it takes bytes too
        self._written.setdefault(batch, []).append(key)

    def take(self, batch: int, number: int, conversation: int) -> bytes:
        """Wait for a conversation, and return it."""
        found: bytes = self._store.get(self._key(batch, number, conversation))
        return found

    def _key(self, batch: int, number: int, conversation: int) -> str:
        return f"{self._opening} {batch} {number} conversation {conversation}"

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
        exchange: Exchange,
        sessions: Sessions | None = None,
        *,
        round_tokens: int,
        max_new_tokens: int,
        max_prompt_tokens: int,
        temperature: float,
        pad_id: int,
        records_routes: bool,
    ) -> None:
        """Continue with this generator's responses in `begun`; `prompts` are those of groups in progress, and of those
        that have not begun.

        `seed_of` returns the seed of a response by its number. `max_prompt_tokens` bounds prompts that `sessions`, of
        conversations, begin with messages of their own; 0 = they do not.
        """
        begun = begun.copy()
        self.schedule, self.sessions, self._seed_of, self._exchange = begun.schedule, sessions, seed_of, exchange
        self.round_tokens, self.max_new_tokens, self.max_prompt_tokens = round_tokens, max_new_tokens, max_prompt_tokens
        self.temperature, self.pad_id, self.records_routes = temperature, pad_id, records_routes
        self._prompts = dict(prompts)  # by group
        self._responses = {one.number: one for one in begun.responses}  # of this generator, until they are handed over
        self._round = (0, 0)  # batch, and number of the round in it

    def sample(self, sampler: HeedSampler, version: int, digest: int, prompts: Mapping[int, GroupPrompt]) -> Part:
        """Sample with the present weights until the queue has a batch, and take it.

        `version` is the iteration that started with these weights, and `digest` identifies them. `prompts` are those of
        further groups, enough of them for all that may begin.
        """
        self._prompts |= prompts
        schedule, numbers = self.schedule, count()
        again = [self._responses[number] for row, number in enumerate(schedule.rows) if self._is_own(row, number)]
        for waiting in filter(self._is_home, chain(*schedule.answered)):
            self._ask(waiting)  # unless this process has

        in_rows, work = dict[int, tuple[Partial, int]](), Work()  # each response, and its tokens when it entered

        def count_drawn(responses: Iterable[Partial]) -> int:
            return sum(len(response.tokens) - in_rows.pop(response.number)[1] for response in [*responses])

        def next_round(ended: Sequence[Partial]) -> Sequence[Partial] | None:
            nonlocal work
            self._round = schedule.num_batches, (number := next(numbers))
            work = work._replace(num_drawn=work.num_drawn + count_drawn(ended))
            if number:
                self._end_round([response.number for response in ended])
            if schedule.has_batch:
                return None
            entering = [*([] if number else again), *self._enter(version)]
            for response in entering:
                response.drawn_by[len(response.tokens)] = digest
                in_rows[response.number] = response, len(response.tokens)
            reread = sum(len(response.prompt) + len(response.tokens) for response in entering if response.tokens)
            possible = work.num_possible + num_rows * self.round_tokens
            work = work._replace(num_reread=work.num_reread + reread, num_possible=possible)
            return entering

        num_rows = sum(map(self._is_own, range(schedule.num_rows)))
        if not schedule.has_batch:
            longest = max(len(prompt.tokens) for prompt in self._prompts.values())
            sampler.sample_in_rounds(
                next_round,
                num_steps=self.round_tokens,
                num_rows=num_rows,
                num_columns=max(longest, self.max_prompt_tokens) + self.max_new_tokens,
                max_new_tokens=self.max_new_tokens,
                temperature=self.temperature,
                records_routes=self.records_routes,
            )
        self._prompts = still_needed(self._prompts, schedule)
        drawn = work.num_drawn + count_drawn(response for response, _ in in_rows.values())
        return self._take()._replace(work=work._replace(num_drawn=drawn))

    def _end_round(self, ended: Sequence[int]) -> None:
        """Take what happened in a round to responses of all generators; `ended` are those in own rows."""
        schedule, happened = self.schedule, [*ended]
        if self.sessions is not None:
            for number in ended:
                (self._ask if self._is_home(number) else self._give)(number)
            happened += self._over([number for number in schedule.due if self._is_home(number)], self.sessions)
        happened = self._exchange.union(*self._round, happened)
        if self.sessions is not None:
            for number in filter(self._is_home, set(schedule.rows).intersection(happened) - set(ended)):
                self._receive(number)
                self._ask(number)
        for dropped in schedule.end(happened):
            self._responses.pop(dropped, None)

    def _over(self, due: Sequence[int], sessions: Sessions) -> list[int]:
        """Wait for the answers that are due. Returns the conversations that are over."""
        over = list[int]()
        for number in due:
            response = self._responses[number]
            answer, failure = sessions.answer(number)
            response.drawn_by |= {len(response.tokens): 0} if answer.tokens else {}
            response.take(answer, failure)
            if answer.is_over:
                sessions.forget(number)
                over.append(number)
        return over

    def _enter(self, version: int) -> list[Begun]:
        """Let responses enter all rows. Returns those in own rows."""
        schedule = self.schedule
        entered = schedule.begin(version)
        own = [number for row, number in entered if self._is_own(row)]
        if self.sessions is None:
            self._responses |= {number: self._begun(number) for number in own}
        else:
            new = [number for _, number in entered if self._is_home(number) and number not in self._responses]
            ahead = range(schedule.next, schedule.next + schedule.num_rows // AHEAD)
            for number in [*new, *filter(self._is_home, ahead)]:
                if number // schedule.group_size in self._prompts:
                    self.sessions.open(number, self._topic(number))
            for number in new:
                self._responses[number] = self._begun(number, *self.sessions.prompt(number))
            for number in (number for row, number in entered if self._is_home(number) and not self._is_own(row)):
                self._give(number)
            for number in own:
                self._receive(number)
        return [self._responses[number] for number in own]

    def _begun(self, number: int, prompt: Sequence[int] = (), failure: str = "") -> Begun:
        of_group = self._prompts[number // self.schedule.group_size]
        return Begun(number, prompt or of_group.tokens, self._seed_of(number), prompt_row=of_group.row, failure=failure)

    def _topic(self, number: int) -> Topic:
        prompt = self._prompts[number // self.schedule.group_size]
        return Topic(prompt.messages, prompt.fields, prompt.tokens, self._seed_of(number))

    def _ask(self, number: int) -> None:
        """Let the environment answer a conversation's last turn, if it has not been asked for that."""
        if self.sessions is not None:
            self.sessions.ask(number, self._topic(number), self._responses[number].end_turn())

    def _give(self, number: int) -> None:
        data = Unfinished(NO_ROWS, [self._responses.pop(number)]).as_bytes(self.max_new_tokens)
        self._exchange.give(*self._round, number, data)

    def _receive(self, number: int) -> None:
        """Take a conversation from the generator that has it, if that is another."""
        if number not in self._responses:
            (found,) = Unfinished.from_bytes(self._exchange.take(*self._round, number)).responses
            self._responses[number] = found

    def _take(self) -> Part:
        numbers = self.schedule.take()
        places = [place for place, number in enumerate(numbers) if number in self._responses]
        responses = [self._responses.pop(numbers[place]) for place in places]
        seconds = 0.0 if self.sessions is None else self.sessions.take_seconds()
        rollout = rollout_of(responses, self.max_new_tokens, self.pad_id, seconds) if responses else None
        return Part(places, rollout, Unfinished(self.schedule, [*self._responses.values()]).copy())

    def _is_own(self, row: int, number: int = 0) -> bool:
        """Whether this generator has the row, and a response of this number is in it."""
        return number != FREE and row % self._exchange.num_generators == self._exchange.generator

    def _is_home(self, number: int) -> bool:
        """Whether this generator has the session of a conversation."""
        return self._is_own(number)


def still_needed(prompts: Mapping[int, GroupPrompt], schedule: Schedule) -> dict[int, GroupPrompt]:
    """Returns the prompts of groups in progress, and of those of which no response has begun, or not all."""
    return {
        group: prompt for group, prompt in prompts.items() if group >= schedule.next_group or group in schedule.running
    }


def rollout_of(responses: Sequence[Begun], max_new_tokens: int, pad_id: int, seconds: float = 0.0) -> Rollout:
    """Returns the responses as a rollout, in order. `seconds` were spent waiting for environments."""
    return Rollout.of(
        [response.prompt_row for response in responses],
        [response.prompt for response in responses],
        [response.tokens for response in responses],
        [response.is_finished for response in responses],
        [response.logprobs for response in responses],
        max_new_tokens=max_new_tokens,
        pad_id=pad_id,
        sampled_by=[response.digests for response in responses],
        dialogues=[response.dialogue for response in responses],
        environment_seconds=seconds,
        routes=[response.routes for response in responses] if len(responses[0].routes) else (),
    )


def joined(parts: Iterable[Part]) -> Rollout:
    """Returns the batch that the generators' parts make up."""
    found = [part for part in parts if part.rollout is not None]
    order = torch.tensor([place for part in found for place in part.places]).argsort()
    return Rollout.join([part.rollout for part in found if part.rollout is not None]).rows(order)


class Supply:
    """Passes prompts to the generators before they need them."""

    def __init__(
        self, config: PPOConfig, prompts: Sequence[Sequence[int]], order: Sampler | Mixture, asked: Asked
    ) -> None:
        self.config, self.prompts, self.order, self.asked = config, prompts, order, asked
        self.num_passed = self.num_batches = 0  # groups and batches

    def schedule(self) -> Schedule:
        """Returns the schedule before anything has begun."""
        config, samples = self.config, self.config.advantage.samples_per_prompt
        per_batch, placement = config.sampled_batch_size // samples, config.placement
        assert isinstance(placement, Continuous), f"placement {placement.kind!r}; continuous was expected"
        return Schedule(config.rows_in_progress, samples, per_batch, placement.max_age, config.answer_rounds)

    def prompt(self, row: int) -> GroupPrompt:
        asked = self.asked.of([row])
        messages, fields = asked.conversations[0] if asked.conversations else (), asked.rows[0] if asked.rows else {}
        return GroupPrompt(row, self.prompts[row], messages, fields)

    def of_next_batch(self, num_dropped: int) -> dict[int, GroupPrompt]:
        """Returns the prompts of all groups that may begin before one more batch has ended, without those passed.

        No more groups are in progress than there are rows, with those whose conversations wait for answers, and one
        that has not all begun. While a batch is sampled, these may be dropped, and as many in its last round.
        `num_dropped` counts responses in batches that have ended.
        """
        config, self.num_batches = self.config, self.num_batches + 1
        samples, at_once = config.advantage.samples_per_prompt, config.rows_in_progress * (1 + config.answer_rounds) + 1
        in_flight = 2 * (config.placement.max_staleness + 1)
        per_batch = config.sampled_batch_size // samples
        end = self.num_batches * per_batch + num_dropped // samples + (in_flight + 1) * at_once
        groups, self.num_passed = range(self.num_passed, end), max(end, self.num_passed)
        rows = {number: self.order.batch(number).tolist() for number in {group // per_batch for group in groups}}
        of_groups = [rows[group // per_batch][group % per_batch] for group in groups]
        return {group: self.prompt(row) for group, row in zip(groups, of_groups, strict=True)}
