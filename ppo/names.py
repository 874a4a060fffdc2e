"""What reports call a run's initial policy, its algorithm, and the source of its scores."""

from pathlib import PurePath

from ppo.config import PPOConfig
from stages.reports.text import DEFAULT_NAMES, INITIAL_POLICY, Names

ALGORITHMS = {"gae": "PPO", "group_mean": "GRPO", "leave_one_out": "RLOO", "none": "REINFORCE"}


def names_of(config: PPOConfig | None, *, starts_from_sft: bool) -> Names:
    """Returns the names of a run with this [ppo] section, or without one."""
    initial = DEFAULT_NAMES.initial if starts_from_sft else INITIAL_POLICY
    if config is None:
        return Names(initial)
    return Names(initial, ALGORITHMS[config.advantage], _scorer(config))


def _scorer(config: PPOConfig) -> str:
    """Returns "checks.py:reward" for a function in a file, whose folder says nothing to a reader."""
    place, colon, name = config.reward_function.rpartition(":")
    if colon:
        return f"{PurePath(place).name}:{name}" if place.endswith(".py") else config.reward_function
    return config.reward_url or DEFAULT_NAMES.scorer
