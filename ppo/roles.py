"""Who does PPO's work: learners, generators and scorers, on the same ranks (colocated) or on their own (disaggregated).

The controller is the same for both, and for one rank in its own process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from cluster.remote import Handle, Local, Pending
from lm.tokenizer import Messages
from ppo.config import PPOConfig
from ppo.generator import Generator, Generators
from ppo.initial_models import InitialModels
from ppo.learner import Learner, Learners
from ppo.rollout import Rollout, joined, shares_by_update
from ppo.scorer import Scorer, Scorers
from ppo.shared_body import SharedBodyLearner
from ppo.weight_transport import Broadcast, Direct, WeightTransport, broadcasts
from training.config import EngineConfig

if TYPE_CHECKING:
    from cluster.group import WorkerGroup


@dataclass(frozen=True)
class Measured:
    """What the models say of a rollout, before its updates. Shape letters: B responses, R response tokens."""

    logprobs_BR: Tensor  # nats, at the sampling temperature; 0 where there is no token
    ref_logprobs_BR: Tensor
    values_BR: Tensor  # 0 where there is no value function


@dataclass(frozen=True)
class Roles:
    """The three roles, and how weights get from learners to generators."""

    config: PPOConfig
    learners: Learners
    generators: Generators
    scorers: Scorers
    transport: WeightTransport
    makes_room: bool = False  # whether learners leave their device to generators of the same ranks

    @classmethod
    def on_groups(
        cls,
        config: PPOConfig,
        engine: EngineConfig,
        models: InitialModels,
        conversations: Sequence[Messages],
        *,
        learners: "WorkerGroup",
        generators: "WorkerGroup",
        scorers: "WorkerGroup",
    ) -> Self:
        """One role per group, or several roles on each rank where groups are one and the same.

        `conversations` are the prompts' messages, in the order of the prompts' rows.
        Raises:
            ValueError: a minibatch does not divide among the learners.
        """
        config.minibatch.num_micro_batches(learners.num_workers)
        kind = SharedBodyLearner if config.shared_body else Learner  # the first scores too
        own = None if config.shared_body else scorers.put("ppo", Scorer, config, engine, models)
        sampling = generators.put("ppo", Generator, config, engine, models)
        learning = learners.put("ppo", kind, config, engine, models, learners.num_workers)
        transport: WeightTransport = Direct(learning, sampling)
        # Guests in the places of learners share their GPUs, which no broadcast between GPUs allows.
        together = learners is generators or (config.placement == "colocated" and config.samples_apart)
        if not together and broadcasts(config, learning, sampling):
            transport = Broadcast.open(learners, learning, sampling)
        makes_room = config.memory == "small" and together
        scorers_ = _scorers(config, models, conversations, learning, own or learning)
        return cls(config, Learners(learning, config.minibatch), Generators(sampling), scorers_, transport, makes_room)

    @classmethod
    def in_process(
        cls, config: PPOConfig, engine: EngineConfig, models: InitialModels, conversations: Sequence[Messages] = ()
    ) -> Self:
        """All roles on one rank, which is this process. Arguments as for `on_groups`."""
        kind = SharedBodyLearner if config.shared_body else Learner
        own = None if config.shared_body else Local(Scorer(config, engine, models))
        sampling = Local(Generator(config, engine, models))
        learning = Local(kind(config, engine, models, num_workers=1))
        makes_room, direct = config.memory == "small", Direct(learning, sampling)
        scorers = _scorers(config, models, conversations, learning, own or learning)
        return cls(config, Learners(learning, config.minibatch), Generators(sampling), scorers, direct, makes_room)

    def start_measuring(
        self, rollout: Rollout, minibatches: Sequence[Tensor], *, keeps: bool = False
    ) -> Pending[Measured]:
        """Start what the models say of a rollout, whose rows are packed as the updates on `minibatches` will pack them.

        All are started together: on ranks of their own, scorers and learners work at the same time. With `keeps`,
        learners keep passes that the first update would repeat.
        """
        learners = self.learners
        if self.config.shared_body:  # one pass serves all
            ranks: Handle[Any] = learners.ranks
            shares = shares_by_update(rollout.num_tokens_B, ranks.num_ranks, learners.batch, minibatches)
            given = [(rollout.rows(share.rows), share.pass_sizes) for share in shares]
            found = joined(ranks.start_split(SharedBodyLearner.measure, given), shares)
            return lambda: Measured(*found().unbind(dim=1))
        logprobs = learners.start_policy_logprobs(rollout, minibatches, keeps=keeps)
        ref_logprobs = self.scorers.start_reference_logprobs(rollout, minibatches)
        has_values = self.config.has_value_function
        values = learners.start_values(rollout, minibatches, keeps=keeps) if has_values else None

        def collect() -> Measured:
            logprobs_BR, ref_logprobs_BR = logprobs(), ref_logprobs()
            return Measured(logprobs_BR, ref_logprobs_BR, torch.zeros_like(logprobs_BR) if values is None else values())

        return collect

    def start_sampling(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, again: bool = False
    ) -> Pending[Rollout]:
        """`Generators.start_sampling`, once learners on the same ranks have made room."""
        if self.makes_room:
            self.learners.make_room()
        return self.generators.start_sampling(rows, prompts, seeds, again=again)

    @property
    def rows_multiple(self) -> int:
        """The least number of rows that divides among the ranks of every role."""
        return lcm(*(role.ranks.num_ranks for role in (self.learners, self.generators, self.scorers)))

    def sync_weights(self) -> None:
        """Give the learners' weights to the generators, and advance the moving average.

        Whether they arrived is proved before a rollout sampled with them is returned.
        """
        self.generators.weights_arrived = self.transport.advance_and_send()

    def load(self, folder: Path) -> None:
        """Load a checkpoint into the learners, and give its weights to the generators."""
        self.learners.load(folder)
        self.generators.weights_arrived = self.transport.send()

    def close(self) -> None:
        self.generators.weights_arrived()
        for ranks in dict.fromkeys(role.ranks for role in (self.learners, self.generators, self.scorers)):
            ranks.close()


def _scorers(
    config: PPOConfig,
    models: InitialModels,
    conversations: Sequence[Messages],
    learning: Handle[Any],
    scoring: Handle[Any],
) -> Scorers:
    """With adapters, learners are the reference."""
    asked = conversations if models.reward_reads_texts else ()
    return Scorers(scoring, asked, config.minibatch, learning if config.lora is not None else scoring)
