"""Sampling from a copy of the policy: `Generators` on all ranks, `Generator` on one."""

from collections.abc import Iterable, Sequence

from cluster.remote import Handle, Pending
from lm.samplers.engine import SamplingEngine, SentWeights, chunks, whole_digest
from lm.samplers.own import HeedSampler
from ppo.config import PPOConfig
from ppo.rank import InitialModels, Rank
from ppo.rollout import Rollout, equal_slices
from training.config import EngineConfig


class Generators:
    """The generators of all ranks. The controller passes whole batches, which are split among the ranks."""

    def __init__(self, ranks: Handle["Generator"]) -> None:
        self.ranks = ranks
        # Waits until the weights last sent have arrived. All ranks start with the SFT policy's.
        self.weights_arrived: Pending[object] = lambda: None

    def start_sampling(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, again: bool = False
    ) -> Pending[Rollout]:
        """Start sampling one response to each prompt, each from its own seed, with the last weights sent before this
        call.

        `rows` are the prompts' row numbers in the job's prompts. If generators are other processes, this returns at
        once, and rollouts are sampled in the order of calls. That the weights arrived is checked before a rollout is
        returned. Pass `again` if the next call samples with the same weights.
        """
        weights_arrived = self.weights_arrived
        slices = equal_slices(len(prompts), self.ranks.num_ranks)
        parts = self.ranks.start_split(Generator.generate, [(rows[s], prompts[s], seeds[s], again) for s in slices])

        def collect() -> Rollout:
            weights_arrived()
            return Rollout.join(parts())

        return collect


class Generator(Rank):
    """Holds a sampler, and turns its samples into rollouts."""

    def __init__(self, config: PPOConfig, engine_config: EngineConfig, models: InitialModels) -> None:
        super().__init__(config, engine_config, models)
        precision = engine_config.resolved_precision()
        on_own_device = not config.placement.roles_share_ranks
        self.sampler: SamplingEngine
        if config.sampler.has_own_process:
            from lm.samplers.vllm_engine import VLLMSampler

            self.sampler = VLLMSampler.load(self.models.sft, precision, on_own_device=on_own_device)
        else:
            self.sampler = HeedSampler.load(self.models.sft, precision, keeps_steps=on_own_device)
        # A colocated sampler gets new weights before it samples again, so it can release the old ones in between.
        self._sleeps = config.memory != "fast" and config.placement.roles_share_ranks

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
        """Receive the learner's weights. Comparing digests of both sides proves that they arrived."""
        self.sampler.wake()
        self.sampler.receive(sent)

    def receive_broadcast(self) -> None:
        """As `receive`, from the first learner's broadcast."""
        self.sampler.wake()
        slots = chunks(self.sampler.slots())
        self.sampler.receive(SentWeights(chunk, self.broadcast.receive(chunk)) for chunk in slots)

    def close(self) -> None:
        self.sampler.close()
