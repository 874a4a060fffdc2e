"""Labelers: judgments do not depend on the order of calls; position bias, taste and agreement are as configured."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import pytest
from scipy.stats import multivariate_normal

from heed.worlds.labelers import LabelerConfig, ScriptedLabeler, Taste, draw_labelers
from heed.worlds.world import PlaygroundConfig, PlaygroundWorld
from preferences.records import Judgment, Message, ShownTask, Task
from preferences.statistics.summary import summary
from tests.heed.worlds.tasks import draw_tasks

NO_TASTE = Taste(length=0.0, cheer=0.0, favourite="", favourite_weight=0.0)
EXACT = LabelerConfig(noise=0, position_bias=0, shared_length=0, shared_cheer=0, own_taste=0, tie_threshold=0.01)


def shown(task_id: str, *responses: str) -> ShownTask:
    return ShownTask(task_id, (Message("user", "prompt"),), responses)


def length_gold(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """A stand-in gold scorer: a tenth for each letter x."""
    return [0.1 * response.count("x") for _, response in zip(prompts, responses, strict=True)]


@dataclass(frozen=True)
class Agreement:
    """Shares of pairs of responses."""

    between_labelers: float  # ranked alike, among pairs that neither labeler ties
    with_gold: float  # ranked like the gold scores, among pairs that differ in gold score and are not tied
    tied: float  # tied by a labeler, among all pairs


def measure_agreement(
    world: PlaygroundWorld, labelers: Sequence[ScriptedLabeler], tasks: Sequence[ShownTask]
) -> Agreement:
    """Measures agreement over all pairs of different responses in all tasks, and all pairs of labelers."""
    alike = decided = right = clear = tied = num_pairs = 0
    for task in tasks:
        ranks = [labeler.judge(task).ranks for labeler in labelers]
        gold = world.gold_scores([task.prompt[-1].content] * len(task.responses), task.responses)
        for i, j in itertools.combinations(range(len(task.responses)), 2):
            if task.responses[i] == task.responses[j]:
                continue
            signs = [(row[j] > row[i]) - (row[j] < row[i]) for row in ranks]
            gold_sign = (gold[i] > gold[j]) - (gold[i] < gold[j])
            num_pairs += len(signs)
            tied += signs.count(0)
            products = [one * other for one, other in itertools.combinations(signs, 2) if one and other]
            decided += len(products)
            alike += products.count(1)
            if gold_sign:
                clear += len(signs) - signs.count(0)
                right += signs.count(gold_sign)
    return Agreement(between_labelers=alike / decided, with_gold=right / clear, tied=tied / num_pairs)


@pytest.fixture(scope="module")
def agreement() -> Agreement:
    world = PlaygroundWorld(PlaygroundConfig())
    return measure_agreement(world, world.labelers(seed=7), draw_tasks(world, num_tasks=700, num_responses=4, seed=3))


def test_agreement_is_like_peoples(agreement: Agreement) -> None:
    assert agreement.between_labelers == pytest.approx(0.75, abs=0.03)
    assert agreement.with_gold == pytest.approx(0.83, abs=0.03)
    assert 0.01 < agreement.tied < 0.08


def test_without_noise_the_ranks_are_golds() -> None:
    labeler = ScriptedLabeler("exact", length_gold, EXACT, NO_TASTE, seed=0)
    assert labeler.judge(shown("t", "x", "xxx", "", "xxx")).ranks == (2, 1, 3, 1)


def test_judgments_do_not_depend_on_call_order() -> None:
    world = PlaygroundWorld(PlaygroundConfig())
    tasks = draw_tasks(world, num_tasks=30, num_responses=4, seed=1)
    forward = [[labeler.judge(task) for task in tasks] for labeler in world.labelers(seed=5)]
    backward = [[labeler.judge(task) for task in reversed(tasks)][::-1] for labeler in world.labelers(seed=5)]
    assert forward == backward
    assert forward[0] != forward[1]
    assert forward != [[labeler.judge(task) for task in tasks] for labeler in world.labelers(seed=6)]


def test_the_first_response_shown_is_favoured() -> None:
    """Of two responses with equal gold scores the first one shown wins more often, but not without the bias."""

    def share_of_first(position_bias: float) -> float:
        config = dataclasses.replace(EXACT, noise=0.2, position_bias=position_bias)
        labeler = ScriptedLabeler("biased", length_gold, config, NO_TASTE, seed=0)
        answers = [labeler.judge(shown(f"task-{i}", "a", "b")).ranks for i in range(1000)]
        return sum(ranks[0] < ranks[1] for ranks in answers) / sum(ranks[0] != ranks[1] for ranks in answers)

    assert share_of_first(0.0) == pytest.approx(0.5, abs=0.05)
    # A bias of 0.2, and a noise difference with standard deviation 0.2 * sqrt(2): Phi(0.707) = 0.76.
    assert share_of_first(0.2) == pytest.approx(0.76, abs=0.05)


def test_taste_is_beside_gold() -> None:
    config = dataclasses.replace(EXACT, shared_length=0.2, shared_cheer=0.1, length_words=10)
    (labeler,) = draw_labelers(length_gold, config, 1, seed=0, favourites=("kite",))
    utilities = labeler.utilities(shown("t", "one two three four five", "no", "no!!", "kite"))
    # One word earns 0.02; five earn 0.1; an exclamation mark 0.1; own tastes are off, the favourite's too.
    assert utilities == pytest.approx([0.1, 0.02, 0.22, 0.02])


def test_time_is_plausible() -> None:
    labeler = ScriptedLabeler("timed", length_gold, LabelerConfig(), NO_TASTE, seed=0)
    short = labeler.judge(shown("t", "a", "b")).milliseconds
    long = labeler.judge(shown("t", "a " * 60, "b " * 60)).milliseconds
    assert 1_000 < short < 5_000 < long < 60_000


# ---- what the statistics of labels find again ----


def judge_pairs(labeler: ScriptedLabeler, names: Sequence[str]) -> list[Judgment]:
    """Pairs, the better one (by a letter x) shown first every other time."""
    judgments = []
    for index, name in enumerate(names):
        responses = (f"{name.rstrip('+')} x", f"{name.rstrip('+')} y")
        order = (0, 1) if index % 2 else (1, 0)
        answer = labeler.judge(shown(name, *(responses[place] for place in order)))
        ranks = tuple(answer.ranks[order.index(place)] for place in (0, 1))
        judgments.append(
            Judgment(
                name, labeler.name, 1, "answer", ranks, (), (), "", order, "1", answer.milliseconds, "scripted", 0.0
            )
        )
    return judgments


def test_what_a_labeler_was_made_of_is_found_again() -> None:
    """Laziness, noise and a lasting opinion by construction; the statistics see only the answers.

    With a gap of 0.1, opinion 0.1 and noise 0.1 on each response, an attentive answer is right with chance
    Φ(0.1/0.2) = 0.691. The opinion is the same on a repeat: correlation ½ between the two utility differences, and
    P(same) by the bivariate normal.
    """
    config = dataclasses.replace(EXACT, noise=0.1, opinion=0.1, lazy_first=0.15, lazy_random=0.1, tie_threshold=0.0)
    labeler = ScriptedLabeler("lazy", length_gold, config, NO_TASTE, seed=3)
    names = [f"task-{index}" for index in range(2_500)]
    tasks = [
        Task(name, (Message("user", "prompt"),), (f"{name} x", f"{name} y"), ("p", "p"), gold_ranks=(1, 2))
        for name in names
    ]
    repeats = [dataclasses.replace(task, task_id=f"{task.task_id}+", repeat_of=task.task_id) for task in tasks]
    judgments = judge_pairs(labeler, [*names, *(f"{name}+" for name in names)])
    (found,) = summary([*tasks, *repeats], judgments).labelers
    lazy = 0.25
    right = NormalDist().cdf(0.5)
    both_right = float(multivariate_normal([0.5, 0.5], [[1, 0.5], [0.5, 1]]).cdf([0, 0]))
    same_attentive = 1 - 2 * (1 - right) + 2 * both_right
    assert found.gold_accuracy.mean == pytest.approx((1 - lazy) * right + lazy / 2, abs=0.02)
    same = (1 - lazy) ** 2 * same_attentive + 2 * lazy * (1 - lazy) / 2 + lazy**2 / 2
    assert found.self_agreement.mean == pytest.approx(same, abs=0.03)
    assert found.shown_first.mean == pytest.approx(0.5 + 0.15 / 2, abs=0.02)


def test_a_lazy_labeler_takes_no_time() -> None:
    config = dataclasses.replace(EXACT, lazy_random=1.0)
    labeler = ScriptedLabeler("lazy", length_gold, config, NO_TASTE, seed=0)
    answers = [labeler.judge(shown(f"task-{index}", "a " * 90, "b " * 90, "x")) for index in range(300)]
    assert all(300 <= answer.milliseconds <= 900 for answer in answers)
    assert len({answer.ranks for answer in answers}) == 6
    assert answers == [labeler.judge(shown(f"task-{index}", "a " * 90, "b " * 90, "x")) for index in range(300)]


def test_more_than_all_tasks_lazy_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"fractions of all tasks"):
        LabelerConfig(lazy_first=0.6, lazy_random=0.5)


def test_ratings_follow_the_utility_and_change_no_rank() -> None:
    task = shown("t", "x", "xxxxx", "xxxxxxxxxx", "x" * 30, "")
    labeler, rater = (
        ScriptedLabeler("l", length_gold, config, NO_TASTE, 0)
        for config in (EXACT, dataclasses.replace(EXACT, rates=True))
    )
    assert labeler.judge(task).ratings == ()
    assert rater.judge(task).ratings == (2.0, 4.0, 7.0, 7.0, 1.0)  # utilities of .1, .5, 1, 3 and 0
    assert rater.judge(task).ranks == labeler.judge(task).ranks


def test_ratings_of_unread_tasks_follow_their_ranks() -> None:
    """So a label of a task that nobody read is as wrong as its ranking."""
    config = dataclasses.replace(EXACT, rates=True, lazy_random=1.0)
    for task in (shown("t", "x", "xx", "xxx"), shown("u", "x", "xx")):
        answer = ScriptedLabeler("l", length_gold, config, NO_TASTE, 0).judge(task)
        assert sorted(zip(answer.ranks, answer.ratings, strict=True)) == (
            [(1, 7.0), (2, 4.0), (3, 1.0)] if len(answer.ranks) == 3 else [(1, 7.0), (2, 1.0)]
        )
