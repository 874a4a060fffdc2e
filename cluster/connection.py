"""The Ray cluster of a job: joining or starting one, its room for ranks, and the precision its machines are fast in.

A rank takes a `Bundle` of its machine's resources. Ranks are placed only if the cluster could hold all of them.

`call_on_lost_head` notices when the process on Ray's head node that keeps Ray's state has ended. Ray ends the driver a
minute after that, with a line of C++ and without running any Python. A thread notices it sooner; the main thread
cannot, because it may be waiting inside Ray. A head that is merely stopped still accepts connections, and connections
to one that is out of reach time out; `cluster.calls` has a limit for that.
"""

import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import worker as ray_worker
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster import local_ray
from cluster.failures import WorkerLostError, last_line, without_colours
from cluster.messages import ANSWER_SECONDS
from cluster.processes import end_by_sigterm, sigterm_kept, token_warning
from cluster.worker import HeedFirst
from lm.config import Precision
from training.config import EngineConfig, cpu_multiplies_bf16
from training.notices import RunError, say

log = logging.getLogger(__name__)

Bundle = Mapping[str, float]  # what one rank takes of its machine

ON_CPU: Bundle = {"CPU": 1.0}
ON_GPU: Bundle = {"CPU": 1.0, "GPU": 1.0}


class NoPlaceError(ValueError):
    """The cluster has no room for a group of this size."""


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
    ray_worker.print_to_stdstream = _log_message
    if is_starting or not os.environ.get("RAY_ADDRESS"):
        _start(num_workers)
        return
    say("joining the Ray cluster")
    if line := token_warning():
        say(line)
    try:
        with sigterm_kept():
            ray.init(log_to_driver=False, logging_level=logging.WARNING, job_config=HeedFirst())
    except Exception as error:
        raise RunError(
            f"RAY_ADDRESS is {os.environ['RAY_ADDRESS']!r}; cannot join a Ray cluster there: {_first_sentence(error)};"
            " check the address and whether Ray runs there (`ray status`), or unset RAY_ADDRESS to use this machine"
        ) from error


def _log_message(data: Any, ignore_prefix: bool) -> None:
    """Log what Ray would print on standard output, both when it arrives and at the end: the last lines of the log of
    each lost node. Heed reports losses itself, and the log stays on the node.
    """
    del ignore_prefix
    log.info("%s", "\n".join(data["lines"]))


def _start(num_workers: int) -> None:
    """Start Ray on this machine, in two tries: under load, its processes may not answer within Ray's time limit.

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
            logs = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "session_latest", "logs")
            raise RunError(
                f"Ray did not start in two tries: {_first_sentence(again)}; run the same command again. If the machine"
                f" is busy, wait until other programs have finished. Ray's logs: {logs}"
            ) from again


def _first_sentence(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].split(". ")[0].rstrip(".")


def disconnect() -> None:
    """Leave the cluster. A cluster that this process started ends."""
    ray.shutdown()
    local_ray.close()


def require_room(num_ranks: int, *, use_gpus: bool) -> Bundle:
    """Return the resources that each of a job's ranks takes: from the cluster that RAY_ADDRESS names, or else from this
    machine, where Ray need not be running yet.

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


def choose_bundle(num_ranks: int, num_gpus: float, *, use_gpus: bool) -> Bundle:
    """Return the resources that each of a job's ranks takes: a core, and a GPU if there is one for each rank.

    Raises:
        NoPlaceError: there are GPUs, but too few for all ranks of the job.
    """
    if not use_gpus or num_gpus == 0:
        return ON_CPU
    if num_gpus < num_ranks:
        raise NoPlaceError(
            f"the job has {num_ranks} ranks, each with a GPU of its own, and there are {num_gpus:g} GPUs; expected"
            " fewer ranks (workers plus ppo.placement.num_generators and num_scorers), or cluster.use_gpus = false to"
            " run all of them on CPUs"
        )
    return ON_GPU


def require_machine(num_ranks: int, *, use_gpus: bool) -> Bundle:
    """Return what each of a job's ranks takes of this machine. Raises NoPlaceError if it has too few cores or GPUs."""
    import torch

    require_cores(num_ranks)
    return choose_bundle(num_ranks, torch.cuda.device_count(), use_gpus=use_gpus)


def require_cores(num_ranks: int) -> None:
    """Raises NoPlaceError if this machine has fewer cores."""
    cores = os.cpu_count() or 1
    if num_ranks > cores:
        raise NoPlaceError(f"workers is {num_ranks}; this machine has {cores} cores and each worker needs one")


def require_places(num_workers: int, bundle: Bundle, nodes: Sequence[Mapping[str, float]]) -> None:
    """Check that the nodes could hold the workers, each of which runs on one node. `nodes` lists the resources of each
    node, whether free or not.

    Raises:
        NoPlaceError: the workers could never be placed; the message says what is needed and what there is.
    """
    room = rooms(bundle, nodes)
    if sum(room) < num_workers:
        kinds = Counter(in_words({kind: node.get(kind, 0.0) for kind in bundle}) for node in nodes)
        has = ", ".join(f"{number} x ({words})" for words, number in kinds.items())
        raise NoPlaceError(
            f"workers is {num_workers}, and each needs {in_words(bundle)} on one node; the cluster's nodes ({has}) have"
            f" room for {sum(room)}"
        )


def rooms(bundle: Bundle, nodes: Sequence[Mapping[str, float]]) -> list[int]:
    """How many ranks each node could hold, if nothing else ran on it."""
    return [min(int(node.get(kind, 0.0) // amount) for kind, amount in bundle.items()) for node in nodes]


def in_words(bundle: Mapping[str, float]) -> str:
    """Return "1 CPU and 1 GPU"."""
    return " and ".join(f"{amount:g} {kind}" for kind, amount in bundle.items())


def cluster_gpus() -> float:
    """GPUs of all living nodes."""
    return float(ray.cluster_resources().get("GPU", 0.0))


def living_nodes() -> list[Mapping[str, float]]:
    """Resources of each living node, free or not."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def most_ranks_per_node(num_ranks: int, bundle: Bundle) -> int:
    """Return the most ranks of a group that any node could hold. A node's cores are divided by this number.

    It does not depend on where the ranks are now. The order in which tensors are summed depends on the number of
    threads, so a group that is placed differently after a loss must use the same number, or its bits would differ.
    """
    return max(1, min(num_ranks, max(rooms(bundle, living_nodes()), default=1)))


def hidden_gpus(bundle: Bundle) -> dict[str, str]:
    """Environment that hides GPUs from a rank that has none. Otherwise it would see, and use, those of other ranks."""
    return {} if "GPU" in bundle else {"CUDA_VISIBLE_DEVICES": ""}


def resolve_precision(engine: EngineConfig, bundle: Bundle, num_ranks: int, limit_seconds: float) -> EngineConfig:
    """Replace "auto" in the config: by bf16 if every machine that can hold a rank is fast at it, else by fp32.

    The driver's processor may differ from the workers', and the workers' from each other. If each decided for itself,
    ranks would round differently, and sampling could use a different precision than training.

    Raises:
        WorkerLostError: the machines do not answer within the limit.
    """
    if engine.precision != "auto":
        return engine
    if os.environ.get("RAY_ADDRESS"):
        connect(num_ranks)
        precisions = _precisions_of_nodes(bundle, limit_seconds)
    else:  # all ranks run here
        precisions = {fast_precision("GPU" in bundle)}
    return engine.model_copy(update={"precision": "bf16" if precisions == {"bf16"} else "fp32"})


def fast_precision(on_gpu: bool) -> Precision:
    """Return the lowest precision in which this machine computes fast."""
    return "bf16" if on_gpu or cpu_multiplies_bf16() else "fp32"


def _precisions_of_nodes(bundle: Bundle, limit_seconds: float) -> set[Precision]:
    """Call `fast_precision` on each living machine that can hold a rank."""
    nodes = [
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and all(node["Resources"].get(kind, 0.0) >= amount for kind, amount in bundle.items())
    ]
    remote = ray.remote(fast_precision)
    replies = [
        remote.options(
            num_cpus=0,
            runtime_env={"env_vars": hidden_gpus(bundle)},
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
        ).remote("GPU" in bundle)
        for node in nodes
    ]
    try:
        return set(ray.get(replies, timeout=limit_seconds))
    except ray.exceptions.RayError as error:
        cause = last_line(without_colours(str(error)))
        raise WorkerLostError(f"start: a machine of the cluster did not report its precision: {cause}") from error


HEAD_SECONDS = 45.0  # how long to wait for a head that has ended; Ray ends this process after 60
CHECK_SECONDS = 2.0


@contextmanager
def call_on_lost_head(callback: Callable[[str], None]) -> Iterator[None]:
    """Once Ray's head has ended for good, call `callback` in another thread with a line that says what to do."""
    closes = threading.Event()
    watching = threading.Thread(target=_watch_head, args=(callback, closes), name="head", daemon=True)
    watching.start()
    try:
        yield
    finally:
        closes.set()


def _watch_head(callback: Callable[[str], None], closes: threading.Event) -> None:
    looked_at, gone_seconds = time.monotonic(), 0.0
    while not closes.wait(CHECK_SECONDS):
        # Time in which this process was suspended does not count.
        elapsed, looked_at = min(time.monotonic() - looked_at, 3 * CHECK_SECONDS), time.monotonic()
        address = _head_address()
        if not address:
            gone_seconds = 0.0
            continue
        # A restarted head does not know this job and does not answer it, unless its state was kept outside the head.
        is_gone = not _head_answers() if gone_seconds else _head_refuses(address)
        gone_seconds = gone_seconds + elapsed if is_gone else 0.0
        if gone_seconds > HEAD_SECONDS:
            callback(_lost_head_line(address))
            return


def _head_address() -> str:
    """Return the address of the head of this process's cluster; "" if it is in no cluster, or is just leaving it."""
    try:
        return str(ray.get_runtime_context().gcs_address) if ray.is_initialized() else ""
    except Exception:  # what Ray raises depends on how far it has left
        return ""


def _head_refuses(address: str) -> bool:
    """Whether the machine refuses the connection because no process listens at the address."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _head_answers() -> bool:
    """Whether the head answers this process."""
    try:
        internal_kv.internal_kv_get_gcs_client().internal_kv_multi_get([b"-"], b"heed-head", ANSWER_SECONDS)
    except Exception:  # what Ray raises depends on how the connection was lost, and this process may leave meanwhile
        return False
    return True


def _lost_head_line(address: str) -> str:
    if not os.environ.get("RAY_ADDRESS"):
        return "Ray's head on this machine has ended; run the same command again, which continues"
    return (
        f"Ray's head at {address} has ended; restart Ray there and on the other machines if they do not rejoin by"
        " themselves, then run the same command again, which continues"
    )
