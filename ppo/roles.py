"""PPO's roles: learners, generators and scorers, on the same ranks (colocated) or on separate ones (disaggregated).

The controller is the same for both, and for a single rank in the controller's own process. Weights go from learners to
generators directly, never through the driver (`ppo.placement.weight_transport`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor

from cluster.remote import Handle, Local, Pending, Remote
from files.rows import Row
from lm.tensor_parallel import Rendezvous
from lm.tokenizer import Messages
from ppo.config import PPOConfig
from ppo.generator import Generator, Generators
from ppo.learner import Learner, Learners
from ppo.rank import InitialModels
from ppo.rollout import Asked, Drawn, Rollout, joined, shares_by_update
from ppo.scorer import Scorer, Scorers
from ppo.shared_body import SharedBodyLearner
from reward.external import ExternalReward
from training.config import EngineConfig

if TYPE_CHECKING:
    from cluster.group import WorkerGroup


@dataclass(frozen=True)
class ModelOutputs:
    """What the models compute for a rollout before its updates. Shape letters: B responses, R response tokens."""

    logprobs_BR: Tensor  # nats, at the sampling temperature; 0 at padding
    ref_logprobs_BR: Tensor  # likewise
    values_BR: Tensor  # 0 without a value function
    teacher_logprobs_BMR: Tensor  # as logprobs_BR, for each of M teachers


@dataclass(frozen=True)
class Roles:
    """The three roles, and how weights get from learners to generators."""

    config: PPOConfig
    learners: Learners
    generators: Generators
    scorers: Scorers
    transport: "WeightTransport"
    makes_room: bool = False  # whether learners free device memory for generators on the same ranks

    @classmethod
    def on_groups(
        cls,
        config: PPOConfig,
        engine: EngineConfig,
        models: InitialModels,
        conversations: Sequence[Messages],
        rows: Sequence[Row] = (),
        *,
        learners: "WorkerGroup",
        generators: "WorkerGroup",
        scorers: "WorkerGroup",
    ) -> Self:
        """Place each role on its group; roles that are passed the same group share its ranks.

        `conversations` are the prompts' messages, in the order of the prompts' rows, and `rows` the fields of their
        rows that the reward reads, if it does.
        Raises:
            ValueError: a minibatch does not divide among the learners.
        """
        engine = engine.on_ranks(learners.num_workers)  # also for other roles, which round where learners do
        config.minibatch.num_micro_batches(engine.data_parallel_size(learners.num_workers))
        kind = SharedBodyLearner if config.shared_body else Learner  # a SharedBodyLearner also scores
        own = None if config.shared_body else scorers.put("ppo", Scorer, config, engine, models)
        team_size = config.sampler.tensor_parallel_size
        meeting = None
        if team_size > 1:
            meeting = Rendezvous(*generators.free_address(), team_size, engine.collective_timeout_seconds)
        everyone = None
        if config.placement.samples_rounds and generators.num_workers > 1:  # in a process that outlives a generator
            num_ranks = generators.num_workers
            everyone = Rendezvous(*learners.free_address(), num_ranks, engine.collective_timeout_seconds)
        # A lost generator can be replaced if it shares no collective with others, and what it gets is kept for it.
        is_alone = team_size == 1 and not config.sampler.has_own_process
        is_ahead = config.placement.max_staleness > 0
        replaces = is_alone and is_ahead and config.placement.weight_transport == "object_store"
        put = generators.put_replaceable if replaces else generators.put
        sampling = put("ppo", Generator, config, engine, models, meeting, everyone)
        learning = learners.put("ppo", kind, config, engine, models, learners.num_workers)
        transport: WeightTransport = Direct(learning, sampling)
        # Generator processes next to learners share their GPUs, which a broadcast between GPUs does not allow.
        together = learners is generators or (config.placement.roles_share_ranks and config.samples_apart)
        if not together and broadcasts(config, learning, sampling):
            transport = Broadcast.open(learners, learning, sampling)
        makes_room = config.memory == "small" and together
        asked = Asked(conversations, rows)
        scorers_ = _scorers(config, engine, models, asked, learning, own or learning)
        learners_ = Learners(learning, config.minibatch, engine.sequence_parallel_size)
        generators_ = Generators(sampling, team_size, asked if config.environment is not None else Asked())
        return cls(config, learners_, generators_, scorers_, transport, makes_room)

    @classmethod
    def in_process(
        cls,
        config: PPOConfig,
        engine: EngineConfig,
        models: InitialModels,
        conversations: Sequence[Messages] = (),
        rows: Sequence[Row] = (),
    ) -> Self:
        """Place all roles on one rank, which is this process. Arguments as for `on_groups`."""
        assert config.sampler.tensor_parallel_size == 1, "a team has several ranks; one process was expected to sample"
        kind, engine = SharedBodyLearner if config.shared_body else Learner, engine.on_ranks(1)
        own = None if config.shared_body else Local(Scorer(config, engine, models))
        sampling = Local(Generator(config, engine, models))
        learning = Local(kind(config, engine, models, num_workers=1))
        makes_room, direct = config.memory == "small", Direct(learning, sampling)
        asked = Asked(conversations, rows)
        scorers = _scorers(config, engine, models, asked, learning, own or learning)
        generators = Generators(sampling, 1, asked if config.environment is not None else Asked())
        return cls(config, Learners(learning, config.minibatch), generators, scorers, direct, makes_room)

    def start_forward_passes(
        self, rollout: Rollout, minibatches: Sequence[Tensor], *, keeps: bool = False, tests_draws: bool = False
    ) -> Pending[ModelOutputs]:
        """Start the forward passes of policy, reference, teachers and value function over a rollout. Its rows are
        packed as the updates on `minibatches` will pack them.

        All passes start together, so scorers and learners on separate ranks work at the same time. With `keeps`,
        learners keep passes that the first update would repeat. For `tests_draws`, see
        `Learners.start_policy_logprobs`.
        """
        learners = self.learners
        if self.config.shared_body:  # one pass serves all three models
            ranks: Handle[Any] = learners.ranks
            shares = shares_by_update(rollout.num_tokens_B, ranks.num_ranks, learners.batch, minibatches)
            drawn = Drawn.of(rollout) if tests_draws else None
            arguments = [
                (part, share.pass_sizes, drawn and drawn.rows(share.rows))
                for part, share in zip(rollout.shares(shares), shares, strict=True)
            ]
            outputs = joined(ranks.start_split(SharedBodyLearner.measure, arguments), shares)
            return lambda: _of_shared_body(outputs())
        logprobs = learners.start_policy_logprobs(
            rollout, minibatches, keeps=keeps, tests_draws=tests_draws, compares_routes=True
        )
        ref_logprobs = self.scorers.start_reference_logprobs(rollout, minibatches)
        teachers = self.scorers.start_teacher_logprobs(rollout, minibatches) if self.config.teachers else None
        has_values = self.config.value_optimizer is not None
        values = learners.start_values(rollout, minibatches, keeps=keeps) if has_values else None

        def collect() -> ModelOutputs:
            logprobs_BR, ref_logprobs_BR = logprobs(), ref_logprobs()
            values_BR = torch.zeros_like(logprobs_BR) if values is None else values()
            teacher_logprobs_BMR = logprobs_BR.new_zeros(len(logprobs_BR), 0, 1) if teachers is None else teachers()
            return ModelOutputs(logprobs_BR, ref_logprobs_BR, values_BR, teacher_logprobs_BMR)

        return collect

    def start_sampling(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, again: bool = False
    ) -> Pending[Rollout]:
        """Call `Generators.start_sampling`, after learners on the same ranks have freed their device memory."""
        if self.makes_room:
            self.learners.make_room()
        return self.generators.start_sampling(rows, prompts, seeds, again=again)

    @property
    def rows_multiple(self) -> int:
        """The smallest number of rows that divides evenly among the ranks of every role."""
        return lcm(*(role.ranks.num_ranks for role in (self.learners, self.generators, self.scorers)))

    def sync_weights(self) -> None:
        """Advance the moving average, and send the learners' weights to the generators.

        That the weights arrived is checked before a rollout sampled with them is returned.
        """
        self.generators.weights_arrived = self.transport.advance_and_send()

    def load(self, folder: Path) -> None:
        """Load a checkpoint into the learners, and send its weights to the generators."""
        self.learners.load(folder)
        self.generators.weights_arrived = self.transport.send()

    def close(self) -> None:
        self.generators.weights_arrived()
        for ranks in dict.fromkeys(role.ranks for role in (self.learners, self.generators, self.scorers)):
            ranks.close()


def _of_shared_body(measured_B3R: Tensor) -> ModelOutputs:
    logprobs_BR, ref_logprobs_BR, values_BR = measured_B3R.unbind(dim=1)
    return ModelOutputs(logprobs_BR, ref_logprobs_BR, values_BR, measured_B3R[:, :0])


def _scorers(
    config: PPOConfig,
    engine: EngineConfig,
    models: InitialModels,
    asked: Asked,
    learning: Handle[Any],
    scoring: Handle[Any],
) -> Scorers:
    """Returns the scorers. With adapters, the learners compute the reference's log-probs."""
    read = asked if models.reward_reads_texts else Asked()
    waits = isinstance(models.reward, ExternalReward) and models.reward.waits
    if config.lora is None:
        return Scorers(scoring, read, config.minibatch, scoring, waits=waits)
    return Scorers(scoring, read, config.minibatch, learning, engine.sequence_parallel_size, waits=waits)


class WeightTransport(Protocol):
    def advance_and_send(self) -> Pending[object]:
        """Advance the moving average and send the weights. The returned function waits until they have arrived."""
        ...

    def send(self) -> Pending[object]:
        """Send the weights as they are."""
        ...


@dataclass(frozen=True)
class Direct(WeightTransport):
    """Passes weights by a call on the same rank, otherwise through Ray's object store.

    Learners do not wait for generators that are still sampling. A generator takes the weights in the order of calls:
    after the rollouts started earlier, and before those started later.
    """

    learners: Handle[Learner]
    generators: Handle[Generator]

    def advance_and_send(self) -> Pending[object]:
        return self.learners.pass_on(Learner.advance_and_send, self.generators, Generator.receive)

    def send(self) -> Pending[object]:
        return self.learners.pass_on(Learner.send, self.generators, Generator.receive)


@dataclass(frozen=True)
class Broadcast(WeightTransport):
    """Broadcasts weights in a collective of the first learner and all generators, which all enter at the same time."""

    learners: Remote[Learner]
    generators: Remote[Generator]

    @classmethod
    def open(cls, group: "WorkerGroup", learners: Remote[Learner], generators: Remote[Generator]) -> "Broadcast":
        """Open the process group. The first learner of `group` is rank 0, followed by the generators; the other
        learners do not take part.
        """
        host, port = group.free_address()
        num_ranks = 1 + generators.num_ranks
        sender = learners.start_first(Learner.open_broadcast, host, port, 0, num_ranks)
        ends = [(host, port, rank, num_ranks) for rank in range(1, num_ranks)]
        from cluster.calls import wait_all

        wait_all(sender, generators.start_split(Generator.open_broadcast, ends))
        return cls(learners, generators)

    def advance_and_send(self) -> Pending[object]:
        return self._exchanged(Learner.advance_and_broadcast)

    def send(self) -> Pending[object]:
        return self._exchanged(Learner.broadcast_weights)

    def _exchanged(self, method: Callable[[Learner], None]) -> Pending[object]:
        from cluster.calls import wait_all

        wait_all(self.learners.start_all(method), self.generators.start_all(Generator.receive_broadcast))
        return lambda: None


def broadcasts(config: PPOConfig, learners: Handle[Learner], generators: Handle[Generator]) -> bool:
    """Returns whether to broadcast weights between groups; "auto" does between GPUs."""
    transport = config.placement.weight_transport
    if transport != "auto":
        return transport == "broadcast"
    return all([*learners.call_all(Learner.on_gpu), *generators.call_all(Generator.on_gpu)])
