"""Who does PPO's work: learners, generators and scorers, on the same ranks (colocated) or on their own (disaggregated).

The controller is the same for both, and for one rank in its own process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Self

from cluster.remote import Local, Pending
from lm.tokenizer import Messages
from ppo.config import PPOConfig
from ppo.generator import Generator, Generators
from ppo.initial_models import InitialModels
from ppo.learner import Learner, Learners
from ppo.rollout import Rollout
from ppo.scorer import Scorer, Scorers
from ppo.weight_transport import Broadcast, Direct, WeightTransport, broadcasts
from training.config import EngineConfig

if TYPE_CHECKING:
    from cluster.group import WorkerGroup


@dataclass(frozen=True)
class Roles:
    """The three roles, and how weights get from learners to generators."""

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
        scoring = scorers.put("ppo", Scorer, config, engine, models)
        sampling = generators.put("ppo", Generator, config, engine, models)
        learning = learners.put("ppo", Learner, config, engine, models, learners.num_workers)
        transport: WeightTransport = Direct(learning, sampling)
        # Guests in the places of learners share their GPUs, which no broadcast between GPUs allows.
        together = learners is generators or (config.placement == "colocated" and config.samples_apart)
        if not together and broadcasts(config, learning, sampling):
            transport = Broadcast.open(learners, learning, sampling)
        asked = conversations if models.reward_reads_texts else ()
        makes_room = config.memory == "small" and together
        batch = config.minibatch
        reference = learning if config.lora is not None else scoring
        learners_, scorers_ = Learners(learning, batch), Scorers(scoring, asked, batch, reference)
        return cls(learners_, Generators(sampling), scorers_, transport, makes_room)

    @classmethod
    def in_process(
        cls, config: PPOConfig, engine: EngineConfig, models: InitialModels, conversations: Sequence[Messages] = ()
    ) -> Self:
        """All roles on one rank, which is this process. Arguments as for `on_groups`."""
        scoring = Local(Scorer(config, engine, models))
        sampling = Local(Generator(config, engine, models))
        learning = Local(Learner(config, engine, models, num_workers=1))
        asked = conversations if models.reward_reads_texts else ()
        makes_room, direct = config.memory == "small", Direct(learning, sampling)
        batch = config.minibatch
        reference = learning if config.lora is not None else scoring
        learners, scorers = Learners(learning, batch), Scorers(scoring, asked, batch, reference)
        return cls(learners, Generators(sampling), scorers, direct, makes_room)

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
        for role in (self.learners, self.generators, self.scorers):
            role.ranks.close()
