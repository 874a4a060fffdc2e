"""How far a sampler's log-probs of the tokens it sampled may be from the learner's: rounding, and no more."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from training.config import Precision

# Nats per token, mean of |difference|. The debug job's: 2e-7 in fp32 and .005 in bf16 with Heed's own sampler.
MAX_DIFFERENCE: dict[Precision, float] = {"fp32": 0.001, "bf16": 0.05}
MAX_RATIO_ERROR = 0.02  # of the mean ratio π_learner / π_sampler, which is 1 + rounding over tokens from π_sampler
MIN_TOKENS = 64  # fewer say nothing about the mean ratio, which then depends on a few unlikely tokens


@dataclass(frozen=True)
class Agreement:
    """The mean |log π_learner - log π_sampler| of sampled tokens, in nats, and the mean ratio π_learner / π_sampler."""

    difference: float
    ratio: float
    num_tokens: int

    @classmethod
    def of(cls, difference_C: Tensor) -> Self:
        """`difference_C` is log π_learner - log π_sampler of each sampled token; C counts tokens."""
        return cls(float(difference_C.abs().mean()), float(difference_C.exp().mean()), len(difference_C))

    def holds(self, precision: Precision) -> bool:
        """Whether both are one policy, up to rounding in this precision; NaN is not."""
        is_near = self.difference <= MAX_DIFFERENCE[precision]
        return is_near and (self.num_tokens < MIN_TOKENS or abs(self.ratio - 1) <= MAX_RATIO_ERROR)
