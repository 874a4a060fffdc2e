"""Groups of Ray workers: one process per rank. They are placed and called together, and fail with the first cause."""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, TypeVarTuple

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.calls import Calls, Ranks, stored_once
from cluster.config import ClusterConfig
from cluster.connection import (
    Bundle,
    choose_bundle,
    cluster_gpus,
    connect,
    hidden_gpus,
    living_nodes,
    most_ranks_per_node,
    require_places,
)
from cluster.failures import WorkerError
from cluster.places import Places, nodes_of
from cluster.processes import GROUP, WORKER_ENVIRONMENT
from cluster.remote import Closeable, Remote, Replaceable
from cluster.worker import _Worker
from files.importing import user_folders

Kept = TypeVar("Kept", bound=Closeable)
Result = TypeVar("Result")
P = ParamSpec("P")
Arguments = TypeVarTuple("Arguments")


class WorkerGroup:
    """`num_workers` ranks in one placement group. If the cluster is too small, the constructor raises at once or, with
    `waits_for_nodes`, after the time in which a lost node may come back.

    Its processes have `name` in their environment (`GROUP`), by which an operator tells a generator from a learner.
    `bundle` is what each rank takes of its node; by default one core, and one GPU if there is one for each rank.
    `python` is an interpreter other than the driver's, with Heed and the same Ray. With a `host`, rank n shares the
    place of the host's rank n and takes no further resources. `places` outlive the group. With `waits` false, the
    constructor returns while ranks are still loading their libraries; call `join` before anything else.

    Raises:
        WorkerError: from any call that fails on a rank. A ValueError of a rank is the user's mistake and is raised
            unchanged.
    """

    def __init__(
        self,
        num_workers: int,
        config: ClusterConfig | None = None,
        *,
        name: str = "workers",
        bundle: Bundle | None = None,
        waits_for_nodes: bool = False,
        python: str = "",
        host: "WorkerGroup | None" = None,
        places: Places | None = None,
        waits: bool = True,
    ) -> None:
        connect(num_workers)
        self.num_workers, self.config = num_workers, config or ClusterConfig()
        bundle = bundle or choose_bundle(num_workers, cluster_gpus(), use_gpus=self.config.use_gpus)
        if not waits_for_nodes and host is None:
            require_places(num_workers, bundle, living_nodes())
        if host is None:
            reserved = places or Places()
            placement = reserved.reserve(num_workers, bundle, self.config.wait_for_nodes_seconds)
            owned, taken, gpus = None if places else reserved, bundle, [hidden_gpus(bundle)] * num_workers
        else:
            placement, gpus = host.ranks.placement, [*map(_shown_gpus, host.visible_gpus())]
            owned, taken = None, {"CPU": 0.0}
        self.ranks: Ranks = _start_ranks(name, bundle, taken, self.config, placement, owned, python, gpus)
        if waits:
            self.join()

    def join(self) -> None:
        """Wait until all ranks run, and send them the address of their rendezvous. Closes the group if that fails."""
        try:
            address, port = self.free_address()
            references = [actor.join.remote(address, port) for actor in self.ranks.actors]
            Calls[None](self.ranks, "start", references)()
            self.ranks.limits, self.ranks.meeting = self.config, (address, port)
        except WorkerError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, stage: str, function: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> list[Result]:
        """Call `function(*args, **kwargs)` on all ranks in parallel. Returns the results by rank."""
        sent = stored_once(args), stored_once(kwargs)
        references = [actor.run.remote(function, *sent) for actor in self.ranks.actors]
        return Calls[Result](self.ranks, stage, references)()

    def run_split(
        self, stage: str, function: Callable[[*Arguments], Result], args_of_rank: Sequence[tuple[*Arguments]]
    ) -> list[Result]:
        """Like `run`, with separate arguments for each rank."""
        ranks = zip(self.ranks.actors, args_of_rank, strict=True)
        references = [actor.run.remote(function, args, {}) for actor, args in ranks]
        return Calls[Result](self.ranks, stage, references)()

    def put(self, stage: str, factory: Callable[P, Kept], *args: P.args, **kwargs: P.kwargs) -> Remote[Kept]:
        """Create `factory(*args, **kwargs)` on every rank and keep it there. Returns a handle for calling it.

        `stage` names the calls in error messages: "ppo.update_policy: rank 1 of 4: ...".
        """
        return Remote.put(self.ranks, stage, factory, *args, **kwargs)

    def put_replaceable(
        self, stage: str, factory: Callable[P, Kept], *args: P.args, **kwargs: P.kwargs
    ) -> Remote[Kept]:
        """As `put`, but the object of a lost process is made again in a new one (`Replaceable`)."""
        return Replaceable.put(self.ranks, stage, factory, *args, **kwargs)

    def visible_gpus(self) -> Sequence[str]:
        """The GPUs that each rank may use, in the form of CUDA_VISIBLE_DEVICES."""
        references = [actor.visible_gpus.remote() for actor in self.ranks.actors]
        return Calls[str](self.ranks, "start", references)()

    def free_address(self) -> tuple[str, int]:
        """The address of rank 0's node, and the port of a new store in rank 0's process, for one rendezvous."""
        ((host, port),) = Calls[tuple[str, int]](self.ranks, "start", [self.ranks.actors[0].address.remote()])()
        return host, port

    @property
    def is_open(self) -> bool:
        """Whether it still has workers; a group that lost one is closed."""
        return self.ranks.is_open

    def close(self) -> None:
        """End the workers of this group and free their places."""
        self.ranks.close()


def _start_ranks(
    group: str,
    bundle: Bundle,
    taken: Bundle,
    config: ClusterConfig,
    placement: PlacementGroup,
    owned: Places | None,
    python: str,
    gpus: Sequence[Mapping[str, str]],
) -> Ranks:
    """Start one process in each place. Ranks on the same node get consecutive numbers.

    Returns while the processes are still loading their libraries. `taken` is what each process takes of its place, and
    `gpus` has the environment by rank that shows or hides GPUs. `python` is an interpreter other than the driver's.
    """
    nodes, num_ranks = nodes_of(placement), len(gpus)
    group_name = secrets.token_hex(4)
    names = [f"{group_name}/{rank}" for rank in range(num_ranks)]
    per_node = most_ranks_per_node(num_ranks, bundle)
    # Loading libraries does not count as progress.
    stall_seconds = max(config.start_seconds, config.stall_seconds)
    limits = config.model_copy(update={"stall_seconds": stall_seconds})
    folders, places = [os.getcwd(), *user_folders()], _neighbours(nodes)

    def start(rank: int, name: str) -> Any:
        remote = ray.remote(_Worker).options(
            num_cpus=taken["CPU"],
            num_gpus=taken.get("GPU", 0.0),
            runtime_env={
                "env_vars": {**WORKER_ENVIRONMENT, GROUP: group, **gpus[rank]},
                **({"py_executable": python} if python else {}),
            },
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=places[rank]),
        )
        return remote.remote(rank, num_ranks, per_node, name, config.beat_limit_seconds, config.cpu_threads, folders)

    actors = [*map(start, range(num_ranks), names)]
    return Ranks(group_name, actors, names, placement, limits, owned, start, [nodes[place] for place in places])


def _shown_gpus(gpus: str) -> dict[str, str]:
    """Environment that shows these GPUs to a guest. Ray would hide all GPUs from an actor that requests none."""
    return {"CUDA_VISIBLE_DEVICES": gpus, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def _neighbours(nodes: list[str]) -> list[int]:
    """Return the bundles' indices, those on the same node next to each other. `nodes` has each bundle's node."""
    first = {node: index for index, node in reversed(list(enumerate(nodes)))}
    return sorted(range(len(nodes)), key=lambda index: (first[nodes[index]], index))
