"""The value function's initial weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lm.config import ModelConfig
from lm.model import LanguageModel, ScalarModel
from lm.source import ModelSource, on_meta
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder, WithNewHead, purpose_of
from ppo.initial_models import ScoreScale
from reward.external import ExternalReward
from reward.scoring import weights_by_label


def value_source(
    policy: Path, reward: Path | ExternalReward, weights: Mapping[str, float], scale: ScoreScale
) -> ModelSource[ScalarModel]:
    """The value function starts as the reward model, with predictions in the rewards' units. The heads of several
    objectives become one, which gives the weighted sum of their scores.

    A reward that is not a decoder of the policy's tokens cannot score a half-written response. Then the value function
    starts as the policy, with predictions of 0, the mean of the rewards.

    Raises:
        ValueError: the weights do not fit the reward model.
    """
    if isinstance(reward, Path) and purpose_of(reward) == "score" and Tokenizer.load(reward) == Tokenizer.load(policy):
        heads = ModelFolder(reward, ScalarModel)
        model = on_meta(heads.build)
        factors = [weight / scale.std for weight in weights_by_label(str(reward), model.labels, weights).values()]
        return JoinedHeads(heads, model.config, tuple(factors), -scale.mean / scale.std)
    head = WithNewHead(policy, LanguageModel, ScalarModel, seed=0)
    return JoinedHeads(head, on_meta(head.build).config, (0.0,), 0.0)


@dataclass(frozen=True)
class JoinedHeads:
    """A scalar model with one head, Σ factor · score + shift over another's heads: a sum of linear maps is linear."""

    source: ModelSource[ScalarModel]
    config: ModelConfig
    factors: tuple[float, ...]  # by head
    shift: float

    def build(self) -> ScalarModel:
        return ScalarModel(self.config)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        factors_O = torch.tensor(self.factors)
        for name, tensor in self.source.tensors():
            if name == "score.weight":
                yield name, (factors_O[:, None] * tensor).sum(dim=0, keepdim=True)
            elif name == "bias":
                yield name, (factors_O * tensor).sum() + self.shift
            else:
                yield name, tensor
