"""Advantages without a value function: responses to one prompt are compared with each other (docs/algorithms.md).

Shape letters: B responses, of which each K neighbours answer one prompt; G prompts; R response tokens.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ppo.algorithm import generalised_advantages, whiten
from ppo.config import PPOConfig

# Rewards are in standard deviations of the initial policy's scores. Those of a group that differ by less than this are
# equal up to rounding: to divide by their deviation would make advantages of rounding errors.
MIN_SPREAD = 1e-4


@dataclass(frozen=True)
class Advantages:
    """Advantages without a value function, the tokens that the policy loss counts, and metrics of the groups."""

    advantages_BR: Tensor  # 0 where not counted
    counted_BR: Tensor  # True = counted: a scored response of a group whose rewards differ
    metrics: dict[str, float]

    @classmethod
    def of(cls, rewards_BR: Tensor, mask_BR: Tensor, config: PPOConfig) -> "Advantages":
        """From token rewards, as `config` says; `mask_BR` is True at the tokens of scored responses.

        Without a baseline, a token's advantage is the sum of the rewards from it on, which is its return (REINFORCE++,
        arXiv 2501.03262). With one, the response is a single action: each token has the advantage of the whole
        sum of rewards, the KL penalty included (arXiv 2402.14740).
        """
        metrics: dict[str, float] = {}
        if config.has_group_baseline:
            scale: Literal["group", "none"] = "group" if config.advantage_scale == "group" else "none"
            returns_B, scored_B = torch.where(mask_BR, rewards_BR, 0.0).sum(dim=1), mask_BR.any(dim=1)
            advantages_B, informative_B = group_advantages(
                returns_B, scored_B, config.samples_per_prompt, leave_one_out=config.advantage == "leave_one_out",
                scale=scale,
            )  # fmt: skip
            counted_BR = mask_BR & informative_B[:, None]
            advantages_BR = torch.where(counted_BR, advantages_B[:, None], 0.0)
            metrics = _group_metrics(informative_B, scored_B, config.samples_per_prompt)
        else:
            counted_BR = mask_BR
            advantages_BR, _ = generalised_advantages(rewards_BR, torch.zeros_like(rewards_BR), mask_BR, 1.0, 1.0)
        if config.advantage_scale == "batch" and bool(counted_BR.any()):
            advantages_BR = whiten(advantages_BR, counted_BR)
        return cls(advantages_BR, counted_BR, metrics)


def group_advantages(
    returns_B: Tensor,
    scored_B: Tensor,
    samples_per_prompt: int,
    *,
    leave_one_out: bool,
    scale: Literal["group", "none"],
) -> tuple[Tensor, Tensor]:
    """Advantages [B] of responses, and whether each is informative [B]: scored, in a group whose rewards differ.

    The baseline is the mean return of the group's n scored responses (arXiv 2402.03300), or of the n - 1 others (arXiv
    2402.14740), which is the former times n / (n - 1). `scale` "group" divides by the returns' standard
    deviation with n - 1 in its denominator. A response without a score counts in no mean, no deviation and no number;
    a group with fewer than two scored responses, or with equal returns, has advantages of 0.
    """
    scored_GK = scored_B.view(-1, samples_per_prompt)
    returns_GK = torch.where(scored_GK, returns_B.view(-1, samples_per_prompt), 0.0)
    num_scored_G1 = scored_GK.sum(dim=1, keepdim=True)
    mean_G1 = returns_GK.sum(dim=1, keepdim=True) / num_scored_G1.clamp(min=1)
    advantages_GK = torch.where(scored_GK, returns_GK - mean_G1, 0.0)
    others_G1 = (num_scored_G1 - 1).clamp(min=1)
    spread_G1 = advantages_GK.amax(dim=1, keepdim=True) - advantages_GK.amin(dim=1, keepdim=True)
    informative_GK = scored_GK & (num_scored_G1 > 1) & (spread_G1 >= MIN_SPREAD)
    if leave_one_out:
        advantages_GK = advantages_GK * num_scored_G1 / others_G1
    if scale == "group":
        deviation_G1 = ((returns_GK - mean_G1).square() * scored_GK).sum(dim=1, keepdim=True).div(others_G1).sqrt()
        advantages_GK = advantages_GK / torch.where(informative_GK, deviation_G1, 1.0)
    return torch.where(informative_GK, advantages_GK, 0.0).flatten(), informative_GK.flatten()


def informative_groups(
    rewards_B: Tensor, scored_B: Tensor, samples_per_prompt: int, num_groups: int
) -> tuple[Tensor, float]:
    """Rows of the first `num_groups` groups whose rewards differ, and the share of all groups whose do. If they are too
    few, the first of the other groups join them. Groups stay in order.
    """
    _, informative_B = group_advantages(rewards_B, scored_B, samples_per_prompt, leave_one_out=False, scale="none")
    informative_G = informative_B.view(-1, samples_per_prompt).any(dim=1)
    preferred_G = (~informative_G).to(torch.int8).argsort(stable=True)
    kept_G1 = preferred_G[:num_groups].sort().values[:, None]
    rows = (kept_G1 * samples_per_prompt + torch.arange(samples_per_prompt)).flatten()
    return rows, float(informative_G.float().mean())


def _group_metrics(informative_B: Tensor, scored_B: Tensor, samples_per_prompt: int) -> dict[str, float]:
    """How many groups of at least two scored responses have equal returns, and which share of all groups differs."""
    informative_G = informative_B.view(-1, samples_per_prompt).any(dim=1)
    comparable_G = scored_B.view(-1, samples_per_prompt).sum(dim=1) > 1
    return {
        "zero_variance_groups": float((comparable_G & ~informative_G).sum()),
        "informative_share": float(informative_G.float().mean()),
    }
