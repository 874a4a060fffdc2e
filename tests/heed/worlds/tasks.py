"""Tasks of the playground for tests of labelers."""

import random

from heed.worlds.world import PlaygroundWorld, draw_prompts
from preferences.records import Message, ShownTask


def draw_tasks(world: PlaygroundWorld, num_tasks: int, num_responses: int, seed: int) -> list[ShownTask]:
    """Draws prompts with independent careless answers, like those of a policy fine-tuned on the demonstrations."""
    rng = random.Random(f"calibration/{seed}")
    tasks = []
    for number, (prompt, request) in enumerate(draw_prompts(num_tasks, rng, set())):
        responses = tuple(world.answer(request, rng) for _ in range(num_responses))
        tasks.append(ShownTask(f"task-{number}", (Message("user", prompt),), responses))
    return tasks
