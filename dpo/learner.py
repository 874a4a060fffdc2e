"""A policy in training, with the probability of ties that its loss may learn in addition."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lm.model import LanguageModel
from lm.source import ModelSource
from reward.learner import NETWORK


class PolicyLearner(nn.Module):
    """Logits and log ν from one forward pass, so that every backend gathers what it shards.

    log ν = start + hidden_size · θ, where θ starts at 0, as in a reward model's training (`reward.learner`).
    """

    def __init__(self, network: LanguageModel, starting_log_nu: float | None) -> None:
        super().__init__()
        self.network, self.starting_log_nu = network, starting_log_nu
        self.nu = nn.Parameter(torch.zeros(1)) if starting_log_nu is not None else None

    def tie(self) -> None:
        """Share the embedding's matrix with the head if the policy's config says so (`lm.source.load`)."""
        self.network.tie()

    def forward(
        self, tokens_BT: Tensor, segments_BT: Tensor, selected_BT: Tensor, sequence_keys_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [C, V] of the positions that `selected_BT` marks True, and log ν, None where it is not learned."""
        logits_CV = self.network(tokens_BT, segments_BT, selected_BT, sequence_keys_BT)
        if self.nu is None or self.starting_log_nu is None:
            return logits_CV, None
        return logits_CV, self.starting_log_nu + self.network.config.hidden_size * self.nu.float()


@dataclass(frozen=True)
class PolicySource:
    """A `PolicyLearner` around a source of its network."""

    network: ModelSource[LanguageModel]
    starting_log_nu: float | None = None

    def build(self) -> PolicyLearner:
        return PolicyLearner(self.network.build(), self.starting_log_nu)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        if self.starting_log_nu is not None:
            yield "nu", torch.zeros(1)
        for name, tensor in self.network.tensors():
            yield NETWORK + name, tensor
