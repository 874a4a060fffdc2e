"""A reward that is a function: `reward_function = "playground.rewards:gold"` in configs/jobs/function.toml.

A function of your own is the same: a file in the folder that `heed` runs in, `reward_function = "my_rewards.py:score"`,
and in it a function from prompts and responses to numbers. None (or an exception) leaves a response out.
"""

from playground.gold import gold_score


def gold(prompts: list[list[dict[str, str]]], responses: list[str]) -> list[float | None]:
    """The playground's own judge, from 0 to 1, where labelers and a reward model see it only through noise."""
    asked = [messages[-1]["content"] for messages in prompts]
    return [gold_score(prompt, response) for prompt, response in zip(asked, responses, strict=True)]
