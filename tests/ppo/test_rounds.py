"""A generator's rounds against the simulation of logical time, with an engine that draws no tokens of a model."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lm.generation import NextRound, Partial
from ppo.rollout import Rollout
from ppo.rounds import Rounds, Unfinished
from tests.ppo.test_schedule import Job, Token, plain

LIMIT = 60


class Engine:
    """Draws as many tokens as a response of the job has; the last one is 1."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def sample_in_rounds(self, next_round: NextRound, *, num_steps: int, **_others: object) -> None:
        running, ended = list[Partial](), list[Partial]()
        while (entering := next_round(ended)) is not None:
            running += entering
            for partial in running:
                length = self.job.length_of(partial.number)
                drawn = min(num_steps, length - len(partial.tokens))
                partial.tokens += [0] * drawn
                partial.logprobs += [-float(partial.number)] * drawn
                partial.is_finished = len(partial.tokens) == length
            ended = [partial for partial in running if partial.is_finished]
            running = [partial for partial in running if not partial.is_finished]


@pytest.fixture
def start() -> Callable[[Job], Rounds]:
    def build(job: Job) -> Rounds:
        def union(rows: Sequence[int]) -> Sequence[int]:
            return rows

        return Rounds(
            job.start(), lambda number: number + 7, 0, 1, union, round_tokens=job.round_tokens, max_new_tokens=LIMIT,
            temperature=1.0, pad_id=0,
        )  # fmt: skip

    return build


def sampled(rounds: Rounds, job: Job, batch: int) -> list[Token]:
    """Samples a batch; a version's digest is itself plus 1."""
    version = max(0, batch - job.staleness)
    engine: Any = Engine(job)
    part = rounds.sample(engine, version, version + 1, {group: (group, [9] * (1 + group % 3)) for group in range(1000)})
    rollout = part.rollout
    assert rollout is not None
    assert part.places == list(range(len(rollout)))
    return tokens_of(rollout, job)


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
def test_tokens_have_the_versions_of_the_simulation(start: Callable[[Job], Rounds], job: Job) -> None:
    rounds = start(job)
    assert [sampled(rounds, job, batch) for batch in range(job.num_iterations)] == plain(job)


@pytest.mark.parametrize("job", JOBS, ids=str)
@pytest.mark.parametrize("begun", [False, True], ids=["saved before", "saved while the new weights sample"])
def test_saved_rounds_continue_where_they_were(start: Callable[[Job], Rounds], job: Job, *, begun: bool) -> None:
    rounds, saved_at = start(job), 2
    for batch in range(saved_at + job.staleness + begun):
        sampled(rounds, job, batch)
    data = rounds.unfinished(saved_at).as_bytes(LIMIT)
    continued, expected = start(job), plain(job)
    continued.restore(Unfinished.from_bytes(data))
    for batch in range(saved_at + job.staleness, job.num_iterations):
        assert sampled(continued, job, batch) == expected[batch]
