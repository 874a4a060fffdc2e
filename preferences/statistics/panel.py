"""Answers as columns, and what each says of each pair of responses, so that counting needs no loop over answers.

Shape letters: J answers, T tasks, L labelers, K responses (of the longest task; shorter ones are padded), P pairs of
responses, in the order of `combinations(range(K), 2)`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np
import numpy.typing as npt

from intervals.estimates import Floats, Ints
from preferences.records import MIN_RESPONSES, Judgment, Message, Task

Signs = npt.NDArray[np.int8]

PAD = 0  # in ranks_JK, of a task with fewer responses
NO_PAIR = 2  # in signs, of a task with fewer responses


@dataclass(frozen=True)
class Panel:
    """Answers in columns; `task_J`, `root_T` and `labeler_J` are places in `tasks` and `labelers`.

    A task's root is the task that it repeats, or itself. Tasks of one prompt (`prompt_T` is the same number), repeats
    among them, are no independent evidence: intervals are over prompts.
    """

    tasks: tuple[Task, ...]
    labelers: tuple[str, ...]
    answers: tuple[Judgment, ...]
    root_T: Ints
    prompt_T: Ints
    task_J: Ints
    labeler_J: Ints
    ranks_JK: Signs  # 1 is best, in canonical order
    orders_JK: Signs  # at each place, which response was shown there
    responses_J: Ints  # how many the task has

    @classmethod
    def of(cls, tasks: Sequence[Task], answers: Sequence[Judgment], labelers: Sequence[str] = ()) -> "Panel":
        """The panel of one standing answer a labeler and task; `labelers` are by name unless given.

        Raises ValueError, naming task and labeler, for an answer to an unknown task or with another number of ranks
        than the task has responses, or whose `shown_order` is no permutation.
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
        width = int(responses_J.max(initial=MIN_RESPONSES))
        return cls(
            tasks=tuple(tasks),
            labelers=names,
            answers=tuple(answers),
            task_J=task_J,
            root_T=np.array([place.get(task.repeat_of, index) for index, task in enumerate(tasks)], dtype=np.int64),
            prompt_T=prompt_numbers([task.prompt for task in tasks]),
            labeler_J=np.array([number[answer.labeler] for answer in answers], dtype=np.int64),
            ranks_JK=padded([answer.ranks for answer in answers], width),
            orders_JK=_orders(answers, width),
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
            root_T=self.root_T,
            prompt_T=self.prompt_T,
            labeler_J=self.labeler_J[rows],
            ranks_JK=self.ranks_JK[rows],
            orders_JK=self.orders_JK[rows],
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


def prompt_numbers(prompts: Sequence[tuple[Message, ...]]) -> Ints:
    """The same number for the same prompt, and another for another."""
    numbers: dict[tuple[Message, ...], int] = {}
    return np.array([numbers.setdefault(prompt, len(numbers)) for prompt in prompts], dtype=np.int64)


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
    return _filled(rows, {length: (PAD,) * (width - length) for length in range(width + 1)}, width)


def _orders(answers: Sequence[Judgment], width: int) -> Signs:
    """[J, K]: at each place, which response was shown; places beyond a task's responses hold themselves."""
    rests = {length: tuple(range(length, width)) for length in range(width + 1)}
    odd = next((answer for answer in answers if len(answer.shown_order) != len(answer.ranks)), None)
    if odd is None:
        orders_JK = _filled([answer.shown_order for answer in answers], rests, width)
        wrong_J = (np.sort(orders_JK, axis=1) != np.arange(width)).any(axis=1)
        odd = answers[int(np.argmax(wrong_J))] if wrong_J.any() else None
    if odd is not None:
        raise ValueError(
            f"task {odd.task_id!r}, labeler {odd.labeler!r}: shown_order is {list(odd.shown_order)}; each of 0 to"
            f" {len(odd.ranks) - 1} once was expected"
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
