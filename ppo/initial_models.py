"""What PPO starts from: the initial models, the scale of their scores, the pretraining stream, and the initial value
function.

Shape letters: B responses, O objectives.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from lm.hub import on_this_machine
from lm.layers import Fp32Linear
from lm.model import SCORE, LanguageModel, ScalarModel
from lm.source import ModelSource, on_meta
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder, WithNewHead, purpose_of
from reward.external import ExternalReward
from reward.scoring import weights_by_label


@dataclass(frozen=True)
class ScoreScale:
    """Mean and standard deviation of the SFT policy's scores, which normalise rewards (arXiv 1909.08593, 2.1)."""

    mean: float
    std: float

    def apply(self, scores_B: Tensor) -> Tensor:
        return (scores_B - self.mean) / self.std


@dataclass(frozen=True)
class TokenStream:
    """A file of tokens, cut into rows."""

    path: Path
    seq_len: int


@dataclass(frozen=True)
class InitialModels:
    """Where the models come from, and the pretraining stream if PPO-ptx mixes one in."""

    sft: Path
    reward: Path | ExternalReward
    scale: ScoreScale
    pretraining: TokenStream | None
    adapter_seed: int = 0  # draws new adapters, with `ppo.lora`

    def on_this_machine(self) -> Self:
        """Returns the same models with their folders on this machine."""
        reward = on_this_machine(self.reward) if isinstance(self.reward, Path) else self.reward
        return replace(self, sft=on_this_machine(self.sft), reward=reward)

    @property
    def reward_reads_texts(self) -> bool:
        """Whether the reward reads texts: it is not a model, or its tokenizer differs from the policy's."""
        return not isinstance(self.reward, Path) or Tokenizer.load(self.reward) != Tokenizer.load(self.sft)


def value_source(
    policy: Path, reward: Path | ExternalReward, weights: Mapping[str, float], scale: ScoreScale
) -> ModelSource[ScalarModel]:
    """Returns the initial value function: the reward model, scaled to predict in the rewards' units. The heads of
    several objectives become one, which gives the weighted sum of their scores.

    A reward that is not a decoder with the policy's tokenizer cannot score a half-written response. Then the value
    function starts as the policy with a new head that predicts 0, the mean of the rewards.

    Raises:
        ValueError: the weights do not fit the reward model.
    """
    if isinstance(reward, Path) and purpose_of(reward) == "score" and Tokenizer.load(reward) == Tokenizer.load(policy):
        return joined_heads(ModelFolder(reward, ScalarModel), reward, weights, scale)
    return JoinedHeads(WithNewHead(policy, LanguageModel, ScalarModel, seed=0), (0.0,), 0.0)


def joined_heads(
    source: ModelSource[ScalarModel], reward: Path, weights: Mapping[str, float], scale: ScoreScale
) -> "JoinedHeads":
    """Returns a model of the weighted sum of a reward model's scores, in the rewards' units. Raises: as
    `value_source`.
    """
    by_label = weights_by_label(str(reward), on_meta(source.build).labels, weights)
    return JoinedHeads(source, tuple(weight / scale.std for weight in by_label.values()), -scale.mean / scale.std)


@dataclass(frozen=True)
class JoinedHeads:
    """A scalar model with a single head: Σ factor · score + shift over another model's heads, which is again linear."""

    source: ModelSource[ScalarModel]
    factors: tuple[float, ...]  # by head
    shift: float

    def build(self) -> ScalarModel:
        model = self.source.build()
        if len(model.labels) > 1:
            model.labels, model.bias = (SCORE,), torch.zeros(())
            model.score = Fp32Linear(model.config.hidden_size, 1, bias=False)
        return model

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        factors_O = torch.tensor(self.factors)
        for name, tensor in self.source.tensors():
            if name == "score.weight":
                yield name, (factors_O[:, None] * tensor).sum(dim=0, keepdim=True)
            elif name == "bias":
                yield name, (factors_O * tensor).sum() + self.shift
            else:
                yield name, tensor
