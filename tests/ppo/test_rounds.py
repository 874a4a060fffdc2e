"""A generator's rounds against the simulation of logical time, with an engine that draws no tokens of a model."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from random import Random
from threading import Condition
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lm.generation import NextRound, Partial
from lm.tensor_parallel import Rendezvous
from ppo.rollout import Rollout
from ppo.rounds import EndedRows, Part, Rounds, Unfinished, joined
from ppo.schedule import Schedule
from tests.examples import examples, share
from tests.ppo.test_schedule import Job, Token, jobs, plain
from training.notices import UnrepeatableError

LIMIT = 60


class Engine:
    """Draws as many tokens as a response of the job has; the last one is 1."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def sample_in_rounds(self, next_round: NextRound, *, num_steps: int, **_others: object) -> None:
        running, ended = list[Partial](), list[Partial]()
        while (entering := next_round(ended)) is not None:
            running += entering
            for one in running:
                length = self.job.length_of(one.number)
                drawn = min(num_steps, length - len(one.tokens))
                one.tokens += [0] * drawn
                one.logprobs += [-float(one.number)] * drawn
                one.is_finished = len(one.tokens) == length
            ended = [one for one in running if one.is_finished]
            running = [one for one in running if not one.is_finished]


Union = Callable[[int, int, list[int]], Sequence[int]]
PROMPTS = {group: (group, [9] * (1 + group % 3)) for group in range(300)}


def alone(_batch: int, _number: int, rows: list[int]) -> Sequence[int]:
    return rows


def rounds_of(job: Job, begun: Unfinished, generator: int = 0, num_generators: int = 1, union: Union = alone) -> Rounds:
    return Rounds(
        begun, {}, lambda number: number + 7, generator, num_generators, union, round_tokens=job.round_tokens,
        max_new_tokens=LIMIT, temperature=1.0, pad_id=0, records_routes=False,
    )  # fmt: skip


def sampled(rounds: Rounds, job: Job, batch: int) -> Part:
    """Samples a generator's part of a batch; a version's digest is itself plus 1."""
    version, engine = max(0, batch - job.staleness), cast(Any, Engine(job))
    return rounds.sample(engine, version, version + 1, PROMPTS)


def tokens_of(rollout: Rollout, job: Job) -> list[Token]:
    """Returns each token with its version; log-probs say which response a row is."""
    found = list[Token]()
    for row, length in enumerate(rollout.response_tokens_B.tolist()):
        number = -int(rollout.behaviour_logprobs_BR[row, 0])
        assert int(rollout.prompt_rows_B[row]) == number // job.group_size
        assert bool(rollout.finished_B[row])
        found += [(number, place, int(rollout.sampled_by_BR[row, place]) - 1) for place in range(length)]
    return found


JOBS = [
    Job(5, 1, 3, 2, 1, 0, 6, 1),
    Job(20, 2, 2, 4, 2, 0, 6, 2),  # more rows than a batch, so several batches may end in one round
    Job(9, 3, 1, 1, 1, 3, 6, 3),
]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_tokens_have_the_versions_of_the_simulation(job: Job) -> None:
    rounds, expected = rounds_of(job, Unfinished(job.start(), [])), plain(job)
    for batch in range(job.num_iterations):
        part = sampled(rounds, job, batch)
        assert part.rollout is not None
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
    written: dict[tuple[int, int], dict[int, list[int]]] = field(default_factory=dict)  # rows, by round and generator
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
            union = partial(self.union, generator, 0.1 if num_losses < 5 else 0.0, events)
            rounds = rounds_of(self.job, left[first], generator, self.num_generators, union)
            try:
                for batch in range(first, self.job.num_iterations):
                    part = sampled(rounds, self.job, batch)
                    if batch == len(parts):
                        parts, left = [*parts, part], [*left, part.left]
                    assert (part.places, part.left) == (parts[batch].places, left[batch + 1])
            except IsLostError:
                num_losses += 1
        return parts

    def union(
        self, generator: int, chance: float, events: Random, batch: int, number: int, rows: list[int]
    ) -> Sequence[int]:
        with self.is_written:
            of_round = self.written.setdefault((batch, number), {})
            assert of_round.setdefault(generator, [*rows]) == rows, "a new process drew other tokens"
            self.is_written.notify_all()
            if events.random() < chance:
                raise IsLostError
            assert self.is_written.wait_for(lambda: len(of_round) == self.num_generators, timeout=60)
            return sorted(row for found in of_round.values() for row in found)


@examples(1_000)  # and ten courses of losses of each in nightly tests: 10,000
@given(job=jobs, num_generators=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_lost_generators_change_no_token_and_no_version(job: Job, num_generators: int, seed: int) -> None:
    expected = plain(job)
    for course in range(round(10 * share)):
        assert Losses(job, min(num_generators, job.num_rows), seed + course).batches() == expected


def test_what_a_generator_wrote_stays_and_is_not_written_differently() -> None:
    """In a store, as between machines. The second generator is lost after its first round and repeats it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    meeting = Rendezvous("127.0.0.1", store.port, 2, timeout_seconds=60)
    with ThreadPoolExecutor() as pool:
        first = EndedRows(meeting, 1, 0, 2)
        rows = pool.submit(lambda: [first.union(0, 1, [4, 0]), first.union(0, 2, [])])
        assert EndedRows(meeting, 1, 1, 2).union(0, 1, [3]) == [0, 3, 4]
        again = EndedRows(meeting, 1, 1, 2)
        assert [again.union(0, 1, [3]), again.union(0, 2, [1])] == [[0, 3, 4], [1]]
        assert rows.result() == [[0, 3, 4], [1]]
    with pytest.raises(UnrepeatableError, match=r"round 2 of batch 0: generator 1 .* in rows \[5\] instead of \[1\]"):
        EndedRows(meeting, 1, 1, 2).union(0, 2, [5])
    again.forget(1)
    assert not store.check(["1 0 1 1"])
    assert store.check(["1 0 1 0"])
