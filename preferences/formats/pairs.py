"""Rankings as pairs, for formats with two responses per row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from preferences.formats.merging import final_rankings
from preferences.formats.parts import Report
from preferences.records import Judgment, Ranking, StoredTask, Task


@dataclass(frozen=True)
class Pair:
    """Two responses of a ranking, by canonical index, the better one first unless they are tied."""

    task: Task
    ranking: Ranking
    first: int
    second: int

    @property
    def where(self) -> str:
        return f"task {self.task.task_id!r}, labeler {self.ranking.labeler!r}"

    @property
    def is_tie(self) -> bool:
        return self.ranking.ranks[self.first] == self.ranking.ranks[self.second]

    @property
    def better(self) -> str:
        return self.task.responses[self.first]

    @property
    def worse(self) -> str:
        return self.task.responses[self.second]


def all_pairs(stored: Sequence[StoredTask], judgments: Sequence[Judgment], report: Report) -> Iterator[Pair]:
    """Yields every pair of every final ranking, ties in canonical order."""
    for task, ranking in final_rankings([one.task for one in stored], judgments, report):
        for first, second in combinations(range(len(task.responses)), 2):
            swapped = ranking.ranks[first] > ranking.ranks[second]
            yield Pair(task, ranking, *((second, first) if swapped else (first, second)))


def untied_pairs(stored: Sequence[StoredTask], judgments: Sequence[Judgment], report: Report) -> Iterator[Pair]:
    """Yields every pair with a better response. Reports ties."""
    for pair in all_pairs(stored, judgments, report):
        if pair.is_tie:
            report.add("tie", pair.where, f"responses {pair.first + 1} and {pair.second + 1} are tied", "left out")
        else:
            yield pair


def single_turn(pair: Pair, report: Report) -> str:
    """Returns the text of a prompt with a single user turn, or "" and a warning for any other prompt."""
    if len(pair.task.prompt) == 1 and pair.task.prompt[0].role == "user":
        return pair.task.prompt[0].content
    roles = ", ".join(message.role for message in pair.task.prompt)
    report.add("prompt of several turns", pair.where, f"the prompt's turns are {roles}", "left out")
    return ""
