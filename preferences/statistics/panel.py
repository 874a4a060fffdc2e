"""Answers as columns, with the sign of each pair of responses, so that counting needs no loop over answers.

Shape letters: J answers, T tasks, L labelers, K responses (of the longest task; shorter ones are padded), P pairs of
responses, in the order of `combinations(range(K), 2)`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

import numpy as np
import numpy.typing as npt

from preferences.rankings import Said, said_alone
from preferences.records import MIN_RESPONSES, Judgment, Task
from preferences.statistics.estimates import Floats, Ints
from preferences.statistics.intervals import prompt_numbers

Signs = npt.NDArray[np.int8]

PAD = 0  # in ranks_JK, for tasks with fewer responses
NO_PAIR = 2  # in signs, for tasks with fewer responses


@dataclass(frozen=True)
class Panel:
    """Answers in columns. `task_J`, `root_T` and `labeler_J` are indices into `tasks` and `labelers`.

    A task's root is the task that it repeats, or itself. Tasks with the same prompt (the same number in `prompt_T`),
    including repeats, are not independent evidence, so intervals are over prompts.
    """

    tasks: tuple[Task, ...]
    labelers: tuple[str, ...]
    answers: tuple[Judgment, ...]
    root_T: Ints
    prompt_T: Ints
    task_J: Ints
    labeler_J: Ints
    ranks_JK: Signs  # 1 is best, in canonical order
    orders_JK: Signs  # the response that was shown at each position
    responses_J: Ints  # the task's number of responses

    @classmethod
    def of(cls, tasks: Sequence[Task], answers: Sequence[Judgment], labelers: Sequence[str] = ()) -> "Panel":
        """Builds a panel from one current answer per labeler and task. By default labelers are sorted by name.

        Raises: ValueError, naming task and labeler, for an answer to an unknown task, with a different number of ranks
        than the task has responses, or whose `shown_order` is known and not a permutation.
        """
        names = tuple(labelers) or tuple(sorted({answer.labeler for answer in answers}))
        index_of = {task.task_id: index for index, task in enumerate(tasks)}
        number = {name: index for index, name in enumerate(names)}
        unknown = next((answer for answer in answers if answer.task_id not in index_of), None)
        if unknown is not None:
            raise ValueError(f"task {unknown.task_id!r}, labeler {unknown.labeler!r}: an answer to none of the tasks")
        task_J = np.array([index_of[answer.task_id] for answer in answers], dtype=np.int64)
        responses_J = np.array([len(task.responses) for task in tasks], dtype=np.int64)[task_J]
        _refuse_other_lengths(answers, responses_J)
        width = int(responses_J.max(initial=MIN_RESPONSES))
        return cls(
            tasks=tuple(tasks),
            labelers=names,
            answers=tuple(answers),
            task_J=task_J,
            root_T=np.array([index_of.get(task.repeat_of, index) for index, task in enumerate(tasks)], dtype=np.int64),
            prompt_T=prompt_numbers([task.prompt for task in tasks]),
            labeler_J=np.array([number[answer.labeler] for answer in answers], dtype=np.int64),
            ranks_JK=padded([answer.ranks for answer in answers], width),
            orders_JK=_orders(answers, width),
            responses_J=responses_J,
        )

    def rows_alone(self) -> dict[int, list[int]]:
        """Returns the rows of the answers to each task with a single response, which has no pairs to compare."""
        found: dict[int, list[int]] = {}
        for row in np.flatnonzero(self.responses_J == 1).tolist():
            found.setdefault(int(self.task_J[row]), []).append(row)
        return found

    def said_alone(self, row: int) -> Said:
        """Returns what an answer says about a single response, by question."""
        answer = self.answers[row]
        return said_alone(answer.ratings, answer.flags, answer.annotations)

    def of_tasks(self, wanted_T: npt.NDArray[np.bool_]) -> "Panel":
        """Keeps the answers to the wanted tasks. Tasks and labelers keep their indices."""
        return self.of_answers(np.flatnonzero(wanted_T[self.task_J]))

    def of_answers(self, rows: Ints) -> "Panel":
        """Keeps the answers at these rows. Tasks and labelers keep their indices."""
        columns = ("task_J", "labeler_J", "ranks_JK", "orders_JK", "responses_J")
        kept = {name: getattr(self, name)[rows] for name in columns}
        return replace(self, answers=tuple(self.answers[row] for row in rows), **kept)


@dataclass(frozen=True)
class PairCounts:
    """For each task and pair, how many labelers prefer the first response, the second, or neither."""

    first_TP: Floats
    second_TP: Floats
    tied_TP: Floats

    @property
    def num_TP(self) -> Floats:
        return self.first_TP + self.second_TP + self.tied_TP


def pair_signs(ranks_JK: Signs) -> Signs:
    """Returns [J, P]: 1 if the pair's first response is better, -1 if its second, 0 for a tie, NO_PAIR for padding."""
    pairs = list(combinations(range(ranks_JK.shape[1]), 2))
    signs_JP = np.empty((len(ranks_JK), len(pairs)), dtype=np.int8)
    for column, (i, j) in enumerate(pairs):
        first_J, second_J = ranks_JK[:, i], ranks_JK[:, j]
        there_J = (first_J != PAD) & (second_J != PAD)
        signs_JP[:, column] = np.where(there_J, np.sign(second_J - first_J), NO_PAIR)
    return signs_JP


def count_pairs(panel: Panel, signs_JP: Signs) -> PairCounts:
    """Counts each task's answers about each pair."""
    num_tasks, num_pairs = len(panel.tasks), signs_JP.shape[1]
    key_JP = panel.task_J[:, None] * num_pairs + np.arange(num_pairs)

    def count(sign: int) -> Floats:
        counts = np.bincount(key_JP[signs_JP == sign], minlength=num_tasks * num_pairs)
        return counts.reshape(num_tasks, num_pairs).astype(np.float64)

    return PairCounts(count(1), count(-1), count(0))


def padded(rows: Sequence[tuple[int, ...]], width: int) -> Signs:
    """Returns [rows, width]: each row's ranks, then PAD."""
    return _filled(rows, {length: (PAD,) * (width - length) for length in range(width + 1)}, width)


def _orders(answers: Sequence[Judgment], width: int) -> Signs:
    """Returns [J, K]: the response shown at each position. Padded positions contain their own index, and so do all
    positions of an answer whose order is not known, as of imported ones.
    """
    rests = {length: tuple(range(length, width)) for length in range(width + 1)}
    orders = [answer.shown_order or tuple(range(len(answer.ranks))) for answer in answers]
    wrong = next((one for one, order in zip(answers, orders, strict=True) if len(order) != len(one.ranks)), None)
    if wrong is None:
        orders_JK = _filled(orders, rests, width)
        wrong_J = (np.sort(orders_JK, axis=1) != np.arange(width)).any(axis=1)
        wrong = answers[int(np.argmax(wrong_J))] if wrong_J.any() else None
    if wrong is not None:
        raise ValueError(
            f"task {wrong.task_id!r}, labeler {wrong.labeler!r}: shown_order is {list(wrong.shown_order)}; each of 0 to"
            f" {len(wrong.ranks) - 1} once was expected"
        )
    return orders_JK


def _filled(rows: Sequence[tuple[int, ...]], rests: Mapping[int, tuple[int, ...]], width: int) -> Signs:
    flat = chain.from_iterable(row + rests[len(row)] for row in rows)
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
