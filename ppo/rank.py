"""What learners, generators and scorers have in common on a rank.

Shape letters: B responses, R response tokens, C counted positions, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from lm.logprobs import token_logprobs
from lm.progress import note_progress
from lm.tokenizer import Tokenizer
from ppo.broadcast import WeightBroadcast
from ppo.config import PPOConfig
from ppo.initial_models import InitialModels
from ppo.packed import PackedRollout
from ppo.rollout import Rollout
from training.config import EngineConfig


class Rank:
    """One rank of a role. The batches it is given are its own share; the counts in them are global."""

    def __init__(self, config: PPOConfig, engine_config: EngineConfig, models: InitialModels) -> None:
        self.config, self.engine_config, self.models = config, engine_config, models.on_this_machine()
        self.tokenizer = Tokenizer.load(self.models.sft)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._compute_dtype = torch.bfloat16 if engine_config.resolved_precision() == "bf16" else torch.float32

    @property
    def _autocast(self) -> bool:
        """Whether autocast rounds weights to bf16 at each use, as for the learner without ZeRO; under ZeRO the
        learner's weights are bf16 themselves. The frozen models round where the learner does, so that the KL to the
        reference starts at exactly 0.
        """
        return self._compute_dtype == torch.bfloat16 and self.engine_config.zero_stage == 0

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast)

    def _by_pass(self, measure: Callable[[Rollout], Tensor], rollout: Rollout, pass_sizes: Sequence[int]) -> Tensor:
        """What is measured of each response [B, R], pass by pass."""
        return self._joined(map(measure, rollout.parts(pass_sizes)), pass_sizes)

    @staticmethod
    def _joined(outputs: Iterable[Tensor], pass_sizes: Sequence[int]) -> Tensor:
        """The passes' outputs of all responses [B, R], without the rows that fill a pass up."""
        return torch.cat([output.detach()[:size] for output, size in zip(outputs, pass_sizes, strict=True)]).cpu()

    def _logprobs(self, model: nn.Module, rollout: Rollout) -> Tensor:
        """log π of the response tokens [B, R] at the sampling temperature."""
        note_progress()
        packed = PackedRollout.of(rollout, self.device)
        logits_CV = model(packed.tokens_LT, packed.segments_LT, packed.states_LT)
        return packed.spread(token_logprobs(logits_CV, packed.targets_C, self.config.temperature))

    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def open_broadcast(self, host: str, port: int, rank: int, num_ranks: int) -> None:
        """Join the group that weights are broadcast in; a collective call of the sender and all receivers."""
        seconds = self.engine_config.collective_timeout_seconds
        self.broadcast = WeightBroadcast(host, port, rank, num_ranks, device=self.device, timeout_seconds=seconds)

    def close(self) -> None:
        """Release memory."""
