"""Heartbeats, from which the driver knows a worker process that is silent or stuck.

A thread of each worker sends beats with the count of work done (`lm.progress`). A stopped process, or one whose machine
is out of reach, sends none; one that is stuck sends beats with the same count. Beats go to an actor on the driver's
machine, so they need no connection that Ray does not need anyway. `cluster.vigil` draws the conclusions.

Workers import this before torch, so it imports nothing that imports torch.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.environment import NICENESS
from lm.progress import progress_noted

BEATS_IN_LIMIT = 6  # so that a late beat is not taken for silence
MAX_BEAT_SECONDS = 5.0


class _Heartbeats:
    """What was heard from each worker: the number of beats, and the count of work in the last one."""

    def __init__(self) -> None:
        self.heard: dict[str, tuple[int, int]] = {}

    def beat(self, worker: str, progress: int) -> None:
        self.heard[worker] = (self.heard.get(worker, (0, 0))[0] + 1, progress)

    def read(self, workers: Sequence[str]) -> dict[str, tuple[int, int]]:
        return {worker: self.heard[worker] for worker in workers if worker in self.heard}

    def forget(self, workers: Sequence[str]) -> None:
        for worker in workers:
            self.heard.pop(worker, None)


_open: dict[tuple[str, str], Any] = {}  # by node and job; kept because Ray ends an actor once its first handle is gone


def open_heartbeats() -> Any:
    """The actor that receives this driver's workers' beats. The first call starts it; Ray restarts it if it dies."""
    context = ray.get_runtime_context()
    driver = context.get_node_id(), context.get_job_id()
    if driver not in _open:
        _open.clear()  # leftovers belong to a cluster that this process has left
        here = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)
        options = {
            "num_cpus": 0, "max_restarts": -1, "scheduling_strategy": here, "enable_task_events": False,
            "runtime_env": {"env_vars": NICENESS},
        }  # fmt: skip
        _open[driver] = ray.remote(_Heartbeats).options(**options).remote()
    return _open[driver]


def close_heartbeats() -> None:
    """End the actor, which no longer answers; the next group of workers gets a new one."""
    for heartbeats in _open.values():
        ray.kill(heartbeats, no_restart=True)
    _open.clear()


def send_beats(heartbeats: Any, worker: str, limit_seconds: float) -> None:
    """Start the thread that sends beats, several within the limit, as long as this process lives."""
    pause = min(MAX_BEAT_SECONDS, limit_seconds / BEATS_IN_LIMIT)

    def run() -> None:
        while True:
            heartbeats.beat.options(num_returns=0).remote(worker, progress_noted())
            time.sleep(pause)

    threading.Thread(target=run, name="heartbeat", daemon=True).start()
