"""What PPO starts from: the models before it, the unit of their scores, and the pretraining stream.

Shape letters: B responses.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from torch import Tensor

from lm.hub import on_this_machine
from lm.tokenizer import Tokenizer
from reward.external import ExternalReward


@dataclass(frozen=True)
class ScoreScale:
    """Mean and standard deviation of the SFT policy's scores: rewards are in its units (arXiv 1909.08593, 2.1)."""

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
    """Where the models come from, and the pretraining stream that PPO-ptx mixes in, if it does."""

    sft: Path
    reward: Path | ExternalReward
    scale: ScoreScale
    pretraining: TokenStream | None
    adapter_seed: int = 0  # draws new adapters, with `ppo.lora`

    def on_this_machine(self) -> Self:
        """The same models in this machine's folders."""
        reward = on_this_machine(self.reward) if isinstance(self.reward, Path) else self.reward
        return replace(self, sft=on_this_machine(self.sft), reward=reward)

    @property
    def reward_reads_texts(self) -> bool:
        """Whether the reward reads texts, since it is no model or one with another tokenizer than the policy's."""
        return not isinstance(self.reward, Path) or Tokenizer.load(self.reward) != Tokenizer.load(self.sft)
