"""Calls in progress on the ranks of a group: waiting for them, watching the ranks, and finding the cause of a failure.

The driver's watch (`Vigil`) knows which ranks have been silent for too long, and whether all are stuck. When one rank
fails, its peers fail in their next collective and may report it sooner, so `result_of` finds which failure came first.
"""

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, TypeVar

import ray
from ray._private.state import actors as actor_table
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup

from cluster.config import ClusterConfig
from cluster.failures import (
    MEMORY_ADVICE,
    Failure,
    WorkerError,
    WorkerLostError,
    last_line,
    ran_out_of_memory,
    without_colours,
)
from cluster.hosts import Host, require_code_of, this_host
from cluster.messages import NO_BEAT, Beat, forget_beats, read_beats
from cluster.places import Places, is_placed
from training.notices import RunError, UnrepeatableError, say, waiting, waits_for

# Ray reports a lost node within this time; broken connections of its peers are noticed at once.
LOSS_SECONDS = 15.0
# How long other ranks may still report after one has failed for a reason of its own.
ECHO_SECONDS = 1.0

Result = TypeVar("Result")
REPLACED = object()  # stands for the result of a rank that has a new process, which has been called again


@dataclass
class Ranks:
    """The processes of one group, which are Ray actors, and what is needed to watch them."""

    name: str  # of the group; names of its ranks begin with it
    actors: list[Any]  # by rank; empty once closed
    names: list[str]  # by rank, as used in heartbeats
    placement: PlacementGroup
    limits: ClusterConfig  # how long they may be silent or stuck
    owned: Places | None  # the places, if they end with the group
    start: Callable[[int, str], Any]  # starts the process of a rank under a name, in the rank's place
    nodes: list[str] = field(default_factory=list)  # by rank
    meeting: tuple[str, int] = ("", 0)  # address of the ranks' rendezvous
    replace: Callable[[int, str], bool] | None = None  # gives a lost rank, which died of this, a new process if it can
    begun: dict[int, list[Any]] = field(default_factory=dict)  # of a new process: calls whose failure nobody has seen

    @property
    def num_ranks(self) -> int:
        return len(self.names)

    @property
    def is_open(self) -> bool:
        return bool(self.actors)

    def close(self) -> None:
        """End the processes, and free their places if nothing else holds them."""
        if not self.is_open:
            return
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
        self.actors = []
        if self.owned is not None:
            self.owned.free()
        forget_beats(self.name)

    def renew(self, rank: int) -> Any:
        """Start another process for a rank whose process is lost, in its place. Returns its actor."""
        ray.kill(self.actors[rank], no_restart=True)  # it may live, if only its connection was lost
        name = f"{self.name}/{rank}.{secrets.token_hex(2)}"  # beats of the lost one are not its own
        self.names[rank], self.actors[rank] = name, self.start(rank, name)
        joins = self.actors[rank].join.remote(*self.meeting)
        self.begun[rank] = [joins, self.actors[rank].run.remote(require_same, (this_host(), self.nodes[rank]), {})]
        return self.actors[rank]

    def is_replaced(self, rank: int, why: str) -> bool:
        """Give a rank that has lost its process, but not its machine, a new one if the group's owner can."""
        if self.replace is None or not self.is_open:
            return False
        try:
            is_there = any(node["NodeID"] == self.nodes[rank] and node["Alive"] for node in ray.nodes())
        except RayError:  # the head is lost
            return False
        return is_there and self.replace(rank, why)


def require_same(driver: Host, node: str) -> None:
    """Check that this process may take another's place: it has the driver's code and is on the other's machine.

    Raises: UnrepeatableError if Ray has moved its place to another machine, whose bits may be others, as Ray does if it
        notices the loss of a process before that of its machine. ValueError for other code.
    """
    if ray.get_runtime_context().get_node_id() != node:
        raise UnrepeatableError("its machine is lost too")
    require_code_of(driver)


@dataclass(frozen=True)
class Calls(Generic[Result]):
    """Calls in progress on ranks of a group. Calling this object waits for them and returns their results by rank."""

    ranks: Ranks
    phase: str
    references: list[Any]  # by rank; those of a rank that is replaced are replaced too

    def __call__(self) -> list[Result]:
        return wait_all(self)[0]

    def mend(self) -> None:
        """Replace ranks whose process has ended, if they can be, without waiting for anything."""
        ended, _ = ray.wait(self.references, num_returns=len(self.references), timeout=0)
        for rank in [rank for rank, reference in enumerate(self.references) if reference in ended]:
            if actor_table(self.ranks.actors[rank]._actor_id.hex()).get("State") == "DEAD":
                self.ranks.is_replaced(rank, "Its process has ended.")


def stored_once(arguments: Sized) -> Any:
    """Store arguments for all ranks of a group once and return a reference, which Ray replaces by the arguments on each
    rank. Without it, Ray would pickle and store them again for every rank.
    """
    return ray.put(arguments) if len(arguments) else arguments


def wait_all(*started: Callable[[], list[Result]]) -> list[list[Result]]:
    """Wait for `Calls` on several groups whose ranks may wait for each other. Returns the results of each, by rank.

    A rank that is silent for too long counts as lost, and so do all pending ranks once none makes progress. One that
    waits, such as for a server, has its own limit; this process then waits for the same. A rank that is replaced
    (`cluster.remote.Replaceable`) is waited for again.

    Raises:
        WorkerLostError: a rank is lost.
        Exception: whatever the first rank to fail raised. The groups that fail are closed; ranks that hang because of
            the failure are not waited for.
    """
    in_progress = [calls for calls in started if isinstance(calls, Calls)]
    assert len(in_progress) == len(started), f"calls on groups were expected, not {started}"
    results = dict[Any, Any]()
    with waiting() as wait_for:
        while pending := _places_of(in_progress, results):
            _gather(pending, _vigil(in_progress), results, wait_for)
    return [[results[reference] for reference in calls.references] for calls in in_progress]


def _places_of(in_progress: Sequence[Calls[Any]], results: Mapping[Any, Any]) -> dict[Any, tuple[Calls[Any], int]]:
    """Returns the references without results, each with its calls and rank."""
    all_places = {ref: (calls, rank) for calls in in_progress for rank, ref in enumerate(calls.references)}
    return {reference: place for reference, place in all_places.items() if reference not in results}


def _gather(
    places: Mapping[Any, tuple[Calls[Any], int]],
    vigil: "Vigil",
    results: dict[Any, Any],
    wait_for: Callable[[str], None],
) -> None:
    """Wait until all results are there, or a rank has a new process, whose references are others."""
    pending = list(places)
    while pending:
        ready, pending = ray.wait(pending, timeout=vigil.poll_seconds)
        for reference in ready:
            calls, rank = places[reference]
            result = result_of(calls.phase, calls.ranks, calls.references, rank, pending)
            if result is REPLACED:
                return
            results[reference] = result
        if not ready:
            waited_for = [(places[reference], _name_of(*places[reference])) for reference in pending]
            vigil.look([name for _, name in waited_for])
            if vigil.awaited not in ("", waits_for()):
                say(vigil.awaited)
            wait_for(vigil.awaited)
            _require_life(vigil, waited_for)


def _name_of(calls: Calls[Any], rank: int) -> str:
    return calls.ranks.names[rank]


def _vigil(in_progress: Sequence[Calls[Any]]) -> "Vigil":
    """Returns a watch over all ranks of the calls."""
    of_ranks = [(calls, rank) for calls in in_progress for rank in range(len(calls.references))]
    actors = {_name_of(calls, rank): calls.ranks.actors[rank] for calls, rank in of_ranks if calls.ranks.is_open}
    limits = in_progress[0].ranks.limits
    if any(calls.ranks.begun for calls in in_progress):  # a new process loads its libraries
        limits = limits.model_copy(update={"stall_seconds": max(limits.start_seconds, limits.stall_seconds)})
    return Vigil(limits, [_name_of(calls, rank) for calls, rank in of_ranks], actors)


@dataclass
class _Clock:
    """What is known about one worker since a call began."""

    beat: Beat = NO_BEAT
    silent_seconds: float = 0.0
    has_process: bool = False

    @property
    def limit(self) -> str:
        """The setting that limits the worker's silence. While Ray starts its process, that is a different one."""
        return "silence_seconds" if self.has_process else "start_seconds"


@dataclass
class Vigil:
    """Watches the workers of a call, or of several calls that wait for each other.

    Only time between two answers of the store counts, so a driver that was suspended or too busy to look does not
    mistake its own pause for silence of the workers.
    """

    config: ClusterConfig
    workers: Sequence[str]
    actors: Mapping[str, Any]  # by worker; without those of closed groups
    awaited: str = ""  # what a pending worker was waiting for at its last heartbeat
    _clocks: dict[str, _Clock] = field(default_factory=dict)
    _stalled_seconds: float = 0.0
    _unanswered_since: float = 0.0  # when the store first failed to answer; 0 = it has answered
    _answered_at: float = 0.0

    @property
    def poll_seconds(self) -> float:
        """How often to look."""
        return min(1.0, self.config.beat_limit_seconds / 10)

    def look(self, pending: Collection[str]) -> None:
        """Read the heartbeats, and add up the silence and stalls of the workers that still have work to do.

        Call it every `poll_seconds`. If Ray's head does not answer within `ANSWER_SECONDS`, no worker is counted as
        silent.
        """
        asked_at = time.monotonic()
        try:
            heard = read_beats(self.workers)
            self._find_processes(heard, pending)
        except RayError:
            self._unanswered_since = self._unanswered_since or asked_at
            return
        now, self._unanswered_since = time.monotonic(), 0.0
        first = self._answered_at == 0.0
        # Time that the driver spent elsewhere does not count as silence.
        elapsed = 0.0 if first else min(now - self._answered_at, 3 * self.poll_seconds)
        self._answered_at = now
        self._count(heard, pending, elapsed)

    def _find_processes(self, heard: Collection[str], pending: Collection[str]) -> None:
        """Note which workers' processes have started. One without a beat may have been stopped before its first.

        Raises:
            RayError: Ray's head does not answer.
        """
        for worker in pending:
            clock, actor = self._clocks.setdefault(worker, _Clock()), self.actors.get(worker)
            if clock.has_process:
                continue
            if worker in heard or actor is None or actor_table(actor._actor_id.hex()).get("Pid"):
                clock.has_process, clock.silent_seconds = True, 0.0

    def _count(self, heard: Mapping[str, Beat], pending: Collection[str], elapsed: float) -> None:
        moved, self.awaited = False, ""
        for worker in pending:
            clock = self._clocks.setdefault(worker, _Clock())
            beat = heard.get(worker, clock.beat)
            clock.silent_seconds = 0.0 if beat.number != clock.beat.number else clock.silent_seconds + elapsed
            self.awaited = self.awaited or beat.awaited
            moved = moved or beat.progress != clock.beat.progress or bool(beat.awaited)
            clock.beat = beat
        self._stalled_seconds = 0.0 if moved else self._stalled_seconds + elapsed

    def limit_of(self, worker: str) -> str:
        """Return which setting of [cluster] limits this worker's silence."""
        return self._clocks.get(worker, _Clock()).limit

    def is_starting(self, worker: str) -> bool:
        """Whether Ray's head has just reported that this worker has no process yet."""
        clock = self._clocks.get(worker)
        return clock is not None and not clock.has_process and self._unanswered_since == 0.0

    def is_silent(self, worker: str) -> bool:
        clock = self._clocks.get(worker, _Clock())
        return clock.silent_seconds > getattr(self.config, clock.limit)

    @property
    def is_stalled(self) -> bool:
        """Whether, for too long, no worker that has work to do has made progress."""
        return self._stalled_seconds > self.config.stall_seconds

    def users_code_of(self, worker: str) -> str:
        """Return which user code this worker was running at its last heartbeat; "" for none."""
        return self._clocks.get(worker, _Clock()).beat.users_code

    @property
    def is_deaf(self) -> bool:
        """Whether Ray's head has not answered for so long that it will not answer again."""
        since = self._unanswered_since
        return since > 0 and time.monotonic() - since > self.config.start_seconds


def _require_life(vigil: Vigil, pending: Sequence[tuple[tuple[Calls[Any], int], str]]) -> None:
    """Raises WorkerLostError naming the silent ranks or, if none makes progress, all pending ranks; RunError if a rank
    is stuck in user code, since another try would get stuck too.
    """
    involved = [calls for (calls, _), _ in pending]
    silent = [(calls, rank, name) for (calls, rank), name in pending if vigil.is_silent(name)]
    if silent:
        calls, _, first = silent[0]
        limit = vigil.limit_of(first)
        cause = "is stopped" if limit == "silence_seconds" else "does not start"
        why = (
            f"no heartbeat for {getattr(vigil.config, limit):g} s (cluster.{limit}): its process {cause}, or its"
            " machine is unreachable"
        )
        lost = [rank for other, rank, name in silent if other is calls and vigil.limit_of(name) == limit]
        _give_up(calls, lost, why, involved)
    starting = {calls.ranks.name: (calls, rank) for (calls, rank), name in pending if vigil.is_starting(name)}
    for calls, rank in starting.values():
        if not is_placed(calls.ranks.placement):
            _give_up(calls, [rank], "a machine of its group was lost before its process started", involved)
    calls, _ = pending[0][0]
    ranks = [rank for (other, rank), _ in pending if other is calls]
    if vigil.is_deaf:
        why = f"its state is unknown, because Ray's head has not answered for {vigil.config.start_seconds:g} s"
        _give_up(calls, ranks, why, involved)
    for (stuck, rank), name in pending if vigil.is_stalled else ():
        if code := vigil.users_code_of(name):
            _close_all(involved)
            raise RunError(
                f"{stuck.phase}: rank {rank} of {stuck.ranks.num_ranks}: {code} has not returned for"
                f" {vigil.config.stall_seconds:g} s (cluster.stall_seconds). It would hang again, so the run ends;"
                " fix the function, or raise the limit if it is only slow, and run the same command again"
            )
    if vigil.is_stalled:
        why = f"it has made no progress for {vigil.config.stall_seconds:g} s (cluster.stall_seconds)"
        _give_up(calls, ranks, why, involved)


def _close_all(involved: Sequence[Calls[Any]]) -> None:
    for other in involved:
        other.ranks.close()


def _give_up(calls: Calls[Any], ranks: Sequence[int], why: str, involved: Sequence[Calls[Any]]) -> NoReturn:
    """End the groups that wait for each other, stopped processes included, and raise WorkerLostError."""
    _close_all(involved)
    named = ", ".join(map(str, ranks))
    raise WorkerLostError(f"{calls.phase}: rank {named} of {calls.ranks.num_ranks} was lost: {why}")


def result_of(phase: str, ranks: Ranks, references: Sequence[Any], rank: int, pending: Sequence[Any]) -> Any:
    """Return the result of a rank whose call has ended, or REPLACED. `references` are the calls of all ranks; `pending`
    still run.

    Raises:
        WorkerLostError: the rank is gone.
        Exception: the first cause, if the call failed. The group is then closed.
    """
    begun = ranks.begun.pop(rank, [])
    # A result from before the loss may be there before the new process is; nothing waits for that here.
    ended = ray.wait(begun, num_returns=len(begun), timeout=0)[0] if begun else []
    ranks.begun |= {rank: left} if (left := [one for one in begun if one not in ended]) else {}
    for reference in [*(one for one in begun if one in ended), references[rank]]:
        reply = _reply(phase, ranks, rank, reference)
        if reply is REPLACED:
            return reply
        if isinstance(reply, Failure):
            break
    if isinstance(reply, Failure):
        rank_of = {reference: place for place, reference in enumerate(references)}
        waiting = [reference for reference in pending if reference in rank_of]
        _raise_first_cause(phase, ranks, rank, reply, waiting, rank_of)
    return reply


def _reply(phase: str, ranks: Ranks, rank: int, reference: Any, heard: str = "") -> Any:
    """Return the result of a call that has ended, its Failure, or REPLACED.

    Raises:
        WorkerLostError: the rank is gone; the message includes `heard`.
        WorkerError: an argument or the result cannot be sent.
    """
    try:
        ok, result = ray.get(reference)
    except RayError as error:
        why = without_colours(str(error)).strip().split("\n")[0]
        if isinstance(error, RayActorError) and ranks.is_replaced(rank, why):
            return REPLACED
        ranks.close()
        if isinstance(error, ray.exceptions.RayTaskError) or "its creation task" in str(error):
            text = without_colours(str(error))
            raise WorkerError(f"{phase}: rank {rank} of {ranks.num_ranks}: {last_line(text)}\n{text}") from error
        # Ray's own message, without the dump of its state that follows
        first_lines = "\n".join(without_colours(str(error)).strip().splitlines()[:4])
        lost = f"{phase}: rank {rank} of {ranks.num_ranks} was lost: {first_lines}"
        raise WorkerLostError("\n".join(filter(None, (lost, _advice(error), heard)))) from error
    assert ok or isinstance(result, Failure), f"a failed call returned {result!r}, not a Failure"
    return result


def _raise_first_cause(
    phase: str, ranks: Ranks, rank: int, failure: Failure, waiting: Sequence[Any], rank_of: dict[Any, int]
) -> NoReturn:
    """Wait briefly for other ranks to report, close the group (its ranks may be stuck), and raise the first cause.

    A lost rank takes precedence over any exception.
    """
    ranks.replace = None  # the group ends
    failures = {rank: failure}
    end = time.monotonic() + (LOSS_SECONDS if failure.kind == "echo" else ECHO_SECONDS)
    while waiting and (left := end - time.monotonic()) > 0:
        ready, waiting = ray.wait(list(waiting), timeout=left)
        for call in ready:
            reply = _reply(phase, ranks, rank_of[call], call, f"rank {rank}: {failure.text}\n{failure.trace}")
            if isinstance(reply, Failure):
                failures[rank_of[call]] = reply
    ranks.close()
    causes = {place: failure_of_rank for place, failure_of_rank in failures.items() if failure_of_rank.kind != "echo"}
    if not causes:
        _raise_unexplained(phase, ranks, failures, [rank_of[call] for call in waiting])
    first_rank, first = min(causes.items(), key=lambda item: item[1].at)
    if first.kind == "mistake":
        raise first.error
    where = f"{phase}: rank {first_rank} of {ranks.num_ranks}"
    if first.kind == "loss":
        raise WorkerLostError(f"{where} was lost: {first.text}\n{first.trace}") from first.error
    advice = MEMORY_ADVICE if first.is_memory else ""
    raise WorkerError(f"{where}: {first.text}\n{first.trace}{advice}") from first.error


def _raise_unexplained(phase: str, ranks: Ranks, echoes: dict[int, Failure], silent: Sequence[int]) -> NoReturn:
    """Raise for a group in which each failure only echoes another rank's; `silent` ranks have not answered."""
    rank, first = min(echoes.items(), key=lambda item: item[1].at)
    report = f"rank {rank}: {first.text}\n{first.trace}"
    if silent:
        raise WorkerLostError(
            f"{phase}: rank {', '.join(map(str, silent))} of {ranks.num_ranks} was lost: it hangs or is unreachable,"
            f" and the other ranks failed while waiting for it\n{report}"
        )
    raise WorkerLostError(f"{phase}: the connection between ranks was lost, and no rank reported a cause\n{report}")


def _advice(error: Exception) -> str:
    """Say which settings to change if memory ran out. The exception says how much was requested."""
    return MEMORY_ADVICE if ran_out_of_memory(error) else ""
