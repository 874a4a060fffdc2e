"""PPO's roles served by a group of workers: batches are split by rank, results joined."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.group import WorkerGroup
from lm.config import exact_div
from ppo.colocated import ColocatedWorker, Parents
from ppo.config import PPOConfig
from ppo.rollout import PolicyBatch, Rollout, ValueBatch
from training.config import EngineConfig


class ColocatedGroup:
    """Every rank holds all roles and serves its contiguous share of each batch (implements `ppo.roles.Roles`).

    Errors: ValueError where a batch does not divide among the ranks.
    """

    NAME = "ppo"

    def __init__(self, group: WorkerGroup, config: PPOConfig, engine: EngineConfig, parents: Parents) -> None:
        self.group = group
        config.minibatch.num_micro_batches(group.num_workers)
        group.build(self.NAME, ColocatedWorker, config, engine, parents, group.num_workers)

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Rollout:
        parts: list[Rollout] = self._call("generate", [(prompts[s], seeds[s]) for s in self._slices(len(prompts))])
        return Rollout.join(parts)

    def scores(self, rollout: Rollout) -> Tensor:
        return self._per_response("scores", rollout)

    def reference_logprobs(self, rollout: Rollout) -> Tensor:
        return self._per_response("reference_logprobs", rollout)

    def policy_logprobs(self, rollout: Rollout) -> Tensor:
        return self._per_response("policy_logprobs", rollout)

    def values(self, rollout: Rollout) -> Tensor:
        return self._per_response("values", rollout)

    def update_policy(self, batch: PolicyBatch, learning_rate: float, update: int) -> Mapping[str, float]:
        ptx = self._slices(len(batch.ptx_rows))
        shards = [batch.rows(s, p) for s, p in zip(self._slices(len(batch.rollout)), ptx, strict=True)]
        return _sum(self._call("update_policy", [(shard, learning_rate, update) for shard in shards]))

    def update_value(self, batch: ValueBatch, learning_rate: float, update: int) -> Mapping[str, float]:
        shards = [batch.rows(s) for s in self._slices(len(batch.rollout))]
        return _sum(self._call("update_value", [(shard, learning_rate, update) for shard in shards]))

    def sync_weights(self) -> None:
        self._call_all("sync_weights")

    def export_policy(self, folder: Path) -> None:
        self._call_all("export_policy", folder)

    def save(self, folder: Path) -> None:
        self._call_all("save", folder)

    def load(self, folder: Path) -> None:
        self._call_all("load", folder)

    def close(self) -> None:
        self.group.drop(self.NAME)

    def _per_response(self, method: str, rollout: Rollout) -> Tensor:
        return torch.cat(self._call(method, [(rollout.rows(s),) for s in self._slices(len(rollout))]))

    def _slices(self, num_rows: int) -> list[slice]:
        share = exact_div(num_rows, self.group.num_workers, "rows of a PPO batch over workers")
        return [slice(rank * share, (rank + 1) * share) for rank in range(self.group.num_workers)]

    def _call(self, method: str, args_of_rank: Sequence[Sequence[Any]]) -> list[Any]:
        return self.group.call(self.NAME, method, args_of_rank)

    def _call_all(self, method: str, *args: Any) -> None:
        self._call(method, [args] * self.group.num_workers)


def _sum(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(share[name] for share in shares) for name in shares[0]}
