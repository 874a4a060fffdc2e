"""Heartbeats, from which the driver knows a worker process that is silent or stuck.

A thread of each worker sends beats with the count of work done (`lm.progress`). A stopped process, or one whose machine
is out of reach, sends none; one that is stuck sends beats with the same count. Beats go to the key-value store of Ray's
head, over a connection that Ray keeps anyway. `cluster.vigil` draws the conclusions.

Workers import this before torch, so it imports nothing that imports torch.
"""

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ray.exceptions import RayError
from ray.experimental import internal_kv

from lm.progress import progress_noted

log = logging.getLogger(__name__)

BEATS_IN_LIMIT = 6  # so that a late beat is not taken for silence
MAX_BEAT_SECONDS = 5.0
ANSWER_SECONDS = 2.0  # how long to wait for the store, which normally answers within milliseconds
_NAMESPACE = b"heed-beats"


def send_beats(worker: str, limit_seconds: float) -> None:
    """Start the thread that sends beats, several within the limit, as long as this process lives."""
    pause = min(MAX_BEAT_SECONDS, limit_seconds / BEATS_IN_LIMIT)

    def run() -> None:
        for number in itertools.count(1):
            beat = f"{number} {progress_noted()}".encode()
            try:
                _store().internal_kv_put(worker.encode(), beat, True, _NAMESPACE, ANSWER_SECONDS)
            except RayError as error:  # the head is out of reach; the next beat may get through
                log.warning("heartbeat %d was not sent: %s", number, error)
            time.sleep(pause)

    threading.Thread(target=run, name="heartbeat", daemon=True).start()


def read_beats(workers: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Returns the number of beats and the last count of work, for each of these workers that was heard.

    Raises:
        RayError: Ray's head does not answer.
    """
    keys = [worker.encode() for worker in workers]
    found = _store().internal_kv_multi_get(keys, _NAMESPACE, ANSWER_SECONDS)
    beats = {key.decode(): beat.split() for key, beat in found.items()}
    return {worker: (int(number), int(progress)) for worker, (number, progress) in beats.items()}


def forget_beats(group: str) -> None:
    """Remove the beats of a group's workers, whose names begin with `group/`.

    What a worker sends while it ends remains: a few bytes that nobody reads, as no later group has this name.
    """
    with suppress(RayError):
        _store().internal_kv_del(f"{group}/".encode(), True, _NAMESPACE, ANSWER_SECONDS)


def _store() -> Any:
    """The store's client, which Ray replaces when a process leaves a cluster and joins another."""
    return internal_kv.internal_kv_get_gcs_client()
