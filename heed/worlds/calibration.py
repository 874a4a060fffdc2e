"""Measuring how much scripted labelers agree with each other and with the gold score.

InstructGPT's training labelers agreed with each other 72.6% +- 1.5% of the time (Ouyang et al. 2022, arXiv 2203.02155,
section 3.4). The default noise makes ours agree as often on samples of the demo's SFT policy. Careless demonstrations,
which need no trained model, differ more in quality: labelers agree on 75% of their pairs.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from heed.worlds.labelers import ScriptedLabeler
from heed.worlds.world import PlaygroundWorld, draw_prompts
from preferences.records import Message, ShownTask


@dataclass(frozen=True)
class Agreement:
    """Shares of pairs of responses."""

    between_labelers: float  # ranked alike, among pairs that neither labeler ties
    with_gold: float  # ranked like the gold scores, among pairs that differ in gold score and are not tied
    tied: float  # tied by a labeler, among all pairs


def draw_tasks(world: PlaygroundWorld, num_tasks: int, num_responses: int, seed: int) -> list[ShownTask]:
    """Draws prompts with independent careless answers, like those of a policy fine-tuned on the demonstrations."""
    rng = random.Random(f"calibration/{seed}")
    tasks = []
    for number, (prompt, request) in enumerate(draw_prompts(num_tasks, rng, set())):
        responses = tuple(world.answer(request, rng) for _ in range(num_responses))
        tasks.append(ShownTask(f"task-{number}", (Message("user", prompt),), responses))
    return tasks


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
