"""Groups of Ray workers: one process a rank, placed together, called together, failing with the first cause."""

import logging
import os
import socket
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Self

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.environment import WORKER_ENVIRONMENT

log = logging.getLogger(__name__)

PLACEMENT_SECONDS = 60.0
LOSS_SECONDS = 15.0  # within which Ray tells of a lost node, to which its peers' broken connections point at once
ECHO_SECONDS = 1.0  # what other ranks may still say when one has failed by itself


class WorkerError(RuntimeError):
    """A call failed on some rank; the message holds the first cause: stage, rank, exception, its traceback."""


class NoPlaceError(ValueError):
    """The cluster has no room for a group of this size."""


class WorkerLostError(WorkerError):
    """A rank is gone: its process was killed, or its node. A new group may do what this one could not finish."""


def connect(num_workers: int) -> None:
    """Join the cluster that RAY_ADDRESS names, or start one in this process for `num_workers` workers.

    Errors: ValueError where this machine has fewer cores than workers.
    """
    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
        return
    cores = os.cpu_count() or 1
    if num_workers > cores:
        raise ValueError(f"workers is {num_workers}; this machine has {cores} cores and each worker needs one")
    # "local": a head that somebody started on this machine is not joined unless RAY_ADDRESS names it.
    ray.init("local", num_cpus=cores, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)


def disconnect() -> None:
    ray.shutdown()


class _Worker:
    """One rank. Functions run in it see the rank environment that `torch.distributed` and Accelerate read."""

    def __init__(self, rank: int, num_workers: int, num_threads: int) -> None:
        import torch

        from cluster import notices
        from training.notices import speak_through

        torch.set_num_threads(num_threads)
        speak_through(notices.send)
        self.rank = rank
        self.objects: dict[str, Any] = {}
        os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(num_workers))

    def address(self) -> tuple[str, int]:
        """This node's address and a free port, for the group's rendezvous."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def join(self, host: str, port: int) -> None:
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))

    def run(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        return self._guarded(lambda: function(*args))

    def build(self, name: str, factory: Callable[..., Any], args: Sequence[Any]) -> Any:
        def make() -> None:
            self.objects[name] = factory(*args)

        return self._guarded(make)

    def call(self, name: str, method: str, args: Sequence[Any]) -> Any:
        return self._guarded(lambda: getattr(self.objects[name], method)(*args))

    def offer(self, name: str, method: str) -> Any:
        """Call a method, and put what rank 0 returns where others can fetch it."""

        def put() -> list[Any]:
            value = getattr(self.objects[name], method)()
            return [ray.put(value)] if self.rank == 0 else []

        return self._guarded(put)

    def receive(self, name: str, method: str, value: Any) -> Any:
        """Ray has fetched the value."""
        return self._guarded(lambda: getattr(self.objects[name], method)(value))

    def drop(self, name: str) -> Any:
        return self._guarded(lambda: self.objects.pop(name).close())

    def _guarded(self, work: Callable[[], Any]) -> tuple[bool, float, Any]:
        """(ok, when it failed, result or description): the driver must learn which rank failed first."""
        try:
            return True, 0.0, work()
        except Exception as error:
            return False, time.time(), (error, traceback.format_exc())


@dataclass(frozen=True)
class Calls:
    """Calls under way on ranks of a group; calling this waits for them and gives their results in order."""

    group: "WorkerGroup"
    phase: str
    references: tuple[Any, ...]

    def __call__(self) -> list[Any]:
        return self.group._gather(self.phase, self.references)


def together(*started: Calls) -> None:
    """Wait for calls on several groups whose ranks wait for each other.

    Errors: those of whichever group fails first, though the others hang.
    """
    owner = {reference: calls for calls in started for reference in calls.references}
    pending = list(owner)
    while pending:
        ready, pending = ray.wait(pending)
        for reference in ready:
            if _has_failed(reference):
                owner[reference]()
    for calls in started:
        calls()


def _has_failed(reference: Any) -> bool:
    try:
        ok, _, _ = ray.get(reference)
    except ray.exceptions.RayError:
        return True
    return not ok


class WorkerGroup:
    """`num_workers` ranks in one placement group. A cluster that is too small is refused at once, or, with
    `waits_for_nodes`, after a while in which a lost node may come back.

    Errors: WorkerError from any call that fails on a rank; ValueErrors, which are the user's to mend, come as they are.
    """

    def __init__(self, num_workers: int, *, waits_for_nodes: bool = False) -> None:
        connect(num_workers)
        self.num_workers = num_workers
        bundle = _bundle(num_workers)
        if not waits_for_nodes:
            require_places(num_workers, bundle, _nodes())
        self._placement = _place(num_workers, bundle)
        threads = max(1, (os.cpu_count() or 1) // num_workers)
        remote = ray.remote(_Worker).options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0.0),
            runtime_env={"env_vars": {**WORKER_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}},
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement),
        )
        self._workers: list[Any] = [remote.remote(rank, num_workers, threads) for rank in range(num_workers)]
        try:
            host, port = self.free_address()
            ray.get([worker.join.remote(host, port) for worker in self._workers])
        except ray.exceptions.RayError as error:
            self.close()
            raise WorkerLostError(f"start: one of {num_workers} workers was lost: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, stage: str, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(*args)` on every rank at once; results by rank."""
        return self._gather(stage, [worker.run.remote(function, args) for worker in self._workers])

    def run_each(self, stage: str, function: Callable[..., Any], args_of_rank: Sequence[Sequence[Any]]) -> list[Any]:
        """As `run`, with arguments of its own for every rank."""
        calls = [worker.run.remote(function, args) for worker, args in zip(self._workers, args_of_rank, strict=True)]
        return self._gather(stage, calls)

    def build(self, name: str, factory: Callable[..., Any], *args: Any) -> None:
        """Keep `factory(*args)` on every rank under `name`."""
        self._gather(name, [worker.build.remote(name, factory, args) for worker in self._workers])

    def call(self, name: str, method: str, args_of_rank: Sequence[Sequence[Any]]) -> list[Any]:
        """A method of the kept object, with arguments of its own for every rank; results by rank."""
        return self.start(name, method, args_of_rank)()

    def start(self, name: str, method: str, args_of_rank: Sequence[Sequence[Any]]) -> Calls:
        """As `call`, but for waiting, which the returned calls do. A rank works in the order of the calls."""
        ranks = zip(self._workers, args_of_rank, strict=True)
        calls = tuple(worker.call.remote(name, method, args) for worker, args in ranks)
        return Calls(self, f"{name}.{method}", calls)

    def start_on_first(self, name: str, method: str, args: Sequence[Any]) -> Calls:
        """As `start`, on rank 0 alone."""
        return Calls(self, f"{name}.{method}", (self._workers[0].call.remote(name, method, args),))

    def free_address(self) -> tuple[str, int]:
        """The address of rank 0's node, and a port that is free there."""
        host, port = ray.get(self._workers[0].address.remote())
        return host, port

    def send(self, name: str, offer: str, *, to: "WorkerGroup", method: str) -> Callable[[], list[Any]]:
        """What the kept object's method `offer` returns on rank 0 goes to `method` of the same name's object on every
        rank of another group, through the object store and not through the driver. Every rank calls `offer`.

        Back once all have offered; the others receive when they have done what they were called for before, and the
        returned function waits for that.
        """
        (reference,), *_ = self._gather(f"{name}.{offer}", [w.offer.remote(name, offer) for w in self._workers])
        calls = [worker.receive.remote(name, method, reference) for worker in to._workers]
        return lambda: to._gather(f"{name}.{method}", calls)

    def drop(self, name: str) -> None:
        """Close the kept object on every rank and forget it."""
        self._gather(name, [worker.drop.remote(name) for worker in self._workers])

    def _gather(self, phase: str, calls: Sequence[Any]) -> list[Any]:
        """All results, or the earliest failure; a rank stuck in a collective with a failed peer is not waited for."""
        rank_of = {call: rank for rank, call in enumerate(calls)}
        results: dict[int, Any] = {}
        pending = list(calls)
        while pending:
            ready, pending = ray.wait(pending)
            for call in ready:
                rank = rank_of[call]
                try:
                    ok, when, result = ray.get(call)
                except ray.exceptions.RayError as error:
                    self.close()
                    lost = f"{phase}: rank {rank} of {self.num_workers} was lost: {error}"
                    raise WorkerLostError("\n".join(filter(None, (lost, _advice(error))))) from error
                if not ok:
                    self._fail(phase, rank, when, result, pending, rank_of)
                results[rank] = result
        return [results[rank] for rank in range(len(calls))]

    def _fail(
        self,
        phase: str,
        rank: int,
        when: float,
        failure: tuple[Exception, str],
        pending: Sequence[Any],
        rank_of: Mapping[Any, int],
    ) -> NoReturn:
        """Raise the first cause; the group is closed, its ranks may be stuck.

        A lost rank comes before any exception: its peers fail in their next collective, and may be heard first.
        """
        failures, waiting = [(when, rank, failure)], list(pending)
        patience = LOSS_SECONDS if _is_consequence(failure[0]) else ECHO_SECONDS
        end = time.monotonic() + patience
        while waiting and (left := end - time.monotonic()) > 0:
            ready, waiting = ray.wait(waiting, timeout=left)
            for call in ready:
                try:
                    ok, other_when, result = ray.get(call)
                except ray.exceptions.RayError as loss:
                    self.close()
                    raise WorkerLostError(
                        f"{phase}: rank {rank_of[call]} of {self.num_workers} was lost: {loss}\n"
                        f"rank {rank}: {failure[0]!r}\n{failure[1]}"
                    ) from loss
                if not ok:
                    failures.append((other_when, rank_of[call], result))
        self.close()
        causes = [item for item in failures if not _is_consequence(item[2][0])]
        _, first_rank, (error, trace) = min(causes or failures, key=lambda item: item[0])
        if isinstance(error, ValueError):
            raise error
        message = f"{phase}: rank {first_rank} of {self.num_workers}: {error!r}\n{trace}"
        if not causes and waiting:
            silent = ", ".join(str(rank_of[call]) for call in waiting)
            raise WorkerLostError(
                f"{phase}: rank {silent} of {self.num_workers} hangs or is out of reach: the others waited for it, and"
                f" it gives no answer\nrank {first_rank}: {error!r}\n{trace}"
            )
        if not causes:
            raise WorkerLostError(f"{phase}: the connection between ranks was lost, and nobody says why\n{message}")
        raise WorkerError(message + _advice(error)) from error

    @property
    def is_open(self) -> bool:
        """Whether it has workers still; a group that lost one is closed."""
        return bool(self._workers)

    def close(self) -> None:
        """End the workers of this group and free their place."""
        if not self.is_open:
            return
        for worker in self._workers:
            ray.kill(worker, no_restart=True)
        self._workers = []
        remove_placement_group(self._placement)


def _is_consequence(error: Exception) -> bool:
    """Whether a rank failed because a peer did not answer: its own failure is an echo of what became of that peer."""
    words = (
        "connection reset",
        "connection closed",
        "closed by peer",
        "connection refused",
        "broken pipe",
        "timed out",
    )
    return isinstance(error, RuntimeError | OSError) and any(word in str(error).lower() for word in words)


def _advice(error: Exception) -> str:
    """What to turn where memory ran out; the exception says how much was asked for."""
    words = ("out of memory", "can't allocate memory", "running low on memory")
    if not isinstance(error, MemoryError) and not any(word in str(error).lower() for word in words):
        return ""
    return (
        "memory ran out: a smaller micro_batch_size, shorter rows (row_tokens, max_response_tokens),"
        " engine.checkpoint_activations, a higher engine.zero_stage, engine.offload (on a GPU) or more workers take"
        " less on a rank; `heed plan` counts it part by part"
    )


def require_cluster(num_workers: int) -> None:
    """Before anything is prepared. Errors: ValueError where the cluster could never hold the workers."""
    connect(num_workers)
    require_places(num_workers, _bundle(num_workers), _nodes())


def _nodes() -> list[Mapping[str, float]]:
    """What each living node has, free or not."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _bundle(num_workers: int) -> dict[str, float]:
    """What a worker takes: a core, and a GPU where there is one for each."""
    gpus = float(ray.cluster_resources().get("GPU", 0.0))
    if 0 < gpus < num_workers:
        log.warning("the cluster has %g GPUs for %d workers: all of them run on CPUs", gpus, num_workers)
    return {"CPU": 1.0, **({"GPU": 1.0} if gpus >= num_workers else {})}


def require_places(num_workers: int, bundle: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> None:
    """A worker lies whole on one node; `nodes` are the resources of each, whether they are free now or not.

    Errors: NoPlaceError, with what is asked and what there is, where the workers could never be placed.
    """
    room = [min(int(node.get(kind, 0.0) // amount) for kind, amount in bundle.items()) for node in nodes]
    if sum(room) < num_workers:
        kinds = Counter(_words({kind: node.get(kind, 0.0) for kind in bundle}) for node in nodes)
        has = ", ".join(f"{number} x ({words})" for words, number in kinds.items())
        raise NoPlaceError(
            f"workers is {num_workers}, each with {_words(bundle)} of one node; the cluster's nodes are {has} and hold"
            f" {sum(room)}"
        )


def _words(bundle: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {kind}" for kind, amount in bundle.items())


def _place(num_workers: int, bundle: Mapping[str, float]) -> PlacementGroup:
    """Errors: NoPlaceError, with what the cluster has, where the group cannot be placed in time."""
    group = placement_group([dict(bundle)] * num_workers, strategy="PACK")
    if not group.wait(PLACEMENT_SECONDS):
        remove_placement_group(group)
        raise NoPlaceError(
            f"{num_workers} workers with {_words(bundle)} each found no place in {PLACEMENT_SECONDS:.0f} s; the cluster"
            f" has {ray.cluster_resources()}, free are {ray.available_resources()}"
        )
    return group
