"""Reward functions of the playground, such as `function = "heed.worlds.rewards:gold"` of configs/jobs/function.toml.

Write your own in the same way: a file in the folder in which `heed` runs, `function = "my_rewards.py:score"`, with a
function from prompts and responses to numbers. None (or an exception) leaves a response out.
"""

from heed.worlds.gold import gold_score


def gold(prompts: list[list[dict[str, str]]], responses: list[str]) -> list[float | None]:
    """Returns the playground's gold scores, from 0 to 1, which labelers and reward models see only through noise."""
    asked = [messages[-1]["content"] for messages in prompts]
    return [gold_score(prompt, response) for prompt, response in zip(asked, responses, strict=True)]
