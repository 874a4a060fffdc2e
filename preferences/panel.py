"""Answers as columns, and what each says of each pair of responses, so that counting needs no loop over answers.

Shape letters: J answers, T tasks, L labelers, K responses (of the longest task; shorter ones are padded), P pairs of
responses, in the order of `combinations(range(K), 2)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from preferences.intervals import Ints
from preferences.records import MIN_RESPONSES, Judgment, Task
from preferences.resampling import Floats

Signs = npt.NDArray[np.int8]

PAD = 0  # in ranks_JK, of a task with fewer responses
NO_PAIR = 2  # in signs, of a task with fewer responses


@dataclass(frozen=True)
class Panel:
    """Answers in columns; `task_J` and `labeler_J` are places in `tasks` and `labelers`."""

    tasks: tuple[Task, ...]
    labelers: tuple[str, ...]
    answers: tuple[Judgment, ...]
    task_J: Ints
    labeler_J: Ints
    ranks_JK: Signs  # 1 is best, in canonical order
    responses_J: Ints  # how many the task has

    @classmethod
    def of(cls, tasks: Sequence[Task], answers: Sequence[Judgment], labelers: Sequence[str] = ()) -> "Panel":
        """The panel of one standing answer a labeler and task; `labelers` are by name unless given.

        Raises ValueError, naming task and labeler, for an answer to an unknown task or with another number of ranks
        than the task has responses.
        """
        names = tuple(labelers) or tuple(sorted({answer.labeler for answer in answers}))
        place = {task.task_id: index for index, task in enumerate(tasks)}
        number = {name: index for index, name in enumerate(names)}
        unknown = next((answer for answer in answers if answer.task_id not in place), None)
        if unknown is not None:
            raise ValueError(f"task {unknown.task_id!r}, labeler {unknown.labeler!r}: an answer to none of the tasks")
        task_J = np.array([place[answer.task_id] for answer in answers], dtype=np.int64)
        responses_J = np.array([len(task.responses) for task in tasks], dtype=np.int64)[task_J]
        _refuse_other_lengths(answers, responses_J)
        return cls(
            tasks=tuple(tasks),
            labelers=names,
            answers=tuple(answers),
            task_J=task_J,
            labeler_J=np.array([number[answer.labeler] for answer in answers], dtype=np.int64),
            ranks_JK=padded([answer.ranks for answer in answers], int(responses_J.max(initial=MIN_RESPONSES))),
            responses_J=responses_J,
        )

    def of_tasks(self, wanted_T: npt.NDArray[np.bool_]) -> "Panel":
        """The answers to the wanted tasks; tasks and labelers keep their places."""
        return self.of_answers(np.flatnonzero(wanted_T[self.task_J]))

    def of_answers(self, rows: Ints) -> "Panel":
        """The answers at these rows; tasks and labelers keep their places."""
        return Panel(
            tasks=self.tasks,
            labelers=self.labelers,
            answers=tuple(self.answers[row] for row in rows),
            task_J=self.task_J[rows],
            labeler_J=self.labeler_J[rows],
            ranks_JK=self.ranks_JK[rows],
            responses_J=self.responses_J[rows],
        )


@dataclass(frozen=True)
class PairCounts:
    """How many labelers of each task prefer each pair's first response, its second, or neither."""

    first_TP: Floats
    second_TP: Floats
    tied_TP: Floats

    @property
    def num_TP(self) -> Floats:
        return self.first_TP + self.second_TP + self.tied_TP


def pair_signs(ranks_JK: Signs) -> Signs:
    """[J, P]: 1 where the pair's first response is preferred, -1 its second, 0 a tie, NO_PAIR where there is none."""
    pairs = list(combinations(range(ranks_JK.shape[1]), 2))
    signs_JP = np.empty((len(ranks_JK), len(pairs)), dtype=np.int8)
    for column, (i, j) in enumerate(pairs):
        first_J, second_J = ranks_JK[:, i], ranks_JK[:, j]
        there_J = (first_J != PAD) & (second_J != PAD)
        signs_JP[:, column] = np.where(there_J, np.sign(second_J - first_J), NO_PAIR)
    return signs_JP


def count_pairs(panel: Panel, signs_JP: Signs) -> PairCounts:
    """The answers of each task to each pair, counted."""
    num_tasks, num_pairs = len(panel.tasks), signs_JP.shape[1]
    key_JP = panel.task_J[:, None] * num_pairs + np.arange(num_pairs)

    def count(sign: int) -> Floats:
        said = np.bincount(key_JP[signs_JP == sign], minlength=num_tasks * num_pairs)
        return said.reshape(num_tasks, num_pairs).astype(np.float64)

    return PairCounts(count(1), count(-1), count(0))


def padded(rows: Sequence[tuple[int, ...]], width: int) -> Signs:
    """[rows, width]: each row's ranks, then PAD."""
    flat = (rank for row in rows for rank in (*row, *(PAD,) * (width - len(row))))
    return np.fromiter(flat, np.int8, len(rows) * width).reshape(len(rows), width)


def _refuse_other_lengths(answers: Sequence[Judgment], responses_J: Ints) -> None:
    num_ranks_J = np.array([len(answer.ranks) for answer in answers], dtype=np.int64)
    if (num_ranks_J != responses_J).any():
        row = int(np.argmax(num_ranks_J != responses_J))
        answer = answers[row]
        raise ValueError(
            f"task {answer.task_id!r}, labeler {answer.labeler!r}: ranks has {num_ranks_J[row]} entries for"
            f" {responses_J[row]} responses"
        )
