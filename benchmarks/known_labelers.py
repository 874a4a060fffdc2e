"""Scripted labelers with known properties, and tasks for them. `benchmarks.label_truth` derives what follows from them.

    utility of a response = quality + shared taste + own taste + position bias + noise,   quality ~ N(0, 1)

Gold ranks follow quality only. All labelers like the shared taste; own taste belongs to one labeler and is permanent.
Noise is drawn again for every task, including repeats. The position bonus falls linearly from the first response shown
to the last. An inattentive labeler answers without reading, in under a second: in the order shown (`lazy_first`) or at
random (`lazy_random`). An attentive one sometimes ties a whole task.

They see what people see, the texts in the order shown, so they can answer through any interface: `judged` calls them
directly, `preferences.scripted` uses a store, `benchmarks.label_client` a server. All draws follow from (seed, labeler,
task) and (seed, response), so every interface gets the same answers.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from heed.worlds.labelers import uniform
from preferences.leases import canonical, display_order
from preferences.records import Answer, Coverage, Judgment, Message, ShownTask, Skip, Task, dense_ranks
from preferences.scripted import assign

NUM_RESPONSES = 3
NUM_WORDS = 301  # per task: a prompt of one word, three responses of a hundred
SHARED_TASTE = 0.4  # standard deviation
CUTS = (-1.2, -0.4, 0.4, 1.2)  # between ratings 1 to 5, on the scale of quality
PACE_SPREAD = 0.5  # standard deviation of log milliseconds
LAZY_MILLISECONDS = (300, 900)
FLAG = "wrong"
REASON = "I do not know enough about this."


@dataclass(frozen=True)
class Traits:
    """Known properties of a labeler. Standard deviations are in units of the qualities' own."""

    name: str
    noise: float
    own_taste: float
    position_bias: float  # bonus of the response shown first over the last
    lazy_first: float  # shares of answers
    lazy_random: float
    tie: float  # share of attentive answers that tie all responses
    flag: float  # share of responses that are flagged
    skip: float  # share of tasks
    median_milliseconds: float  # of attentive answers

    @property
    def lazy(self) -> float:
        return self.lazy_first + self.lazy_random


TRAITS = (
    Traits("careful", 0.3, 0.2, 0.0, 0.0, 0.0, 0.05, 0.1, 0.0, 60_000),
    Traits("noisy", 1.5, 0.3, 0.0, 0.0, 0.0, 0.1, 0.0, 0.05, 45_000),
    Traits("opinionated", 0.2, 1.5, 0.0, 0.0, 0.0, 0.0, 0.3, 0.0, 50_000),
    Traits("lazy", 0.5, 0.2, 0.0, 0.3, 0.1, 0.1, 0.0, 0.0, 30_000),
    Traits("biased", 0.4, 0.2, 0.8, 0.0, 0.0, 0.0, 0.05, 0.1, 40_000),
)

_STANDARD = NormalDist()


@lru_cache(maxsize=10_000)  # every labeler needs a response's quality
def _normal(*key: object) -> float:
    """Returns a draw from N(0, 1) that is a pure function of the key."""
    return _STANDARD.inv_cdf(uniform(*key))


def quality(seed: int, response: str) -> float:
    return _normal("quality", seed, response)


class KnownLabeler:
    """A labeler with these traits. Implements preferences.records.Labeler."""

    def __init__(self, traits: Traits, seed: int) -> None:
        self.traits, self._seed = traits, seed

    @property
    def name(self) -> str:
        return self.traits.name

    def judge(self, shown: ShownTask) -> Answer | Skip:
        draw = random.Random(uniform("answer", self._seed, self.name, shown.task_id))
        qualities = [quality(self._seed, response) for response in shown.responses]
        milliseconds = round(self.traits.median_milliseconds * math.exp(PACE_SPREAD * draw.gauss()))
        ranks = ranks_of(self._utilities(shown, qualities, draw))
        ratings = tuple(rating(value + self.traits.noise * draw.gauss()) for value in qualities)
        marked = [draw.random() < self.traits.flag for _ in qualities]
        flags = tuple((FLAG,) if mark else () for mark in marked) if any(marked) else ()
        if draw.random() < self.traits.skip:
            return Skip(REASON, milliseconds)
        mood = draw.random()
        if mood < self.traits.lazy:
            unread = list(range(1, len(qualities) + 1))
            if mood >= self.traits.lazy_first:
                draw.shuffle(unread)
            return Answer(tuple(unread), draw.randint(*LAZY_MILLISECONDS), ratings, flags)
        is_tied = draw.random() < self.traits.tie
        return Answer((1,) * len(qualities) if is_tied else ranks, milliseconds, ratings, flags)

    def _utilities(self, shown: ShownTask, qualities: Sequence[float], draw: random.Random) -> list[float]:
        last = len(qualities) - 1
        return [
            value
            + SHARED_TASTE * _normal("shared taste", self._seed, response)
            + self.traits.own_taste * _normal("own taste", self._seed, self.name, response)
            + self.traits.position_bias * (1 - place / last)
            + self.traits.noise * draw.gauss()
            for place, (value, response) in enumerate(zip(qualities, shown.responses, strict=True))
        ]


def rating(value: float) -> float:
    """Returns the rating, 1 to 5, of a value on the scale of quality."""
    return float(1 + sum(cut < value for cut in CUTS))


def ranks_of(utilities: Sequence[float]) -> tuple[int, ...]:
    """Returns ranks, 1 for the highest; no two values are equal."""
    order = sorted(range(len(utilities)), key=lambda index: -utilities[index])
    return tuple(order.index(index) + 1 for index in range(len(utilities)))


# ---- worlds ----


@dataclass(frozen=True)
class Size:
    """Numbers of tasks. The first `num_repeats` ordinary tasks are repeated."""

    num_ordinary: int
    num_gold: int
    num_repeats: int


def draw_tasks(size: Size, seed: int) -> list[tuple[Task, int]]:
    """Returns tasks with their number of labelers: all but one for an ordinary unrepeated task, all for the others.

    Tasks are in order of arrival, which is random except that repeats follow their originals. Ids and texts depend on
    the seed, so each world has its own display orders.
    """
    drawn = []
    num_roots = size.num_ordinary + size.num_gold
    arrival = random.Random(f"arrival/{seed}").sample(range(num_roots + size.num_repeats), num_roots + size.num_repeats)
    place = {index: position for position, index in enumerate(arrival)}
    for root in range(size.num_repeats):
        first, second = sorted((place[root], place[num_roots + root]))
        arrival[first], arrival[second] = root, num_roots + root
    for index in arrival:
        is_repeat = index >= num_roots
        root = index - num_roots if is_repeat else index
        is_gold = root >= size.num_ordinary
        responses = tuple(f"{'word ' * 99}{seed}-{root}-{place}" for place in range(NUM_RESPONSES))
        task = Task(
            f"w{seed}-t{index}",
            (Message("user", f"{seed}-{root}"),),
            responses,
            ("policy",) * NUM_RESPONSES,
            gold_ranks=ranks_of([quality(seed, response) for response in responses]) if is_gold else (),
            repeat_of=f"w{seed}-t{root}" if is_repeat else "",
        )
        is_for_all = is_gold or is_repeat or root < size.num_repeats
        drawn.append((task, len(TRAITS) if is_for_all else len(TRAITS) - 1))
    return drawn


def judged(
    tasks: Sequence[Task], labelers: Sequence[KnownLabeler], asked: Mapping[str, Sequence[str]]
) -> list[Judgment]:
    """Returns what a store would hold if each labeler judged the `asked` tasks (ids by name) in this order.

    As in a store, a repeat goes to whoever judged its original, and responses come in `leasing.display_order`.
    `created_at` counts each labeler's own acts from 0.
    """
    known = {task.task_id: task for task in tasks}
    judgments: list[Judgment] = []
    for labeler in labelers:
        answered: set[str] = set()
        for task_id in asked[labeler.name]:
            task = known[task_id]
            if task.repeat_of and task.repeat_of not in answered:
                continue
            order = display_order(task_id, labeler.name, len(task.responses))
            shown = ShownTask(task_id, task.prompt, tuple(task.responses[index] for index in order))
            said = labeler.judge(shown)
            judgments.append(_judgment(shown, labeler.name, order, said, created_at=float(len(judgments))))
            if isinstance(said, Answer):
                answered.add(task_id)
    return judgments


def _judgment(
    shown: ShownTask, labeler: str, order: tuple[int, ...], said: Answer | Skip, created_at: float
) -> Judgment:
    answer = said if isinstance(said, Answer) else Answer((), said.milliseconds, note=said.reason)
    return Judgment(
        task_id=shown.task_id,
        labeler=labeler,
        revision=0,
        kind="answer" if answer is said else "skip",
        ranks=tuple(canonical(order, dense_ranks(answer.ranks))),
        ratings=tuple(canonical(order, answer.ratings)),
        flags=tuple(canonical(order, answer.flags)),
        note=answer.note,
        shown_order=order,
        instructions_version="",
        milliseconds=answer.milliseconds,
        client="",
        created_at=created_at,
    )


def draw_world(size: Size, seed: int) -> tuple[list[Task], list[Judgment]]:
    """Returns a world's tasks and its labelers' answers, with tasks assigned as `preferences.scripted` assigns them."""
    drawn = draw_tasks(size, seed)
    tasks = [task for task, _ in drawn]
    asked = assign([Coverage(task.task_id, quota, ()) for task, quota in drawn], [traits.name for traits in TRAITS])
    return tasks, judged(tasks, [KnownLabeler(traits, seed) for traits in TRAITS], asked)
