"""Groups of Ray workers: one process a rank, placed together, called together, failing with the first cause."""

import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Self

import ray
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import ClusterConfig
from cluster.environment import WORKER_ENVIRONMENT
from cluster.failures import MEMORY_ADVICE, Failure, ran_out_of_memory
from cluster.heartbeat import close_heartbeats, open_heartbeats
from cluster.places import (
    Bundle,
    NoPlaceError,
    choose_bundle,
    cluster_gpus,
    hidden_gpus,
    living_nodes,
    most_ranks_per_node,
    nodes_of,
    place,
    require_cores,
    require_machine,
    require_places,
)
from cluster.vigil import Vigil
from cluster.worker import _Worker

log = logging.getLogger(__name__)

LOSS_SECONDS = 15.0  # within which Ray tells of a lost node, to which its peers' broken connections point at once
ECHO_SECONDS = 1.0  # what other ranks may still say when one has failed by itself


class WorkerError(RuntimeError):
    """A call failed on some rank; the message holds the first cause: stage, rank, exception, its traceback."""


class WorkerLostError(WorkerError):
    """A rank is gone: its process was killed, or its node. A new group may do what this one could not finish."""


def connect(num_workers: int) -> None:
    """Join the cluster that RAY_ADDRESS names, or start one in this process for `num_workers` workers.

    Raises: ValueError where this machine has fewer cores than workers.
    """
    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
        return
    require_cores(num_workers)
    # A local cluster has a token by default, and Ray warns of that at each start. Its setting against the warning
    # works only before Ray is imported, when nobody knows yet which cluster is meant.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    # "local": a head that somebody started on this machine is not joined unless RAY_ADDRESS names it.
    ray.init(
        "local",
        num_cpus=os.cpu_count() or 1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )


def disconnect() -> None:
    ray.shutdown()


@dataclass(frozen=True)
class Calls:
    """Calls under way on ranks of a group; calling this waits for them and gives their results in order."""

    group: "WorkerGroup"
    phase: str
    references: tuple[Any, ...]

    def __call__(self) -> list[Any]:
        return wait_all(self)[0]


def wait_all(*started: Calls) -> list[list[Any]]:
    """Wait for calls on several groups whose ranks may wait for each other. Returns the results of each, by rank.

    A rank that is silent for too long, or calls that make no progress at all, are given up as lost.

    Raises: what the first rank to fail raised, and WorkerLostError for a lost one; the groups that fail are closed, and
    ranks that hang because of it are not waited for.
    """
    places = {ref: (calls, rank) for calls in started for rank, ref in enumerate(calls.references)}
    names = {ref: calls.group.names[rank] for ref, (calls, rank) in places.items()}
    first = started[0].group
    vigil = Vigil(first.heartbeats, first.limits, list(names.values()))
    results: dict[Any, Any] = {}
    pending = list(places)
    while pending:
        ready, pending = ray.wait(pending, timeout=vigil.poll_seconds)
        for reference in ready:
            calls, rank = places[reference]
            results[reference] = calls.group._result(calls, rank, pending)
        if not ready:
            vigil.look([names[reference] for reference in pending])
            _require_life(vigil, [(places[reference], names[reference]) for reference in pending])
    return [[results[reference] for reference in calls.references] for calls in started]


def _require_life(vigil: Vigil, pending: Sequence[tuple[tuple[Calls, int], str]]) -> None:
    """Raises: WorkerLostError naming the ranks that are silent, or where none makes progress all that are pending."""
    silent = [place for place, name in pending if vigil.is_silent(name)]
    if silent:
        calls, _ = silent[0]
        ranks = [rank for other, rank in silent if other is calls]
        seconds = max(vigil.limit_of(name) for place, name in pending if place in silent)
        _give_up(
            calls,
            ranks,
            f"no sign of life for {seconds:g} s: its process is stopped, or its machine is out of reach"
            " (cluster.silence_seconds)",
            [other for (other, _), _ in pending],
        )
    calls, _ = pending[0][0]
    ranks = [rank for (other, rank), _ in pending if other is calls]
    if vigil.is_deaf:
        close_heartbeats()
        _give_up(
            calls,
            ranks,
            "nothing can be heard of it, for the process that listens to all ranks is gone",
            [other for (other, _), _ in pending],
        )
    if vigil.is_stalled:
        _give_up(
            calls,
            ranks,
            f"it hangs, without progress for {vigil.config.stall_seconds:g} s (cluster.stall_seconds)",
            [other for (other, _), _ in pending],
        )


def _give_up(calls: Calls, ranks: Sequence[int], why: str, involved: Sequence[Calls]) -> NoReturn:
    """End the groups that wait for each other, a stopped process included. Raises: WorkerLostError."""
    for other in involved:
        other.group.close()
    raise WorkerLostError(
        f"{calls.phase}: rank {', '.join(map(str, ranks))} of {calls.group.num_workers} was lost: {why}"
    )


class WorkerGroup:
    """`num_workers` ranks in one placement group. A cluster that is too small is refused at once, or, with
    `waits_for_nodes`, after the time in which a lost node may come back.

    `bundle` is what each rank takes of its node; without one it is a core, and a GPU where there is one for each.

    Raises: WorkerError from any call that fails on a rank; ValueErrors, which are the user's to mend, come as they are.
    """

    def __init__(
        self,
        num_workers: int,
        config: ClusterConfig | None = None,
        *,
        bundle: Bundle | None = None,
        waits_for_nodes: bool = False,
    ) -> None:
        connect(num_workers)
        self.num_workers, self.config = num_workers, config or ClusterConfig()
        bundle = bundle or choose_bundle(num_workers, cluster_gpus(), use_gpus=self.config.use_gpus)
        if not waits_for_nodes:
            require_places(num_workers, bundle, living_nodes())
        self.heartbeats = open_heartbeats()
        self._placement = place(num_workers, bundle, self.config.wait_for_nodes_seconds)
        group_name = secrets.token_hex(4)
        self.names = [f"{group_name}/{rank}" for rank in range(num_workers)]
        self._workers: list[Any] = self._start(bundle)
        # Loading libraries is no piece of work that counts as progress.
        longer = max(self.config.start_seconds, self.config.stall_seconds)
        self.limits = self.config.model_copy(update={"stall_seconds": longer})
        try:
            host, port = self.free_address()
            self._gather("start", [worker.join.remote(host, port) for worker in self._workers])
            self.limits = self.config
        except WorkerError:
            self.close()
            raise

    def _start(self, bundle: Bundle) -> list[Any]:
        """One worker per bundle, those of one node with neighbouring ranks."""
        nodes = nodes_of(self._placement)
        first = {node: bundle_index for bundle_index, node in reversed(list(enumerate(nodes)))}
        order = sorted(range(len(nodes)), key=lambda index: (first[nodes[index]], index))
        workers, per_node = [], most_ranks_per_node(self.num_workers, bundle)
        for rank, index in enumerate(order):
            remote = ray.remote(_Worker).options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0.0),
                runtime_env={"env_vars": {**WORKER_ENVIRONMENT, **hidden_gpus(bundle)}},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._placement, placement_group_bundle_index=index
                ),
            )
            workers.append(
                remote.remote(
                    rank,
                    self.num_workers,
                    per_node,
                    self.heartbeats,
                    self.names[rank],
                    self.config.beat_limit_seconds,
                )
            )
        return workers

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
        ((host, port),) = self._gather("start", [self._workers[0].address.remote()])
        return str(host), int(port)

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
        """All results by rank, or the first cause of a failure."""
        return Calls(self, phase, tuple(calls))()

    def _result(self, calls: Calls, rank: int, pending: Sequence[Any]) -> Any:
        """What a rank that is done returned.

        Raises: WorkerLostError where it is gone, and the first cause where it failed; `pending` still run.
        """
        reply = self._reply(calls.phase, rank, calls.references[rank])
        if isinstance(reply, Failure):
            own = {reference: place for place, reference in enumerate(calls.references)}
            self._fail(calls.phase, rank, reply, [reference for reference in pending if reference in own], own)
        return reply

    def _reply(self, phase: str, rank: int, reference: Any, heard: str = "") -> Any:
        """The result of a call that is done, or its Failure.

        Raises: WorkerLostError where the rank is gone, `heard` added; WorkerError where what it was given or gave
        cannot be sent.
        """
        try:
            ok, result = ray.get(reference)
        except ray.exceptions.RayError as error:
            self.close()
            if isinstance(error, ray.exceptions.RayTaskError) or "its creation task" in str(error):
                raise WorkerError(f"{phase}: rank {rank} of {self.num_workers}: {error}") from error
            lost = f"{phase}: rank {rank} of {self.num_workers} was lost: {_first_lines(error)}"
            raise WorkerLostError("\n".join(filter(None, (lost, _advice(error), heard)))) from error
        assert ok or isinstance(result, Failure), f"a failed call gave {result!r}"
        return result

    def _fail(
        self, phase: str, rank: int, failure: Failure, waiting: Sequence[Any], rank_of: dict[Any, int]
    ) -> NoReturn:
        """Raise the first cause; the group is closed, its ranks may be stuck.

        A lost rank comes before any exception: its peers fail in their next collective, and may be heard first.
        """
        failures = {rank: failure}
        end = time.monotonic() + (LOSS_SECONDS if failure.kind == "echo" else ECHO_SECONDS)
        while waiting and (left := end - time.monotonic()) > 0:
            ready, waiting = ray.wait(list(waiting), timeout=left)
            for call in ready:
                reply = self._reply(phase, rank_of[call], call, f"rank {rank}: {failure.text}\n{failure.trace}")
                if isinstance(reply, Failure):
                    failures[rank_of[call]] = reply
        self.close()
        causes = {place: found for place, found in failures.items() if found.kind != "echo"}
        first_rank, first = min((causes or failures).items(), key=lambda item: item[1].at)
        if first.kind == "mistake":
            raise first.error
        said = f"rank {first_rank}: {first.text}\n{first.trace}"
        if not causes and waiting:
            silent = ", ".join(str(rank_of[call]) for call in waiting)
            raise WorkerLostError(
                f"{phase}: rank {silent} of {self.num_workers} was lost: it hangs or is out of reach, and the others"
                f" waited for it in vain\n{said}"
            )
        if not causes:
            raise WorkerLostError(
                f"{phase}: the connection between ranks was lost, and no rank reported a cause\n{said}"
            )
        where = f"{phase}: rank {first_rank} of {self.num_workers}"
        if first.kind == "loss":
            raise WorkerLostError(f"{where} was lost: {first.text}\n{first.trace}") from first.error
        advice = MEMORY_ADVICE if first.is_memory else ""
        raise WorkerError(f"{where}: {first.text}\n{first.trace}{advice}") from first.error

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
        remove_placement_group(self._placement)  # ends processes that are stopped, too
        self.heartbeats.forget.remote(self.names)


def _first_lines(error: Exception, limit: int = 4) -> str:
    """Ray's own words for a loss, without the dump of its state that follows them."""
    return "\n".join(str(error).strip().splitlines()[:limit])


def _advice(error: Exception) -> str:
    """What to turn where memory ran out; the exception says how much was asked for."""
    return MEMORY_ADVICE if ran_out_of_memory(error) else ""


def require_room(num_ranks: int, *, use_gpus: bool) -> Bundle:
    """What each of a job's ranks will take of its machine: of the cluster that RAY_ADDRESS names, or of this machine,
    for which Ray need not run yet.

    Raises: ValueError where there could never be room for all ranks at once.
    """
    if not os.environ.get("RAY_ADDRESS") and not ray.is_initialized():
        return require_machine(num_ranks, use_gpus=use_gpus)
    connect(num_ranks)
    bundle = choose_bundle(num_ranks, cluster_gpus(), use_gpus=use_gpus)
    require_places(num_ranks, bundle, living_nodes())
    return bundle


def has_room(num_ranks: int, bundle: Bundle) -> bool:
    """Whether the cluster's living nodes hold so many ranks."""
    try:
        require_places(num_ranks, bundle, living_nodes())
    except NoPlaceError:
        return False
    return True
