"""Calls under way on the ranks of groups, and waiting for them while watching that the ranks live and make progress."""

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

import ray

from cluster.failures import WorkerLostError
from cluster.first_cause import result_of
from cluster.ranks import Ranks
from cluster.vigil import Vigil

Result = TypeVar("Result")


@dataclass(frozen=True)
class Calls(Generic[Result]):
    """Calls under way on ranks of a group. Calling this waits for them and returns their results by rank."""

    ranks: Ranks
    phase: str
    references: tuple[Any, ...]

    def __call__(self) -> list[Result]:
        return wait_all(self)[0]


def stored_once(arguments: Sized) -> Any:
    """Arguments for all ranks of a group, which Ray would pickle and store again for each of them: a reference to one
    copy, from which Ray gives every rank the arguments themselves.
    """
    return ray.put(arguments) if len(arguments) else arguments


def wait_all(*started: Calls[Result]) -> list[list[Result]]:
    """Wait for calls on several groups whose ranks may wait for each other. Returns the results of each, by rank.

    A rank that is silent for too long is given up as lost, and so are all pending ranks once none makes progress.

    Raises:
        WorkerLostError: a rank is lost.
        Exception: whatever the first rank to fail raised. The groups that fail are closed; ranks that hang because of
            the failure are not waited for.
    """
    places = {ref: (calls, rank) for calls in started for rank, ref in enumerate(calls.references)}
    names = {ref: calls.ranks.names[rank] for ref, (calls, rank) in places.items()}
    first = started[0].ranks
    vigil = Vigil(first.limits, list(names.values()))
    results: dict[Any, Any] = {}
    pending = list(places)
    while pending:
        ready, pending = ray.wait(pending, timeout=vigil.poll_seconds)
        for reference in ready:
            calls, rank = places[reference]
            results[reference] = result_of(calls.phase, calls.ranks, calls.references, rank, pending)
        if not ready:
            vigil.look([names[reference] for reference in pending])
            _require_life(vigil, [(places[reference], names[reference]) for reference in pending])
    return [[results[reference] for reference in calls.references] for calls in started]


def _require_life(vigil: Vigil, pending: Sequence[tuple[tuple[Calls[Any], int], str]]) -> None:
    """Raises WorkerLostError naming the silent ranks or, where none makes progress, all that are pending."""
    involved = [calls for (calls, _), _ in pending]
    silent = [(calls, rank, name) for (calls, rank), name in pending if vigil.is_silent(name)]
    if silent:
        calls, _, _ = silent[0]
        seconds = max(vigil.limit_of(name) for _, _, name in silent)
        why = (
            f"no sign of life for {seconds:g} s: its process is stopped, or its machine is out of reach"
            " (cluster.silence_seconds)"
        )
        _give_up(calls, [rank for other, rank, _ in silent if other is calls], why, involved)
    calls, _ = pending[0][0]
    ranks = [rank for (other, rank), _ in pending if other is calls]
    if vigil.is_deaf:
        why = f"nothing can be heard of it, because Ray's head has not answered for {vigil.config.start_seconds:g} s"
        _give_up(calls, ranks, why, involved)
    if vigil.is_stalled:
        why = f"it hangs, without progress for {vigil.config.stall_seconds:g} s (cluster.stall_seconds)"
        _give_up(calls, ranks, why, involved)


def _give_up(calls: Calls[Any], ranks: Sequence[int], why: str, involved: Sequence[Calls[Any]]) -> NoReturn:
    """End the groups that wait for each other, stopped processes included, and raise WorkerLostError."""
    for other in involved:
        other.ranks.close()
    named = ", ".join(map(str, ranks))
    raise WorkerLostError(f"{calls.phase}: rank {named} of {calls.ranks.num_ranks} was lost: {why}")
