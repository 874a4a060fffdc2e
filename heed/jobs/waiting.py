"""How long generators and learners of PPO wait for each other, by a simulation of iterations.

Each decoding step and each iteration's learning takes the time that `heed.jobs.times` gives it; what waits for what
follows the placement; continuous sampling uses its own schedule.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from random import Random
from typing import Self

from heed.jobs.memory import Counts
from heed.jobs.times import Times
from ppo.config import PPOConfig
from ppo.placement import Continuous
from ppo.plan import PPOIteration
from ppo.schedule import FREE, Schedule

NUM_ITERATIONS, LEFT_OUT = 20, 8  # the first ones, for which nothing was sampled ahead, are not counted


@dataclass(frozen=True)
class Speeds:
    """The parts of a simulated iteration. Generators are teams, each of which samples `at_once` responses at a time.
    All functions return seconds: `step` of a decoding step with that many rows, `read` of a team's reading that many
    tokens, and `learn` of learning from responses with that many tokens.
    """

    num_teams: int
    at_once: int
    prompt_tokens: float
    step: Callable[[int], float]
    read: Callable[[float], float]
    learn: Callable[[int], float]

    @classmethod
    def of(cls, work: PPOIteration, policy: Counts, times: Times, at_once: int, learning: float) -> Self:
        """`learning` is the seconds of an iteration whose responses have the mean length."""
        mean, prompt_tokens = work.lengths.mean, work.lengths.mean - work.responses.mean
        team = work.config.sampler.tensor_parallel_size

        @cache
        def step(rows: int) -> float:
            return times.decoding_step(policy, rows, round(mean), team)

        return cls(
            (work.config.placement.num_generators or times.layout.ranks) // team,
            at_once,
            prompt_tokens,
            step,
            lambda tokens: times.prefill(policy, tokens, round(mean), team),
            lambda tokens: learning * (tokens / work.config.sampled_batch_size + prompt_tokens) / mean,
        )


@dataclass(frozen=True)
class Waiting:
    """Seconds of an iteration, and the shares of it in which generators and learners wait for each other or for the
    longest responses. Ranks that do both take turns, and have one share.
    """

    seconds: float
    shares: Mapping[str, float]

    def __str__(self) -> str:
        return ", ".join(f"{who} {share:.0%}" for who, share in self.shares.items())


@dataclass
class _Course:
    """The times at which iterations were sampled and learned from, and the seconds that both sides worked for each."""

    sampled: list[float] = field(default_factory=lambda: [0.0])
    learned: list[float] = field(default_factory=lambda: [0.0])
    sampling: list[float] = field(default_factory=list)
    learning: list[float] = field(default_factory=list)

    def start(self, iteration: int, max_staleness: int) -> float:
        """Returns when an iteration's sampling begins: with weights that are `max_staleness` iterations old."""
        return max(self.sampled[-1], self.learned[max(0, iteration - max_staleness)])

    def add(self, sampled: float, sampling: float, learning: float) -> None:
        self.sampled.append(sampled)
        self.learned.append(max(sampled, self.learned[-1]) + learning)
        self.sampling.append(sampling)
        self.learning.append(learning)

    def waiting(self, *, share_ranks: bool) -> Waiting:
        seconds = self.learned[-1] - self.learned[LEFT_OUT]
        sampling, learning = (sum(worked[LEFT_OUT:]) / seconds for worked in (self.sampling, self.learning))
        worked = {"workers": sampling + learning} if share_ranks else {"generators": sampling, "learners": learning}
        shares = {who: max(0.0, 1 - share) for who, share in worked.items()}
        return Waiting(seconds / (NUM_ITERATIONS - LEFT_OUT), shares)


def simulate(work: PPOIteration, speeds: Speeds) -> Waiting:
    """Returns what iterations of the job's placement take on average."""
    config, responses, chance, course = work.config, work.responses, Random(0), _Course()
    if isinstance(config.placement, Continuous):
        _sample_rounds(config, config.placement, speeds, lambda: responses.draw(1, chance)[0], course)
        return course.waiting(share_ranks=False)
    for iteration in range(NUM_ITERATIONS):
        lengths = responses.draw(config.sampled_batch_size, chance)
        by_team = [_rollout_seconds(lengths[team :: speeds.num_teams], speeds) for team in range(speeds.num_teams)]
        sampled = course.start(iteration, config.placement.max_staleness) + max(by_team)
        course.add(sampled, sum(by_team) / speeds.num_teams, speeds.learn(sum(lengths)))
    return course.waiting(share_ranks=config.placement.roles_share_ranks)


def _rollout_seconds(lengths: Sequence[int], speeds: Speeds) -> float:
    """Returns the seconds in which a team samples responses, each as soon as a row is free."""
    ends, changes = [0] * min(speeds.at_once, len(lengths)), Counter[int]()
    for length in lengths:
        begins = heapq.heappop(ends)
        heapq.heappush(ends, begins + length)
        changes[begins] += 1
        changes[begins + length] -= 1
    rows, seconds = 0, speeds.read(len(lengths) * speeds.prompt_tokens)
    for begins, ends_at in pairwise(sorted(changes)):
        rows += changes[begins]
        seconds += (ends_at - begins) * speeds.step(rows)
    return seconds


def _sample_rounds(
    config: PPOConfig, placement: Continuous, speeds: Speeds, draw: Callable[[], int], course: _Course
) -> None:
    group_size = config.advantage.samples_per_prompt
    num_groups = config.sampled_batch_size // group_size
    schedule = Schedule(config.rows_in_progress, group_size, num_groups, placement.max_age)
    left, lengths = dict[int, int](), dict[int, int]()  # tokens of each response: those to come, and all
    for iteration in range(NUM_ITERATIONS):
        now, version = course.start(iteration, placement.max_staleness), max(0, iteration - placement.max_staleness)
        again = sum(speeds.prompt_tokens + lengths[number] - left[number] for number in left)
        sampling = speeds.read(again / speeds.num_teams) if version else 0.0
        while not schedule.has_batch:
            for _, number in (entered := schedule.begin(version)):
                left[number] = lengths[number] = draw()
            sampling += speeds.read(len(entered) * speeds.prompt_tokens / speeds.num_teams)
            sampling += _round_seconds(schedule, speeds, placement.round_tokens, left)
            ended = [number for number in schedule.rows if left.get(number) == 0]
            for number in ended:
                del left[number]
            for number in schedule.end(ended):
                del lengths[number]
        course.add(now + sampling, sampling, speeds.learn(sum(lengths.pop(number) for number in schedule.take())))


def _round_seconds(schedule: Schedule, speeds: Speeds, round_tokens: int, left: dict[int, int]) -> float:
    """Draw a round's tokens. Returns its seconds; all teams wait for the one with the most rows."""
    num_rows = Counter(row % speeds.num_teams for row, number in enumerate(schedule.rows) if number != FREE)
    num_steps = min(round_tokens, max(left.values()))
    for number in left:
        left[number] = max(0, left[number] - round_tokens)
    return num_steps * speeds.step(max(num_rows.values()))
