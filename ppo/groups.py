"""PPO's roles served by a group of workers: batches are split by rank, results joined."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.group import Calls, WorkerGroup, wait_all
from lm.config import exact_div
from ppo.colocated import ColocatedWorker
from ppo.config import PPOConfig
from ppo.generator import GeneratorWorker
from ppo.initial_models import InitialModels
from ppo.learner import LearnerWorker
from ppo.rank import Rank
from ppo.roles import Sampling
from ppo.rollout import PolicyBatch, Rollout, ValueBatch
from ppo.scorer import ScorerWorker
from training.config import EngineConfig

NAME = "ppo"  # under which a group keeps its workers


class ColocatedGroup:
    """Every rank holds all roles and serves its contiguous share of each batch (implements `ppo.roles.Roles`).

    Errors: ValueError where a batch does not divide among the ranks.
    """

    def __init__(self, group: WorkerGroup, config: PPOConfig, engine: EngineConfig, models: InitialModels) -> None:
        self.learners = self.scorers = self.generators = Served(group, ColocatedWorker, config, engine, models)

    def start_sampling(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Sampling:
        slices = self.generators.slices(len(prompts))
        parts = self.generators.start("generate", [(prompts[s], seeds[s]) for s in slices])
        return lambda: Rollout.join(parts())

    def scores(self, rollout: Rollout) -> Tensor:
        return self.scorers.per_response("scores", rollout)

    def first_failure(self) -> str:
        failures: list[str] = self.scorers.call("first_failure", [()] * self.scorers.group.num_workers)
        return next(filter(None, failures), "")

    def reference_logprobs(self, rollout: Rollout) -> Tensor:
        return self.scorers.per_response("reference_logprobs", rollout)

    def policy_logprobs(self, rollout: Rollout) -> Tensor:
        return self.learners.per_response("policy_logprobs", rollout)

    def values(self, rollout: Rollout) -> Tensor:
        return self.learners.per_response("values", rollout)

    def update_policy(self, batch: PolicyBatch, learning_rate: float, update: int) -> Mapping[str, float]:
        rows, ptx = (self.learners.slices(size) for size in (len(batch.rollout), len(batch.ptx_rows)))
        shards = [batch.rows(s, p) for s, p in zip(rows, ptx, strict=True)]
        return _sum(self.learners.call("update_policy", [(shard, learning_rate, update) for shard in shards]))

    def update_value(self, batch: ValueBatch, learning_rate: float, update: int) -> Mapping[str, float]:
        shards = [batch.rows(s) for s in self.learners.slices(len(batch.rollout))]
        return _sum(self.learners.call("update_value", [(shard, learning_rate, update) for shard in shards]))

    def sync_weights(self) -> None:
        self.learners.call_all("sync_weights")

    def keep_policy(self, folder: Path) -> None:
        self.learners.call_all("keep_policy", folder)

    def export_policy(self, folder: Path) -> None:
        self.learners.call_all("export_policy", folder)

    def save(
        self, checkpoints: Path, iteration: int, progress: Mapping[str, float], files: Mapping[str, bytes]
    ) -> None:
        # Rank 0 alone writes whole files, which may be large: rollouts.
        others: Sequence[Mapping[str, bytes]] = [{}] * (self.learners.group.num_workers - 1)
        self.learners.call("save", [(checkpoints, iteration, progress, own) for own in (files, *others)])

    def finish_saving(self) -> None:
        self.learners.call_all("finish_saving")

    def changed_files(self, folder: Path, sha256: Mapping[str, str]) -> list[str]:
        return [name for names in self.learners.call_all("changed_files", folder, sha256) for name in names]

    def load(self, folder: Path) -> None:
        self.learners.call_all("load", folder)

    def close(self) -> None:
        self.learners.close()


class DisaggregatedGroup(ColocatedGroup):
    """Learners, generators and scorers in groups of their own, each with its own number of ranks.

    Weights travel from the first learner to all generators, never through the driver. By broadcast, both are there at
    once. Through Ray's object store learners do not wait for generators that still sample: those take the weights in
    their turn, after the rollouts that were begun before and before those that are begun later.
    """

    def __init__(
        self,
        learners: WorkerGroup,
        generators: WorkerGroup,
        scorers: WorkerGroup,
        config: PPOConfig,
        engine: EngineConfig,
        models: InitialModels,
    ) -> None:
        self.learners = Served(learners, LearnerWorker, config, engine, models)
        self.generators = Served(generators, GeneratorWorker, config, engine, models)
        self.scorers = Served(scorers, ScorerWorker, config, engine, models)
        self._weights_arrived: Callable[[], object] = lambda: None  # all ranks begin with the SFT policy's
        self._broadcasts = config.weight_transport == "broadcast" or (
            config.weight_transport == "auto" and config.max_staleness == 0 and self._all_on_gpus()
        )
        if self._broadcasts:
            self._open_broadcast()

    def start_sampling(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Sampling:
        weights_arrived, sampled = self._weights_arrived, super().start_sampling(prompts, seeds)

        def collect() -> Rollout:
            weights_arrived()
            return sampled()

        return collect

    def sync_weights(self) -> None:
        self._send("advance_and_broadcast" if self._broadcasts else "advance_and_send")

    def load(self, folder: Path) -> None:
        super().load(folder)
        self._send("broadcast_weights" if self._broadcasts else "send")

    def _send(self, method: str) -> None:
        if not self._broadcasts:
            self._weights_arrived = self.learners.group.send(NAME, method, to=self.generators.group, method="receive")
            return
        sending = self.learners.start_all(method)
        wait_all(sending, self.generators.start_all("receive_broadcast"))

    def _all_on_gpus(self) -> bool:
        return all(on_gpu for served in (self.learners, self.generators) for on_gpu in served.call_all("on_gpu"))

    def _open_broadcast(self) -> None:
        """The first learner is rank 0, generators come behind it; other learners have no part in it."""
        host, port = self.learners.group.free_address()
        num_ranks = 1 + self.generators.group.num_workers
        sender = self.learners.group.start_on_first(NAME, "open_broadcast", (host, port, 0, num_ranks))
        receivers = self.generators.start(
            "open_broadcast", [(host, port, rank, num_ranks) for rank in range(1, num_ranks)]
        )
        wait_all(sender, receivers)

    def close(self) -> None:
        self._weights_arrived()
        for served in (self.learners, self.generators, self.scorers):
            served.close()


class Served:
    """A kind of worker on every rank of a group."""

    def __init__(
        self, group: WorkerGroup, kind: type[Rank], config: PPOConfig, engine: EngineConfig, models: InitialModels
    ) -> None:
        self.group = group
        if issubclass(kind, LearnerWorker):
            config.minibatch.num_micro_batches(group.num_workers)
        group.build(NAME, kind, config, engine, models, group.num_workers)

    def per_response(self, method: str, rollout: Rollout) -> Tensor:
        return torch.cat(self.call(method, [(rollout.rows(s),) for s in self.slices(len(rollout))]))

    def slices(self, num_rows: int) -> list[slice]:
        share = exact_div(num_rows, self.group.num_workers, "rows of a PPO batch over workers")
        return [slice(rank * share, (rank + 1) * share) for rank in range(self.group.num_workers)]

    def call(self, method: str, args_of_rank: Sequence[Sequence[Any]]) -> list[Any]:
        return self.group.call(NAME, method, args_of_rank)

    def start(self, method: str, args_of_rank: Sequence[Sequence[Any]]) -> Calls:
        return self.group.start(NAME, method, args_of_rank)

    def call_all(self, method: str, *args: Any) -> list[Any]:
        return self.start_all(method, *args)()

    def start_all(self, method: str, *args: Any) -> Calls:
        return self.start(method, [args] * self.group.num_workers)

    def close(self) -> None:
        self.group.drop(NAME)


def _sum(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(share[name] for share in shares) for name in shares[0]}
