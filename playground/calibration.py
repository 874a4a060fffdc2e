"""How far labelers agree: with one another, and with the gold score.

InstructGPT's training labelers agreed with one another 72.6% +- 1.5% of the time (Ouyang et al. 2022,
arXiv 2203.02155, section 3.4); the default noise is set so that ours do so too on what the demo's SFT policy samples.
Careless demonstrations, which need no trained model, lie further apart, and labelers agree on 75% of their pairs.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from playground.labelers import ScriptedLabeler
from playground.world import PlaygroundWorld, draw_prompts
from preferences.records import Message, ShownTask


@dataclass(frozen=True)
class Agreement:
    """Shares of pairs of responses."""

    between_labelers: float  # of the pairs that neither labeler ties, those ranked alike
    with_gold: (
        float  # of the pairs that the labeler does not tie and whose gold scores differ, those ranked as gold does
    )
    tied: float  # of all pairs, those that a labeler ties


def draw_tasks(world: PlaygroundWorld, num_tasks: int, num_responses: int, seed: int) -> list[ShownTask]:
    """Prompts with independent careless answers, as a policy fine-tuned on the demonstrations would give."""
    rng = random.Random(f"calibration/{seed}")
    tasks = []
    for number, (prompt, request) in enumerate(draw_prompts(num_tasks, rng, set())):
        responses = tuple(world.answer(request, rng) for _ in range(num_responses))
        tasks.append(ShownTask(f"task-{number}", (Message("user", prompt),), responses))
    return tasks


def measure_agreement(
    world: PlaygroundWorld, labelers: Sequence[ScriptedLabeler], tasks: Sequence[ShownTask]
) -> Agreement:
    """Agreement over all pairs of different responses of all tasks, and all pairs of labelers."""
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
