"""The processes of a worker group: Ray actors in one placement group, numbered so that ranks of one node are
neighbours.
"""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import ClusterConfig
from cluster.environment import WORKER_ENVIRONMENT
from cluster.heartbeat import forget_beats
from cluster.places import Bundle, hidden_gpus, most_ranks_per_node, nodes_of, place
from cluster.worker import _Worker
from files.importing import user_folders


@dataclass
class Ranks:
    """The processes of one group and what is needed to watch them."""

    name: str  # of the group; those of its ranks begin with it
    actors: list[Any]  # by rank; empty once closed
    names: list[str]  # by rank, as heartbeats know them
    placement: PlacementGroup
    limits: ClusterConfig  # how long they may be silent or stuck
    is_guest: bool = False  # whether the places are another group's

    @property
    def num_ranks(self) -> int:
        return len(self.names)

    @property
    def is_open(self) -> bool:
        return bool(self.actors)

    def close(self) -> None:
        """End the processes and free their places."""
        if not self.is_open:
            return
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
        self.actors = []
        if not self.is_guest:
            remove_placement_group(self.placement)  # ends stopped processes, too
        forget_beats(self.name)


def start_ranks(
    num_ranks: int,
    bundle: Bundle,
    config: ClusterConfig,
    python: str = "",
    host: Ranks | None = None,
    gpus_of_hosts: Sequence[str] = (),
) -> Ranks:
    """Reserve places and start one process in each. Returns while the processes still load their libraries.

    `python` is an interpreter other than the driver's. With a `host`, each rank shares the place of the host's rank of
    the same number, and reserves nothing; `gpus_of_hosts` are what these ranks see.
    Raises:
        NoPlaceError: no place is free within `cluster.wait_for_nodes_seconds`.
    """
    placement = host.placement if host else place(num_ranks, bundle, config.wait_for_nodes_seconds)
    group_name = secrets.token_hex(4)
    names = [f"{group_name}/{rank}" for rank in range(num_ranks)]
    per_node = most_ranks_per_node(num_ranks, bundle)
    # Loading libraries does not count as progress.
    stall_seconds = max(config.start_seconds, config.stall_seconds)
    limits = config.model_copy(update={"stall_seconds": stall_seconds})
    gpus = [hidden_gpus(bundle)] * num_ranks if host is None else [*map(_shown_gpus, gpus_of_hosts)]
    taken = bundle if host is None else {"CPU": 0.0}
    folders, actors = [os.getcwd(), *user_folders()], []
    for rank, index in enumerate(_neighbours(nodes_of(placement))):
        remote = ray.remote(_Worker).options(
            num_cpus=taken["CPU"],
            num_gpus=taken.get("GPU", 0.0),
            runtime_env={
                "env_vars": {**WORKER_ENVIRONMENT, **gpus[rank]},
                **({"py_executable": python} if python else {}),
            },
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=index),
        )
        limit = config.beat_limit_seconds
        actors.append(remote.remote(rank, num_ranks, per_node, names[rank], limit, config.cpu_threads, folders))
    return Ranks(group_name, actors, names, placement, limits, is_guest=host is not None)


def _shown_gpus(gpus: str) -> dict[str, str]:
    """Environment that shows these GPUs to a guest: Ray would hide all of them from an actor that requests none."""
    return {"CUDA_VISIBLE_DEVICES": gpus, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def _neighbours(nodes: list[str]) -> list[int]:
    """Numbers of the bundles, those of one node next to each other; `nodes` are the nodes of the bundles."""
    first = {node: index for index, node in reversed(list(enumerate(nodes)))}
    return sorted(range(len(nodes)), key=lambda index: (first[nodes[index]], index))
