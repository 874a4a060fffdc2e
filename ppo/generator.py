"""Sampling from a copy of the policy: what each rank does, and all ranks' samples as one rollout."""

from collections.abc import Iterable, Sequence
from typing import Literal

from cluster.remote import Handle, Pending
from lm.generation import generate
from lm.graphs import FixedSteps, fixed_steps
from lm.model import LanguageModel
from lm.sampling import Choice
from lm.source import load, on_meta
from lm.weights import ModelFolder
from ppo.config import PPOConfig
from ppo.initial_models import InitialModels
from ppo.rank import Rank
from ppo.rollout import Rollout, equal_slices
from ppo.sent_weights import SentWeights, chunks, held_tensors, require_same, take
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
    """Holds a copy of the policy in compute precision, and samples from it."""

    def __init__(self, config: PPOConfig, engine_config: EngineConfig, models: InitialModels) -> None:
        super().__init__(config, engine_config, models)
        policy = load(ModelFolder(self.models.sft, LanguageModel), self.device, self._compute_dtype).eval()
        self._model_config = policy.config
        self._policy: LanguageModel | None = policy
        # Samples are learned from before the next are drawn, and that brings other weights.
        self._sleeps = config.memory != "fast" and config.placement == "colocated"
        # On a GPU of its own a generator keeps its cache and its recorded steps; the learner's weights arrive in place.
        kept = fixed_steps(policy, "auto") if config.placement == "disaggregated" else None
        self.steps: FixedSteps | Literal["auto"] = kept or "auto"

    @property
    def policy(self) -> LanguageModel:
        assert self._policy is not None, "the generator has dropped its weights; it samples once per set of weights"
        return self._policy

    def _awake(self) -> LanguageModel:
        """The policy; where it was dropped, with memory for weights that are about to arrive."""
        if self._policy is None:
            policy = on_meta(lambda: LanguageModel(self._model_config)).to(self._compute_dtype)
            self._policy = policy.to_empty(device=self.device).eval()
            self._policy.tie()
        return self._policy

    def generate(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], seeds: Sequence[int], again: bool = False
    ) -> Rollout:
        sampled = generate(
            self.policy,
            prompts,
            max_new_tokens=self.config.max_new_tokens,
            end_id=self.tokenizer.end_id,
            choice=Choice(self.config.temperature),
            seeds=seeds,
            steps=self.steps,
        )
        if self._sleeps and not again:
            self._policy = None
        return Rollout.of(
            rows,
            prompts,
            sampled.responses,
            sampled.finished,
            sampled.logprobs,
            max_new_tokens=self.config.max_new_tokens,
            pad_id=self.tokenizer.pad_id,
        )

    def receive(self, sent: Iterable[SentWeights]) -> None:
        """Take the learner's weights; comparing digests on both sides proves that they arrived."""
        take(self._awake(), sent)

    def receive_broadcast(self) -> None:
        """As `receive`, when the first learner broadcasts."""
        for chunk in chunks(held_tensors(self._awake()).items()):
            require_same(self.broadcast.receive(chunk), chunk)
