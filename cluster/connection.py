"""Joining a Ray cluster, or starting one in this process, and whether it has room for a job."""

import logging
import os

import ray

from cluster import local_ray
from cluster.places import (
    Bundle,
    NoPlaceError,
    choose_bundle,
    cluster_gpus,
    living_nodes,
    require_cores,
    require_machine,
    require_places,
)
from cluster.sigterm import end_by_sigterm, sigterm_kept
from training.notices import say


def connect(num_workers: int) -> None:
    """Join the cluster that RAY_ADDRESS names, or start one in this process for `num_workers` workers.

    Raises:
        ValueError: this machine has fewer cores than workers.
    """
    is_starting = local_ray.is_starting()
    if ray.is_initialized() and not is_starting:
        return
    end_by_sigterm()
    if is_starting or not os.environ.get("RAY_ADDRESS"):
        _start(num_workers)
        return
    say("joining the Ray cluster")
    with sigterm_kept():
        ray.init(log_to_driver=False, logging_level=logging.WARNING)


def _start(num_workers: int) -> None:
    require_cores(num_workers)
    if not local_ray.is_starting():
        say("starting Ray")
    local_ray.start()


def disconnect() -> None:
    """Leave the cluster; one that was started in this process ends."""
    ray.shutdown()
    local_ray.close()


def require_room(num_ranks: int, *, use_gpus: bool) -> Bundle:
    """Returns what each of a job's ranks will take of its machine: of the cluster that RAY_ADDRESS names, or of this
    machine, where Ray need not run yet.

    Raises:
        ValueError: there could never be room for all ranks at once.
    """
    if local_ray.is_starting() or not (os.environ.get("RAY_ADDRESS") or ray.is_initialized()):
        return require_machine(num_ranks, use_gpus=use_gpus)
    connect(num_ranks)
    bundle = choose_bundle(num_ranks, cluster_gpus(), use_gpus=use_gpus)
    require_places(num_ranks, bundle, living_nodes())
    return bundle


def has_room(num_ranks: int, bundle: Bundle) -> bool:
    """Whether the cluster's living nodes hold this many ranks."""
    try:
        require_places(num_ranks, bundle, living_nodes())
    except NoPlaceError:
        return False
    return True
