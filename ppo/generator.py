"""Sampling from a copy of the policy: what each rank does, and all ranks' samples as one rollout."""

from collections.abc import Iterable, Sequence

from cluster.remote import Handle, Pending
from lm.samplers.engine import SamplingEngine
from lm.samplers.own import HeedSampler
from lm.samplers.sent_weights import SentWeights, chunks, whole_digest
from ppo.config import PPOConfig
from ppo.initial_models import InitialModels
from ppo.rank import Rank
from ppo.rollout import Rollout, equal_slices
from training.config import EngineConfig


class Generators:
    """The generators of all ranks, as the controller calls them: with whole batches, which are split by rank."""

    def __init__(self, ranks: Handle["Generator"]) -> None:
        self.ranks = ranks
        # Waits until the weights sent last have arrived; all ranks begin with the SFT policy's.
        self.weights_arrived: Pending[object] = lambda: None

    def start_sampling(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, again: bool = False
    ) -> Pending[Rollout]:
        """Begin one response to each prompt, each from its own seed, with the weights sent last before this call.

        `rows` say which of the job's prompts these are. Where generators are other processes this returns at once, and
        rollouts are made in the order of the calls. That the weights arrived is proved before a rollout is returned.
        With `again`, the next call samples with the same weights.
        """
        weights_arrived = self.weights_arrived
        slices = equal_slices(len(prompts), self.ranks.num_ranks)
        parts = self.ranks.start_split(Generator.generate, [(rows[s], prompts[s], seeds[s], again) for s in slices])

        def collect() -> Rollout:
            weights_arrived()
            return Rollout.join(parts())

        return collect


class Generator(Rank):
    """Holds a sampler, and makes rollouts of what it samples."""

    def __init__(self, config: PPOConfig, engine_config: EngineConfig, models: InitialModels) -> None:
        super().__init__(config, engine_config, models)
        precision = engine_config.resolved_precision()
        on_own_device = config.placement == "disaggregated"
        self.sampler: SamplingEngine
        if config.generator == "vllm":
            from lm.samplers.vllm_engine import VLLMSampler

            self.sampler = VLLMSampler.load(self.models.sft, precision, on_own_device=on_own_device)
        else:
            self.sampler = HeedSampler.load(self.models.sft, precision, keeps_steps=on_own_device)
        # Samples are learned from before the next are drawn, and that brings other weights.
        self._sleeps = config.memory != "fast" and config.placement == "colocated"

    def generate(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], seeds: Sequence[int], again: bool = False
    ) -> Rollout:
        config = self.config
        sampled = self.sampler.sample(
            prompts, seeds, max_new_tokens=config.max_new_tokens, temperature=config.temperature
        )
        sampled_by = whole_digest(self.sampler.digests)
        if self._sleeps and not again:
            self.sampler.sleep()
        return Rollout.of(
            rows,
            prompts,
            sampled.responses,
            sampled.finished,
            sampled.logprobs,
            max_new_tokens=config.max_new_tokens,
            pad_id=self.tokenizer.pad_id,
            sampled_by=sampled_by,
        )

    def receive(self, sent: Iterable[SentWeights]) -> None:
        """Take the learner's weights; comparing digests on both sides proves that they arrived."""
        self.sampler.wake()
        self.sampler.receive(sent)

    def receive_broadcast(self) -> None:
        """As `receive`, when the first learner broadcasts."""
        self.sampler.wake()
        slots = chunks(self.sampler.slots())
        self.sampler.receive(SentWeights(chunk, self.broadcast.receive(chunk)) for chunk in slots)

    def close(self) -> None:
        self.sampler.close()
