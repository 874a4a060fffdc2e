"""Where ranks may run: what each takes of a machine, whether the cluster could ever hold them, and their placement."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

Bundle = Mapping[str, float]  # what one rank takes of its machine

ON_CPU: Bundle = {"CPU": 1.0}
ON_GPU: Bundle = {"CPU": 1.0, "GPU": 1.0}


class NoPlaceError(ValueError):
    """The cluster has no room for a group of this size."""


def choose_bundle(num_ranks: int, num_gpus: float, *, use_gpus: bool) -> Bundle:
    """What each of a job's ranks takes: a core, and a GPU where there is one for each of them.

    Raises:
        NoPlaceError: there are GPUs, but too few for all ranks of the job.
    """
    if not use_gpus or num_gpus == 0:
        return ON_CPU
    if num_gpus < num_ranks:
        raise NoPlaceError(
            f"the job has {num_ranks} ranks, each with a GPU of its own, and there are {num_gpus:g} GPUs; fewer workers"
            " (with ppo.num_generators and ppo.num_scorers), or cluster.use_gpus = false to run all of them on CPUs,"
            " was expected"
        )
    return ON_GPU


def hidden_gpus(bundle: Bundle) -> dict[str, str]:
    """Environment that hides GPUs from a rank that has none: it would see, and use, those of other ranks."""
    return {} if "GPU" in bundle else {"CUDA_VISIBLE_DEVICES": ""}


def cluster_gpus() -> float:
    """GPUs of all living nodes."""
    return float(ray.cluster_resources().get("GPU", 0.0))


def living_nodes() -> list[Mapping[str, float]]:
    """What each living node has, free or not."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _rooms(bundle: Bundle, nodes: Sequence[Mapping[str, float]]) -> list[int]:
    """How many ranks each node could hold, if nothing else ran on it."""
    return [min(int(node.get(kind, 0.0) // amount) for kind, amount in bundle.items()) for node in nodes]


def most_ranks_per_node(num_ranks: int, bundle: Bundle) -> int:
    """How many of a group's ranks some node could hold: what the node's cores are divided by.

    It does not depend on where the ranks are placed now. Sums of tensors are taken in an order that follows the number
    of threads, so a group that is placed otherwise after a loss must have as many, or its bits would differ.
    """
    return max(1, min(num_ranks, max(_rooms(bundle, living_nodes()), default=1)))


def require_places(num_workers: int, bundle: Bundle, nodes: Sequence[Mapping[str, float]]) -> None:
    """Check that the nodes could hold the workers, each of which runs on one node. `nodes` are their resources, free
    or not.

    Raises:
        NoPlaceError: the workers could never be placed; says what is asked and what there is.
    """
    rooms = _rooms(bundle, nodes)
    if sum(rooms) < num_workers:
        kinds = Counter(_words({kind: node.get(kind, 0.0) for kind in bundle}) for node in nodes)
        has = ", ".join(f"{number} x ({words})" for words, number in kinds.items())
        raise NoPlaceError(
            f"workers is {num_workers}, each with {_words(bundle)} of one node; the cluster's nodes are {has} and hold"
            f" {sum(rooms)}"
        )


def require_cores(num_ranks: int) -> None:
    """Raises NoPlaceError where this machine has fewer cores."""
    cores = os.cpu_count() or 1
    if num_ranks > cores:
        raise NoPlaceError(f"workers is {num_ranks}; this machine has {cores} cores and each worker needs one")


def require_machine(num_ranks: int, *, use_gpus: bool) -> Bundle:
    """What each of a job's ranks takes of this machine. Raises NoPlaceError where it has too few cores or GPUs."""
    import torch

    require_cores(num_ranks)
    return choose_bundle(num_ranks, torch.cuda.device_count(), use_gpus=use_gpus)


def _words(bundle: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {kind}" for kind, amount in bundle.items())


def place(num_workers: int, bundle: Bundle, wait_seconds: float) -> PlacementGroup:
    """Reserve the workers' places. Raises NoPlaceError, saying what the cluster has, if they are not free in time."""
    group = placement_group([dict(bundle)] * num_workers, strategy="PACK")
    if not group.wait(wait_seconds):
        remove_placement_group(group)
        raise NoPlaceError(
            f"{num_workers} workers with {_words(bundle)} each found no place in {wait_seconds:.0f} s; the cluster"
            f" has {ray.cluster_resources()}, free are {ray.available_resources()}"
        )
    return group


def nodes_of(group: PlacementGroup) -> list[str]:
    """The node of each of a placed group's bundles."""
    found: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return [found[bundle] for bundle in sorted(found)]
