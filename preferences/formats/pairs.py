"""Rankings as pairs, for the formats that hold two responses a row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from preferences.formats.merging import final_rankings
from preferences.formats.parts import Report
from preferences.records import Judgment, Ranking, Task
from preferences.results import StoredTask


@dataclass(frozen=True)
class Pair:
    """Two responses of a ranking by their canonical places, the better one first where they are not tied."""

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
    """Every pair of every standing ranking, ties in canonical order."""
    for task, ranking in final_rankings([one.task for one in stored], judgments, report):
        for first, second in combinations(range(len(task.responses)), 2):
            swapped = ranking.ranks[first] > ranking.ranks[second]
            yield Pair(task, ranking, *((second, first) if swapped else (first, second)))


def untied_pairs(stored: Sequence[StoredTask], judgments: Sequence[Judgment], report: Report) -> Iterator[Pair]:
    """Every pair of which one response is better; ties are reported."""
    for pair in all_pairs(stored, judgments, report):
        if pair.is_tie:
            report.add("tie", pair.where, f"responses {pair.first + 1} and {pair.second + 1} are tied", "left out")
        else:
            yield pair


def single_turn(pair: Pair, report: Report) -> str:
    """The one user's turn that the prompt is; "" and an entry of the report where it is more than that."""
    if len(pair.task.prompt) == 1 and pair.task.prompt[0].role == "user":
        return pair.task.prompt[0].content
    roles = ", ".join(message.role for message in pair.task.prompt)
    report.add("prompt of several turns", pair.where, f"the prompt's turns are {roles}", "left out")
    return ""
