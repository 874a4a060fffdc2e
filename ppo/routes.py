"""What replaying the sampler's routes changes (arXiv 2510.11370): how many the learner's routers would have chosen
otherwise, and how far its log-probs would then be from the sampler's.

Shape letters: L layers, N tokens of a pass, B responses, R response tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from lm.config import ModelConfig
from lm.experts import Replay
from ppo.config import PPOConfig
from ppo.rollout import Rollout

NUM_UNREPLAYED = 4  # responses of each rank's share, its first ones, whose log-probs are also computed without replay


def require_routes(config: PPOConfig, policy: ModelConfig) -> None:
    """Check that a policy whose routes are to be replayed has some. Raises: ValueError if it does not."""
    if config.router_replay and not policy.num_experts:
        raise ValueError(
            "ppo.router_replay is true, but the policy is not a mixture of experts; no such line was expected"
        )


@dataclass(frozen=True)
class RouteChanges:
    """Sums over a rollout, or over a rank's share of it."""

    changed_L: Tensor  # routes for which the router would have chosen another set of experts
    recorded_L: Tensor
    difference: Tensor  # Σ |log π_learner - log π_sampler| without replay, nats, over the first tokens of each share
    num_tokens: Tensor  # of that sum

    @classmethod
    def of(cls, replays: Sequence[Replay], rollout: Rollout, unreplayed_BR: Tensor) -> Self:
        """`replays` are of the policy's passes; `unreplayed_BR` are log-probs of the rollout's first responses."""
        is_written_BR = rollout.written_BR[: len(unreplayed_BR)]
        sampler_BR = rollout.behaviour_logprobs_BR[: len(unreplayed_BR)]
        return cls(
            torch.stack([replay.differs_LN.sum(dim=1) for replay in replays]).sum(dim=0).cpu(),
            torch.stack([replay.is_recorded_LN.sum(dim=1) for replay in replays]).sum(dim=0).cpu(),
            (unreplayed_BR - sampler_BR)[is_written_BR].abs().sum(),
            is_written_BR.sum(),
        )

    def __add__(self, other: "RouteChanges") -> "RouteChanges":
        return RouteChanges(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def metrics(self) -> Mapping[str, float]:
        share_L = (self.changed_L / self.recorded_L)[self.recorded_L > 0]  # layers without experts have no routes
        return {
            "routes_changed": float(self.changed_L.sum() / self.recorded_L.sum()),
            "routes_changed_worst_layer": float(share_L.max()),
            "sampler_difference_unreplayed": float(self.difference / self.num_tokens),
        }
