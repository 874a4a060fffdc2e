"""Which failure came first: when one rank fails, its peers fail in their next collective and may be heard sooner."""

import time
from collections.abc import Sequence
from typing import Any, NoReturn

import ray

from cluster.failures import (
    MEMORY_ADVICE,
    Failure,
    WorkerError,
    WorkerLostError,
    last_line,
    ran_out_of_memory,
    without_colours,
)
from cluster.ranks import Ranks

# Ray reports a lost node within this time; its peers' broken connections are noticed at once.
LOSS_SECONDS = 15.0
# How long other ranks may still report after one has failed for a reason of its own.
ECHO_SECONDS = 1.0


def result_of(phase: str, ranks: Ranks, references: Sequence[Any], rank: int, pending: Sequence[Any]) -> Any:
    """The result of a rank whose call has ended. `references` are the calls of all ranks; `pending` still run.

    Raises:
        WorkerLostError: the rank is gone.
        Exception: the first cause, where the call failed; the group is closed then.
    """
    reply = _reply(phase, ranks, rank, references[rank])
    if isinstance(reply, Failure):
        rank_of = {reference: place for place, reference in enumerate(references)}
        waiting = [reference for reference in pending if reference in rank_of]
        _raise_first_cause(phase, ranks, rank, reply, waiting, rank_of)
    return reply


def _reply(phase: str, ranks: Ranks, rank: int, reference: Any, heard: str = "") -> Any:
    """The result of a call that has ended, or its Failure.

    Raises:
        WorkerLostError: the rank is gone; the message includes `heard`.
        WorkerError: an argument or the result cannot be sent.
    """
    try:
        ok, result = ray.get(reference)
    except ray.exceptions.RayError as error:
        ranks.close()
        if isinstance(error, ray.exceptions.RayTaskError) or "its creation task" in str(error):
            text = without_colours(str(error))
            raise WorkerError(f"{phase}: rank {rank} of {ranks.num_ranks}: {last_line(text)}\n{text}") from error
        lost = f"{phase}: rank {rank} of {ranks.num_ranks} was lost: {_first_lines(error)}"
        raise WorkerLostError("\n".join(filter(None, (lost, _advice(error), heard)))) from error
    assert ok or isinstance(result, Failure), f"a failed call gave {result!r}"
    return result


def _raise_first_cause(
    phase: str, ranks: Ranks, rank: int, failure: Failure, waiting: Sequence[Any], rank_of: dict[Any, int]
) -> NoReturn:
    """Wait briefly for what other ranks report, close the group (its ranks may be stuck), and raise the first cause.

    A lost rank takes precedence over any exception.
    """
    failures = {rank: failure}
    end = time.monotonic() + (LOSS_SECONDS if failure.kind == "echo" else ECHO_SECONDS)
    while waiting and (left := end - time.monotonic()) > 0:
        ready, waiting = ray.wait(list(waiting), timeout=left)
        for call in ready:
            reply = _reply(phase, ranks, rank_of[call], call, f"rank {rank}: {failure.text}\n{failure.trace}")
            if isinstance(reply, Failure):
                failures[rank_of[call]] = reply
    ranks.close()
    causes = {place: found for place, found in failures.items() if found.kind != "echo"}
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
            f"{phase}: rank {', '.join(map(str, silent))} of {ranks.num_ranks} was lost: it hangs or is out of reach,"
            f" and the others waited for it in vain\n{report}"
        )
    raise WorkerLostError(f"{phase}: the connection between ranks was lost, and no rank reported a cause\n{report}")


def _first_lines(error: Exception, limit: int = 4) -> str:
    """Ray's own words for a loss, without the dump of its state that follows them."""
    return "\n".join(without_colours(str(error)).strip().splitlines()[:limit])


def _advice(error: Exception) -> str:
    """Which settings to change where memory ran out; the exception says how much was asked for."""
    return MEMORY_ADVICE if ran_out_of_memory(error) else ""
