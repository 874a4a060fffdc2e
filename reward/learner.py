"""A reward model in training, with the few extra parameters that its losses learn in addition to the scores."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lm.source import ModelSource
from reward.comparisons import Comparison
from reward.scoring import RewardNetwork, scores_of

Ties = Literal["soft", "davidson"]
NETWORK = "network."  # before the names of the reward model's own weights


@dataclass(frozen=True)
class AuxiliaryParameters:
    """Initial values per objective of what is learned in addition to the scores: log ν, and the scale of ratings.

    `log_nu` is () if ties are soft labels; `rating_std` is () if ratings are not learned, and 0 for an objective
    without ratings. Ratings enter the loss in units of `rating_std`, their spread around each verdict's mean, so the
    loss's weight means the same on any rating scale.
    """

    log_nu: tuple[float, ...] = ()
    rating_std: tuple[float, ...] = ()

    def learned(self, weights: Mapping[str, Tensor], hidden_size: int, objective: int) -> dict[str, float]:
        """Returns the learned values of one objective: ν, and how many rating points a unit of score is worth."""
        found = {}
        if self.log_nu:
            found["nu"] = math.exp(self.log_nu[objective] + hidden_size * float(weights["nu"][objective]))
        if self.rating_std and self.rating_std[objective]:
            found["rating_scale"] = self.rating_std[objective] * math.exp(
                hidden_size * float(weights["rating"][objective])
            )
        return found


class RewardLearner(nn.Module):
    """Scores, log ν and the scale of ratings from one forward pass, so that every backend gathers what it shards.

    An auxiliary parameter θ starts at 0 and is scaled by the hidden size: log ν = start + hidden_size · θ. So AdamW
    moves it as fast as the head moves a score, which is a sum over the hidden size.
    """

    def __init__(self, network: RewardNetwork, auxiliary: AuxiliaryParameters) -> None:
        super().__init__()
        self.network, self.auxiliary, self.gain = network, auxiliary, network.config.hidden_size
        self.nu = nn.Parameter(torch.zeros(len(auxiliary.log_nu))) if auxiliary.log_nu else None
        self.rating = nn.Parameter(torch.zeros(len(auxiliary.rating_std))) if auxiliary.rating_std else None

    def forward(self, *read: Tensor | None, sequence_keys_BT: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns scores [sequences, objectives]; and log ν and the scale of ratings, [objectives] or empty if not
        learned.
        """
        scores = scores_of(self.network, read, sequence_keys_BT)
        log_nu = scale = scores.new_zeros(0)
        if self.nu is not None:
            log_nu = scores.new_tensor(self.auxiliary.log_nu) + self.gain * self.nu.float()
        if self.rating is not None:
            scale = (self.gain * self.rating.float()).exp()
        return scores, log_nu, scale


@dataclass(frozen=True)
class LearnerSource:
    """A source of a `RewardLearner`, from a source of its network."""

    network: ModelSource[RewardNetwork]
    auxiliary: AuxiliaryParameters

    def build(self) -> RewardLearner:
        return RewardLearner(self.network.build(), self.auxiliary)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        if self.auxiliary.log_nu:
            yield "nu", torch.zeros(len(self.auxiliary.log_nu))
        if self.auxiliary.rating_std:
            yield "rating", torch.zeros(len(self.auxiliary.rating_std))
        for name, tensor in self.network.tensors():
            yield NETWORK + name, tensor


def network_weights(weights: Iterable[tuple[str, Tensor]], others: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields the reward model's weights among a learner's, under the model's own names; the rest goes into `others`."""
    for name, tensor in weights:
        if name.startswith(NETWORK):
            yield name.removeprefix(NETWORK), tensor
        else:
            others[name] = tensor
        del tensor  # before the next one is gathered


def starting_log_nu(comparisons: Sequence[Comparison], objective: int) -> float:
    """Returns the log ν at which responses of equal score tie as often as this objective's did: P(tie) = ν / (2 + ν).

    Half a pair is added to the ties and half to the other pairs, so the value is always finite.
    """
    ties, pairs = 0.5, 1.0
    for verdict in (v for c in comparisons for v in c.verdicts if c.objective == objective):
        ties += sum(math.comb(verdict.ranks.count(rank), 2) for rank in set(verdict.ranks))
        pairs += math.comb(len(verdict.ranks), 2)
    return math.log(2 * ties / (pairs - ties))


def spread_of_ratings(comparisons: Sequence[Comparison], objective: int) -> float:
    """Returns the root mean square distance of an objective's ratings from their verdict's mean; 0 without ratings."""
    rated = [v.ratings for c in comparisons for v in c.verdicts if v.ratings and c.objective == objective]
    squares = [(rating - sum(ratings) / len(ratings)) ** 2 for ratings in rated for rating in ratings]
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0
