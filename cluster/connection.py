"""Joining a Ray cluster, or starting one in this process, and whether it has room for a job."""

import logging
import os
from pathlib import Path

import ray

from cluster import local_ray
from cluster.code import HeedFirst
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
from training.notices import RunError, say


def connect(num_workers: int) -> None:
    """Join the cluster that RAY_ADDRESS names, or start one in this process for `num_workers` workers.

    Raises:
        ValueError: this machine has fewer cores than workers.
        RunError: Ray does not start, or does not answer.
    """
    is_starting = local_ray.is_starting()
    if ray.is_initialized() and not is_starting:
        return
    end_by_sigterm()
    if is_starting or not os.environ.get("RAY_ADDRESS"):
        _start(num_workers)
        return
    say("joining the Ray cluster")
    try:
        with sigterm_kept():
            ray.init(log_to_driver=False, logging_level=logging.WARNING, job_config=HeedFirst())
    except Exception as error:
        raise RunError(
            f"RAY_ADDRESS is {os.environ['RAY_ADDRESS']!r}, and Ray cannot be joined there: {_first_sentence(error)};"
            " check the address and whether Ray runs there (`ray status`), or unset RAY_ADDRESS to use this machine"
        ) from error


def _start(num_workers: int) -> None:
    """Start Ray on this machine, in two tries: under load its processes may not answer in the time that Ray gives them.

    Raises: RunError in one line.
    """
    require_cores(num_workers)
    if not local_ray.is_starting():
        say("starting Ray")
    try:
        local_ray.start()
    except Exception as error:
        say(f"Ray did not start ({_first_sentence(error)}); trying once more")
        try:
            local_ray.start()
        except Exception as again:
            raise RunError(
                f"Ray did not start in two tries: {_first_sentence(again)}; run the same command again, on a machine"
                f" under heavy load after other programs have ended. Ray's logs: {_log_folder()}"
            ) from again


def _first_sentence(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].split(". ")[0].rstrip(".")


def _log_folder() -> Path:
    return Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "session_latest", "logs")


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
