"""A rank that samples from a copy of the policy."""

from collections.abc import Sequence

from lm.generation import generate
from lm.sampling import Choice
from lm.weights import load_language_model
from ppo.config import PPOConfig
from ppo.initial_models import InitialModels
from ppo.rank import Rank, SentWeights, checksum_of
from ppo.rollout import Rollout
from training.config import EngineConfig


class GeneratorWorker(Rank):
    """Holds a copy of the policy in compute precision, and samples from it."""

    def __init__(self, config: PPOConfig, engine_config: EngineConfig, models: InitialModels, num_workers: int) -> None:
        super().__init__(config, engine_config, models, num_workers)
        self.generator = load_language_model(models.sft).to(self.device, self._compute_dtype).eval()

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Rollout:
        sampled = generate(
            self.generator,
            prompts,
            max_new_tokens=self.config.max_new_tokens,
            end_id=self.tokenizer.end_id,
            choice=Choice(self.config.temperature),
            seeds=seeds,
        )
        return Rollout.of(
            prompts,
            sampled.responses,
            sampled.finished,
            sampled.logprobs,
            max_new_tokens=self.config.max_new_tokens,
            pad_id=self.tokenizer.pad_id,
        )

    def receive(self, sent: SentWeights) -> None:
        """Take the learner's weights; a checksum over both sides proves it."""
        self.generator.load_state_dict(sent.weights)
        self._require(sent.checksum)

    def receive_broadcast(self) -> None:
        """As `receive`, from the sender's `broadcast_weights`."""
        self._require(self.broadcast.receive(self.generator.state_dict()))

    def _require(self, checksum: int) -> None:
        held = checksum_of(self.generator.state_dict())
        assert checksum == held, f"the generator holds weights with checksum {held}; the learner's have {checksum}"
