"""A generator's rounds against the simulation of logical time, with an engine that draws no tokens of a model."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from threading import Condition
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lm.generation import NextRound, Partial
from lm.tensor_parallel import Rendezvous
from ppo.environments.sessions import Answer, Topic, Turns
from ppo.rollout import Rollout
from ppo.rounds import Exchange, GroupPrompt, Part, Rounds, Unfinished, joined
from ppo.schedule import Schedule
from tests.examples import examples, share
from tests.ppo.test_schedule import Job, Token, jobs, plain
from training.notices import UnrepeatableError

LIMIT = 60
WAIT_SECONDS = 60  # for other threads, which take milliseconds


class Engine:
    """Draws as many tokens as a turn of the job has."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def sample_in_rounds(self, next_round: NextRound, *, num_steps: int, **_others: object) -> None:
        running, ended = list[Partial](), list[Partial]()
        while (entering := next_round(ended)) is not None:
            running += entering
            for one in running:
                end = self.job.turn_end(one.number, len(one.tokens))
                drawn = min(num_steps, end - len(one.tokens))
                one.tokens += [0] * drawn
                one.logprobs += [-float(one.number)] * drawn
                one.is_finished = len(one.tokens) == end
            ended = [one for one in running if one.is_finished]
            running = [one for one in running if not one.is_finished]


class Environment:
    """Sessions of one process, each answer of which takes a time that `speeds` draws. They are lost with it."""

    def __init__(self, job: Job, speeds: Random) -> None:
        self.job, self.speeds = job, speeds
        self.opened, self.asked = set[int](), dict[int, Future[Answer]]()

    def open(self, number: int, topic: Topic) -> None:
        assert topic.seed == number + 7
        self.opened.add(number)

    def prompt(self, number: int) -> tuple[Sequence[int], str]:
        assert number in self.opened
        return [9, number], ""

    def ask(self, number: int, _topic: Topic, turns: Turns) -> None:
        if number not in self.asked:
            delay, places = self.speeds.choice([0.0, 0.0, 0.0, 0.0005]), self.job.turns_of(number)
            assert list(turns.prompt) == [9, number]
            assert [range(own.start, own.stop) for own in turns.parts()[::2]] == places[: (len(turns.parts()) + 1) // 2]
            self.asked[number] = POOL.submit(self._answer, number, len(turns.tokens), delay)

    def _answer(self, number: int, num_tokens: int, delay: float) -> Answer:
        time.sleep(delay)
        is_over = (end := self.job.reply_end(number, num_tokens)) == num_tokens
        return Answer([5] * (end - num_tokens), 0.5, is_over, is_over)

    def answer(self, number: int) -> tuple[Answer, str]:
        return self.asked.pop(number).result(), ""

    def forget(self, number: int) -> None:
        assert number not in self.asked

    def take_seconds(self) -> float:
        return 0.0


POOL = ThreadPoolExecutor(8)
PROMPTS = {group: GroupPrompt(group, [9] * (1 + group % 3), (), {}) for group in range(600)}


def rounds_of(job: Job, begun: Unfinished, exchange: Any = None, speeds: Random | None = None) -> Rounds:
    sessions = cast(Any, Environment(job, speeds or Random(0))) if job.answer_rounds else None
    return Rounds(
        begun, PROMPTS, lambda number: number + 7, exchange or Exchange(), sessions, round_tokens=job.round_tokens,
        max_new_tokens=LIMIT, max_prompt_tokens=0, temperature=1.0, pad_id=0, records_routes=False,
    )  # fmt: skip


def sampled(rounds: Rounds, job: Job, batch: int) -> Part:
    """Samples a generator's part of a batch; a version's digest is itself plus 1."""
    version, engine = max(0, batch - job.staleness), cast(Any, Engine(job))
    return rounds.sample(engine, version, version + 1, PROMPTS)  # all of them, of which a job passes some


def tokens_of(rollout: Rollout, job: Job) -> list[Token]:
    """Returns each token with its version; log-probs say which response a row is."""
    found = list[Token]()
    for row, length in enumerate(rollout.response_tokens_B.tolist()):
        number = -int(rollout.behaviour_logprobs_BR[row, 0])
        assert int(rollout.prompt_rows_B[row]) == number // job.group_size
        assert bool(rollout.finished_B[row])
        assert rollout.num_turns_B[row] == len(job.turns_of(number))
        assert rollout.turn_rewards_BR[row].sum() == 0.5 * len(job.turns_of(number)) * bool(job.answer_rounds)
        found += [(number, place, int(rollout.sampled_by_BR[row, place]) - 1) for place in range(length)]
    return found


JOBS = [
    Job(5, 1, 3, 2, 1, 0, 6, 1),
    Job(20, 2, 2, 4, 2, 0, 6, 2),  # more rows than a batch, so several batches may end in one round
    Job(9, 3, 1, 1, 1, 3, 6, 3),
    Job(7, 2, 2, 2, 1, 0, 6, 4, answer_rounds=2),
]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_tokens_have_the_versions_of_the_simulation(job: Job) -> None:
    rounds, expected, drawn, learned = rounds_of(job, Unfinished(job.start(), [])), plain(job), 0, 0
    for batch in range(job.num_iterations):
        part = sampled(rounds, job, batch)
        assert part.rollout is not None
        drawn, learned = drawn + part.work.num_drawn, learned + int(part.rollout.response_tokens_B.sum())
        if not job.answer_rounds:
            assert part.work.num_drawn <= part.work.num_possible
            assert job.max_age or drawn == learned + sum(len(one.tokens) for one in part.left.responses)
        assert part.places == list(range(len(part.rollout)))
        assert tokens_of(part.rollout, job) == expected[batch]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_saved_rounds_continue_where_they_were(job: Job) -> None:
    rounds, saved_at = rounds_of(job, Unfinished(job.start(), [])), 2 + job.staleness
    left = [sampled(rounds, job, batch).left for batch in range(saved_at)][-1]
    sampled(rounds, job, saved_at)  # changes nothing of what was handed over
    continued, expected = rounds_of(job, Unfinished.from_bytes(left.as_bytes(LIMIT))), plain(job)
    for batch in range(saved_at, job.num_iterations):
        assert tokens_of(joined([sampled(continued, job, batch)]), job) == expected[batch]


def test_nothing_unfinished_is_saved_too() -> None:
    """If all responses in progress end in the round that completes a batch."""
    nothing = Unfinished(Schedule(num_rows=2, group_size=1, groups_per_batch=2, next=2, num_batches=1), [])
    assert Unfinished.from_bytes(nothing.as_bytes(LIMIT)) == nothing


class IsLostError(Exception):
    """Ends a generator's process."""


@dataclass
class Losses:
    """Generators, each in a thread, of which any is lost in the middle of rounds, and again while it repeats its work.

    When one is lost is a function of `seed`, not of which thread is faster.
    """

    job: Job
    num_generators: int
    seed: int
    written: dict[tuple[int, int], dict[int, list[int]]] = field(default_factory=dict)  # by round and generator
    given: dict[tuple[int, int, int], bytes] = field(default_factory=dict)  # conversations, by round
    is_written: Condition = field(default_factory=Condition)

    def batches(self) -> list[list[Token]]:
        begun = Unfinished(self.job.start(), []).shares(self.num_generators)
        with ThreadPoolExecutor(self.num_generators) as pool:
            parts = [*pool.map(self.run, range(self.num_generators), begun)]
        return [tokens_of(joined(of_batch), self.job) for of_batch in zip(*parts, strict=True)]

    def run(self, generator: int, begun: Unfinished) -> list[Part]:
        """Returns a generator's part of each batch. A new process begins where the driver has collected batches."""
        parts, left, num_losses = list[Part](), [begun], 0
        while len(parts) < self.job.num_iterations:
            events = Random(f"{self.seed} {generator} {num_losses}")
            first = max(0, len(parts) - events.randint(0, self.job.staleness))
            exchange = Losing(self, generator, 0.1 if num_losses < 5 else 0.0, events)
            rounds = rounds_of(self.job, left[first], exchange, events)
            try:
                for batch in range(first, self.job.num_iterations):
                    part = sampled(rounds, self.job, batch)
                    if batch == len(parts):
                        parts, left = [*parts, part], [*left, part.left]
                    assert (part.places, part.left) == (parts[batch].places, left[batch + 1])
            except IsLostError:
                num_losses += 1
        return parts


@dataclass
class Losing:
    """What a generator of `Losses` exchanges, which loses it now and then."""

    losses: Losses
    generator: int
    chance: float
    events: Random

    @property
    def num_generators(self) -> int:
        return self.losses.num_generators

    def _maybe_lost(self) -> None:
        if self.events.random() < self.chance:
            raise IsLostError

    def union(self, batch: int, number: int, responses: list[int]) -> list[int]:
        with self.losses.is_written:
            of_round = self.losses.written.setdefault((batch, number), {})
            assert of_round.setdefault(self.generator, [*responses]) == responses, "a new process drew other tokens"
            self.losses.is_written.notify_all()
            self._maybe_lost()
            assert self.losses.is_written.wait_for(lambda: len(of_round) == self.num_generators, timeout=WAIT_SECONDS)
            return sorted(response for found in of_round.values() for response in found)

    def give(self, batch: int, number: int, conversation: int, data: bytes) -> None:
        with self.losses.is_written:
            assert self.losses.given.setdefault((batch, number, conversation), data) == data
            self.losses.is_written.notify_all()
            self._maybe_lost()

    def take(self, batch: int, number: int, conversation: int) -> bytes:
        with self.losses.is_written:
            key = (batch, number, conversation)
            assert self.losses.is_written.wait_for(lambda: key in self.losses.given, timeout=WAIT_SECONDS)
            return self.losses.given[key]


@pytest.mark.long
@pytest.mark.timeout(2400)  # of nightly tests on a busy machine
@examples(1_000)  # and ten courses of losses of each in nightly tests: 10,000
@given(job=jobs, num_generators=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_losses_and_slow_environments_change_no_token_and_no_version(job: Job, num_generators: int, seed: int) -> None:
    expected = plain(job)
    for course in range(round(10 * share)):
        assert Losses(job, min(num_generators, job.num_rows), seed + course).batches() == expected


def test_what_a_generator_wrote_stays_and_is_not_written_differently() -> None:
    """In a store, as between machines. The second generator is lost after its first round and repeats it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    meeting = Rendezvous("127.0.0.1", store.port, 2, timeout_seconds=60)
    with ThreadPoolExecutor() as pool:
        first = Exchange(1, 0, 2, meeting)
        rows = pool.submit(lambda: [first.union(0, 1, [4, 0]), first.union(0, 2, [])])
        assert Exchange(1, 1, 2, meeting).union(0, 1, [3]) == [0, 3, 4]
        again = Exchange(1, 1, 2, meeting)
        assert [again.union(0, 1, [3]), again.union(0, 2, [1])] == [[0, 3, 4], [1]]
        assert rows.result() == [[0, 3, 4], [1]]
    with pytest.raises(UnrepeatableError, match=r"round 2 of batch 0: generator 1 .* \[5\] end instead of \[1\]"):
        Exchange(1, 1, 2, meeting).union(0, 2, [5])
    first.give(0, 2, 7, b"\x00\xff")
    first.give(0, 2, 7, b"\x00\xff")
    assert again.take(0, 2, 7) == b"\x00\xff"
    with pytest.raises(UnrepeatableError, match=r"conversation 7 has other tokens: its environment does not repeat"):
        Exchange(1, 0, 2, meeting).give(0, 2, 7, b"\x01")
    again.forget(1)
    assert not store.check(["1 0 1 1"])
    assert store.check(["1 0 1 0"])
