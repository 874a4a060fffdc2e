"""What learners, generators and scorers have in common on a rank.

Shape letters: B responses, T tokens, R response tokens, C counted positions, V vocabulary.
"""

import torch
from torch import Tensor, nn

from lm.logprobs import token_logprobs
from lm.progress import note_progress
from lm.tokenizer import Tokenizer
from lm.upload import upload
from ppo.broadcast import WeightBroadcast
from ppo.config import PPOConfig
from ppo.initial_models import InitialModels
from ppo.rollout import Rollout
from training.config import EngineConfig


class Rank:
    """One rank of a role. The batches it is given are its own share; the counts in them are global."""

    def __init__(self, config: PPOConfig, engine_config: EngineConfig, models: InitialModels) -> None:
        self.config, self.engine_config, self.models = config, engine_config, models.on_this_machine()
        self.tokenizer = Tokenizer.load(self.models.sft)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._compute_dtype = torch.bfloat16 if engine_config.resolved_precision() == "bf16" else torch.float32

    def _parts(self, rollout: Rollout) -> list[Rollout]:
        size = self.config.minibatch.micro_batch_size
        return [rollout.rows(slice(start, start + size)) for start in range(0, len(rollout), size)]

    def _logprobs(self, model: nn.Module, rollout: Rollout) -> Tensor:
        """log π of the response tokens [B, R] at the sampling temperature."""
        note_progress()
        logits_CV = model(upload(rollout.tokens_BT, self.device), None, rollout.states_BT)
        targets_C = upload(rollout.response_BR[rollout.response_mask_BR], self.device)
        return rollout.spread(token_logprobs(logits_CV, targets_C, self.config.temperature))

    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def open_broadcast(self, host: str, port: int, rank: int, num_ranks: int) -> None:
        """Join the group that weights are broadcast in; a collective call of the sender and all receivers."""
        seconds = self.engine_config.collective_timeout_seconds
        self.broadcast = WeightBroadcast(host, port, rank, num_ranks, device=self.device, timeout_seconds=seconds)

    def close(self) -> None:
        """Release memory."""
