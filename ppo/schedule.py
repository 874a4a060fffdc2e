"""Logical time of placement `continuous`: which responses are in progress, and which iteration learns from each.

Responses are numbered in the order in which they begin. All generators together have a fixed number of rows, and a row
has at most one response in progress. A round is a fixed number of tokens of each. Before a round, the next responses
enter the free rows, lowest first. After it, groups whose last response has ended join a queue, by number. An iteration
learns from the first groups of the queue, and weights change between two rounds: those that iteration i started with
sample from when the queue has had the groups of iteration i + N - 1, until it has those of iteration i + N, for N =
`max_staleness`. All of this is decided by counts of responses, never by a clock, so every token is a function of the
seed, whichever process is fast, slow or lost.

A conversation with an environment is a response whose row becomes free when a turn ends. The turn's answer is taken
`answer_rounds` rounds later, however fast the environment was. Then the conversation is over, or it waits for a free
row, before all responses that have not begun.
"""

import json
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Self

FREE = -1
QUEUES = ("queue", "answered", "returning")


@dataclass
class Schedule:
    """Rows, and the queue of groups that have ended. All generators hold the same."""

    num_rows: int
    group_size: int  # responses to one prompt, with adjacent numbers
    groups_per_batch: int  # that an iteration learns from
    max_age: int = 0  # of a group's oldest token when it is learned from, in iterations; 0 = no limit
    answer_rounds: int = 0  # that an environment has for its answer to a turn; 0 = a response is one turn
    rows: list[int] = field(default_factory=list)  # the number of the response in each row
    next: int = 0  # the response that begins next
    running: dict[int, int] = field(default_factory=dict)  # responses of each group that have not ended
    begun_by: dict[int, int] = field(default_factory=dict)  # weights of each group's first token
    queue: deque[int] = field(default_factory=deque)  # groups
    answered: deque[list[int]] = field(default_factory=deque)  # whose turn ended, by round
    returning: deque[int] = field(default_factory=deque)  # that wait for a free row
    num_batches: int = 0  # taken from the queue
    num_dropped: int = 0  # responses that were too old

    def __post_init__(self) -> None:
        self.rows = self.rows or [FREE] * self.num_rows
        self.answered = self.answered or deque([] for _ in range(self.answer_rounds))

    def begin(self, version: int) -> list[tuple[int, int]]:
        """Let responses enter the free rows. Returns each row with its response. `version` is the iteration that
        started with the present weights.
        """
        entered = list[tuple[int, int]]()
        for row, response in enumerate(self.rows):
            if response == FREE:
                self.rows[row] = self.returning.popleft() if self.returning else self._next(version)
                entered.append((row, self.rows[row]))
        return entered

    def _next(self, version: int) -> int:
        group = self.next // self.group_size
        self.running.setdefault(group, self.group_size)
        self.begun_by.setdefault(group, version)
        self.next += 1
        return self.next - 1

    @property
    def due(self) -> Sequence[int]:
        """The conversations whose answers are taken after this round."""
        return self.answered[0] if self.answered else ()

    def end(self, responses: Iterable[int]) -> list[int]:
        """Take what happened in a round: the responses in rows that ended, or whose turn did, and the conversations
        of `due` that are over. Returns the responses of groups that are dropped: they would be older than `max_age`
        when an iteration learns from them.
        """
        happened = set(responses)
        ended = sorted(happened.intersection(self.rows))
        self.rows = [FREE if response in happened else response for response in self.rows]
        if self.answer_rounds:
            self.answered.append(ended)
            due = self.answered.popleft()
            ended = [response for response in due if response in happened]
            self.returning += [response for response in due if response not in happened]
        whole = list[int]()
        for response in ended:
            group = response // self.group_size
            self.running[group] -= 1
            if not self.running[group]:
                del self.running[group]
                whole.append(group)
        dropped = list[int]()
        for group in sorted(whole):
            age = self.num_batches + len(self.queue) // self.groups_per_batch - self.begun_by.pop(group)
            if self.max_age and age > self.max_age:
                dropped += self.members([group])
            else:
                self.queue.append(group)
        self.num_dropped += len(dropped)
        return dropped

    def leave_out(self, groups: Collection[int]) -> None:
        """Drop groups, wherever their responses are."""

        def is_left(response: int) -> bool:
            return response // self.group_size not in groups

        self.rows = [response if is_left(response) else FREE for response in self.rows]
        self.answered = deque([*filter(is_left, waiting)] for waiting in self.answered)
        self.returning = deque(filter(is_left, self.returning))
        self.queue = deque(group for group in self.queue if group not in groups)
        for group in groups:
            self.running.pop(group, None)
            self.begun_by.pop(group, None)
        self.num_dropped += self.group_size * len(groups)

    @property
    def num_waiting(self) -> int:
        """Number of conversations that have begun, are not over, and are in no row."""
        return sum(map(len, self.answered)) + len(self.returning)

    @property
    def next_group(self) -> int:
        """The first group of which no response has begun, or not all."""
        return self.next // self.group_size

    @property
    def has_batch(self) -> bool:
        return len(self.queue) >= self.groups_per_batch

    def take(self) -> list[int]:
        """Returns the responses of the next batch, group after group."""
        self.num_batches += 1
        return self.members([self.queue.popleft() for _ in range(self.groups_per_batch)])

    def members(self, groups: Sequence[int]) -> list[int]:
        """Returns the responses of the groups."""
        return [group * self.group_size + place for group in groups for place in range(self.group_size)]

    def as_json(self) -> str:
        return json.dumps(asdict(self) | {name: [*getattr(self, name)] for name in QUEUES})

    @classmethod
    def from_json(cls, text: str) -> Self:
        found = json.loads(text)
        by_group = {name: {int(key): value for key, value in found[name].items()} for name in ("running", "begun_by")}
        return cls(**found | by_group | {name: deque(found.get(name, ())) for name in QUEUES})
