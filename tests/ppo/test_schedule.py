"""Placement `continuous` in logical time: speeds, pauses and losses never change which weights draw which token."""

from dataclasses import dataclass, field
from itertools import chain
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from ppo.schedule import FREE, Schedule
from tests.examples import examples

Token = tuple[int, int, int]  # response, place, version; ENVIRONMENT wrote the tokens between two turns
ENVIRONMENT = -1


@dataclass(frozen=True)
class Job:
    num_rows: int
    group_size: int
    groups_per_batch: int
    round_tokens: int
    staleness: int
    max_age: int
    num_iterations: int
    seed: int
    answer_rounds: int = 0  # 0 = a response is one turn

    def turns_of(self, response: int) -> list[range]:
        """The places of each turn's tokens. A tenth of the responses are ten times as long, of turns three times."""
        chance = Random(f"{self.seed} {response}")
        if not self.answer_rounds:
            return [range(chance.randint(1, 6) * (10 if chance.random() < 0.1 else 1))]
        turns, start = list[range](), 0
        for _ in range(chance.randint(1, 3)):
            turns.append(range(start, start + chance.randint(1, 5) * (3 if chance.random() < 0.1 else 1)))
            start = turns[-1].stop + chance.randint(1, 4)
        return turns

    def length_of(self, response: int) -> int:
        return self.turns_of(response)[-1].stop

    def turn_end(self, response: int, num_tokens: int) -> int:
        """The end of the turn that has the next token."""
        return next(turn.stop for turn in self.turns_of(response) if num_tokens in turn)

    def reply_end(self, response: int, num_tokens: int) -> int:
        """Where the turn after this many tokens begins; their number if the conversation is over."""
        return next((turn.start for turn in self.turns_of(response) if turn.start > num_tokens), num_tokens)

    def start(self) -> Schedule:
        return Schedule(self.num_rows, self.group_size, self.groups_per_batch, self.max_age, self.answer_rounds)


@dataclass
class Generators:
    """All generators as one: the schedule, and how many tokens each response has, with the version of each."""

    job: Job
    schedule: Schedule
    drawn: dict[int, list[int]] = field(default_factory=dict)

    def sample_batch(self, version: int, order: Random) -> list[Token]:
        job, schedule = self.job, self.schedule
        while not schedule.has_batch:
            schedule.begin(version)
            happened = []
            rows = [row for row, response in enumerate(schedule.rows) if response != FREE]
            order.shuffle(rows)  # whichever generator is faster
            for response in (schedule.rows[row] for row in rows):
                tokens = self.drawn.setdefault(response, [])
                end = job.turn_end(response, len(tokens))
                tokens += [version] * min(job.round_tokens, end - len(tokens))
                if len(tokens) == end:
                    happened.append(response)
            for response in schedule.due:
                tokens = self.drawn[response]
                tokens += [ENVIRONMENT] * (job.reply_end(response, len(tokens)) - len(tokens))
                if tokens[-1] != ENVIRONMENT:
                    happened.append(response)
            for response in schedule.end(happened):
                del self.drawn[response]
        taken = schedule.take()
        return [(response, place, drawn) for response in taken for place, drawn in enumerate(self.drawn.pop(response))]

    def saved(self) -> tuple[str, dict[int, list[int]]]:
        return self.schedule.as_json(), {response: [*tokens] for response, tokens in self.drawn.items()}


def plain(job: Job) -> list[list[Token]]:
    """Both sides take turns: each batch is sampled right after the weights that it needs."""
    generators, batches = Generators(job, job.start()), list[list[Token]]()
    for batch in range(job.num_iterations):
        batches.append(generators.sample_batch(max(0, batch - job.staleness), Random(0)))
    return batches


def disturbed(job: Job, events: Random) -> list[list[Token]]:
    """Each side works whenever it is drawn and has work. Now and then all processes are lost, and continue from the
    last checkpoint, which holds what older weights sampled.
    """
    learned: list[list[Token]] = []
    generators, ready, done = Generators(job, job.start()), dict[int, list[Token]](), 0
    checkpoint = (generators.saved(), {}, 0)
    started, before = 0, generators.saved()
    while done < job.num_iterations:
        event = events.choice(["sample"] * 6 + ["learn"] * 6 + ["save"] * 3 + ["lose"])
        if event == "sample" and started <= min(done + job.staleness, job.num_iterations - 1):
            version = max(0, started - job.staleness)
            if version > max(0, started - 1 - job.staleness) or not started:
                before = generators.saved()
            ready[started] = generators.sample_batch(version, events)
            started += 1
        elif event == "learn" and done in ready:
            learned = [*learned[:done], ready.pop(done)]
            done += 1
        elif event == "save" and done and started >= done + job.staleness:
            is_newest = max(0, started - 1 - job.staleness) == done  # these weights have begun to sample
            held = {batch: tokens for batch, tokens in ready.items() if batch < done + job.staleness}
            checkpoint = (before if is_newest else generators.saved(), held, done)
        elif event == "lose":
            (text, drawn), held, done = checkpoint
            drawn = {response: [*tokens] for response, tokens in drawn.items()}
            generators, ready = Generators(job, Schedule.from_json(text), drawn), dict(held)
            started = generators.schedule.num_batches
    return learned


jobs = st.builds(
    Job,
    num_rows=st.integers(1, 9),
    group_size=st.integers(1, 3),
    groups_per_batch=st.integers(1, 4),
    round_tokens=st.integers(1, 5),
    staleness=st.integers(1, 3),
    max_age=st.sampled_from([0, 0, 4, 5]),
    num_iterations=st.integers(4, 8),
    seed=st.integers(0, 2**32),
    answer_rounds=st.integers(0, 2),
)


@examples(1_000)  # and ten courses of events of each: 10,000 in nightly tests
@given(job=jobs, events=st.integers(0, 2**32))
def test_speeds_pauses_and_losses_change_no_token_and_no_version(job: Job, events: int) -> None:
    expected = plain(job)
    for course in range(10):
        assert disturbed(job, Random(events + course)) == expected


@examples(400)
@given(job=jobs)
def test_every_response_is_learned_from_once_and_versions_never_fall(job: Job) -> None:
    batches = plain(job)
    tokens = [token for batch in batches for token in batch]
    responses = {response for response, _, _ in tokens}
    assert len(tokens) == sum(map(job.length_of, responses))
    for iteration, batch in enumerate(batches):
        assert len({response for response, _, _ in batch}) == job.group_size * job.groups_per_batch
        versions: dict[int, list[int]] = {}
        for response, _, version in batch:
            if version != ENVIRONMENT:
                versions.setdefault(response, []).append(version)
        for found in versions.values():
            assert found == sorted(found)
            assert found[-1] <= max(0, iteration - job.staleness)
            assert not job.max_age or found[0] >= iteration - job.max_age
    if not job.max_age:  # a group waits for its longest response, but none for another group
        last = max(responses)
        missing = set(range(last)) - responses
        most_begun = job.num_rows * (1 + job.answer_rounds)  # in rows, or waiting for answers
        assert len(missing) <= job.group_size * (most_begun + job.groups_per_batch * (1 + job.staleness)) + most_begun


def test_the_rule_by_hand() -> None:
    """Three rows, batches of two, rounds of two tokens, staleness 1; responses have 2, 5, 1, 2, 2, ... tokens."""
    lengths, schedule = [2, 5, 1, 2, 2, 2, 2], Schedule(num_rows=3, group_size=1, groups_per_batch=2)
    assert schedule.begin(0) == [(0, 0), (1, 1), (2, 2)]
    assert schedule.end([0, 2]) == []  # responses 0 and 2
    assert schedule.has_batch
    assert schedule.take() == [0, 2]
    assert schedule.begin(0) == [(0, 3), (2, 4)]  # iteration 0 learns meanwhile, and response 1 continues
    assert schedule.end([3, 4]) == []
    assert schedule.take() == [3, 4]
    assert schedule.begin(1) == [(0, 5), (2, 6)]  # with the weights of iteration 1, which also draw the rest of 1
    schedule.end([1, 5, 6])
    assert list(schedule.queue) == [1, 5, 6]
    assert schedule.take() == [1, 5]
    assert schedule.rows == [FREE] * 3
    assert lengths[1] == 5


def test_the_rule_of_conversations_by_hand() -> None:
    """Two rows, batches of two, and answers a round later. Conversation 0 has two turns, all others one."""
    schedule = Schedule(num_rows=2, group_size=1, groups_per_batch=2, answer_rounds=1)
    assert schedule.begin(0) == [(0, 0), (1, 1)]
    schedule.end([0])  # its first turn ends, and 1 goes on
    assert schedule.begin(0) == [(0, 2)]  # while the environment answers 0
    assert schedule.due == [0]
    assert schedule.num_waiting == 1
    schedule.end([1, 2])  # their only turns; the answer to 0 is taken, and is not its end
    assert schedule.begin(0) == [(0, 0), (1, 3)]  # 0 before 3
    assert schedule.due == [1, 2]
    schedule.end([0, 3, 1, 2])  # turns of 0 and 3 end, and 1 and 2 are over
    assert schedule.take() == [1, 2]
    assert schedule.begin(0) == [(0, 4), (1, 5)]
    schedule.end([0, 3])  # which were answered while 4 and 5 went on
    assert schedule.take() == [0, 3]
    assert (schedule.rows, schedule.num_waiting) == ([4, 5], 0)


def test_old_groups_are_dropped_whole() -> None:
    schedule = Schedule(num_rows=2, group_size=2, groups_per_batch=1, max_age=2)
    assert schedule.begin(0) == [(0, 0), (1, 1)]
    assert schedule.end([0]) == []  # its sibling goes on
    for version in range(4):
        schedule.begin(version)
        assert schedule.end([2 + version]) == []  # of groups 1 and 2
    assert list(schedule.queue) == [1, 2]
    schedule.take(), schedule.take()
    schedule.begin(3)
    assert schedule.end([1]) == []  # response 1 would be learned from in iteration 2: group 0 is 2 iterations old
    assert list(schedule.queue) == [0]
    again = Schedule(num_rows=2, group_size=2, groups_per_batch=1, max_age=2, num_batches=3)
    again.begin(0)
    assert again.end([0, 1]) == [0, 1]
    assert again.num_dropped == 2
    assert not again.queue


def test_groups_are_left_out_wherever_they_are() -> None:
    schedule = Schedule(num_rows=4, group_size=2, groups_per_batch=2, answer_rounds=1)
    for happened in ([0, 1], [0, 1, 2, 4], [4, 3], [6]):  # group 0 is over; 2 returns; 3 waits; 5, 6 and 7 go on
        schedule.begin(0)
        schedule.end(happened)
    before = Schedule.from_json(schedule.as_json())
    assert (list(before.queue), before.next) == ([0], 8)
    schedule.leave_out({0, 1})
    assert schedule.num_dropped == 4
    assert not schedule.queue
    assert schedule.members([2, 3]) == [4, 5, 6, 7]
    in_progress = {*schedule.rows, *schedule.returning, *chain(*schedule.answered)} - {FREE}
    assert in_progress == {*before.rows, *before.returning, *chain(*before.answered)} - {FREE, 0, 1, 2, 3}
    assert schedule.running.keys() == schedule.begun_by.keys() == before.running.keys() - {0, 1}


def test_a_schedule_is_saved_whole() -> None:
    schedule = Schedule(num_rows=3, group_size=2, groups_per_batch=1, answer_rounds=2)
    for ended in ([0, 1], [2], []):
        schedule.begin(4)
        schedule.end(ended)
    assert (list(schedule.returning), list(schedule.answered)) == ([0, 1], [[2], []])
    assert Schedule.from_json(schedule.as_json()) == schedule
