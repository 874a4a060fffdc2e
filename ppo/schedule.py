"""Logical time of placement `continuous`: which responses are in progress, and which iteration learns from each.

Responses are numbered in the order in which they begin. All generators together have a fixed number of rows, and a row
has at most one response in progress. A round is a fixed number of tokens of each. Before a round, the next responses
enter the free rows, lowest first. After it, groups whose last response has ended join a queue, by number. An iteration
learns from the first groups of the queue, and weights change between two rounds: those that iteration i started with
sample from when the queue has had the groups of iteration i + N - 1, until it has those of iteration i + N, for N =
`max_staleness`. All of this is decided by counts of responses, never by a clock, so every token is a function of the
seed, whichever process is fast, slow or lost.
"""

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Self

FREE = -1


@dataclass
class Schedule:
    """Rows, and the queue of groups that have ended. All generators hold the same."""

    num_rows: int
    group_size: int  # responses to one prompt, with adjacent numbers
    groups_per_batch: int  # that an iteration learns from
    max_age: int = 0  # of a group's oldest token when it is learned from, in iterations; 0 = no limit
    rows: list[int] = field(default_factory=list)  # the number of the response in each row
    next: int = 0  # the response that begins next
    running: dict[int, int] = field(default_factory=dict)  # responses of each group that have not ended
    begun_by: dict[int, int] = field(default_factory=dict)  # weights of each group's first token
    queue: deque[int] = field(default_factory=deque)  # groups
    num_batches: int = 0  # taken from the queue
    num_dropped: int = 0  # responses that were too old

    def __post_init__(self) -> None:
        self.rows = self.rows or [FREE] * self.num_rows

    def begin(self, version: int) -> list[tuple[int, int]]:
        """Let responses enter the free rows. Returns each row with its response. `version` is the iteration that
        started with the present weights.
        """
        entered = list[tuple[int, int]]()
        for row, response in enumerate(self.rows):
            if response == FREE:
                group = self.next // self.group_size
                self.running.setdefault(group, self.group_size)
                self.begun_by.setdefault(group, version)
                self.rows[row] = self.next
                entered.append((row, self.next))
                self.next += 1
        return entered

    def end(self, rows: Iterable[int]) -> list[int]:
        """Free the rows whose responses ended in a round. Returns the responses of groups that are dropped: they would
        be older than `max_age` when an iteration learns from them.
        """
        whole = list[int]()
        for row in rows:
            group = self.rows[row] // self.group_size
            self.rows[row] = FREE
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
        return json.dumps(asdict(self) | {"queue": list(self.queue)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        found = json.loads(text)
        by_group = {name: {int(key): value for key, value in found[name].items()} for name in ("running", "begun_by")}
        return cls(**found | by_group | {"queue": deque(found["queue"])})
