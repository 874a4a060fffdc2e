"""Messages between driver and ranks in the key-value store of Ray's head: heartbeats, notices, a request to stop.

Every process has a connection to the store anyway. Workers import this module before torch, so it imports nothing that
imports torch.

Heartbeats: a thread of each worker sends beats with the count of work done (`lm.progress`). A process sends none while
it is stopped or its machine is out of reach; one that is stuck keeps sending the same count. `cluster.calls` acts on
this.

Notices: lines for the driver's console, kept until the driver takes them. Forwarding a worker's output through Ray
would forward everything it prints, and a file might be on the very disk that has failed.

Request to stop: a rank that is in a call accepts no other call, so a thread of each rank 0 polls for the request.
`training.loop` passes it on to the other ranks.

Claims: a job that has lost its places sends a claim. Until it has places again, jobs that wait for their first places
let it go first.
"""

import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.experimental import internal_kv

from lm.progress import progress_noted, users_code_noted
from training.notices import request_stop, waits_for

log = logging.getLogger(__name__)

BEATS_IN_LIMIT = 6  # so that a late beat is not taken for silence
MAX_BEAT_SECONDS = 5.0
ANSWER_SECONDS = 2.0  # how long to wait for the store, which normally answers within milliseconds
STOP_POLL_SECONDS = 0.5  # between polls for the request to stop
_BEATS, _NOTICES, _STOP, _CLAIMS = b"heed-beats", b"heed-notices", b"heed-stop", b"heed-claims"  # namespaces
_notice_numbers = itertools.count()


def send_beats(worker: str, limit_seconds: float) -> None:
    """Start the thread that sends several beats per limit for as long as this process lives."""
    pause = min(MAX_BEAT_SECONDS, limit_seconds / BEATS_IN_LIMIT)

    def run() -> None:
        for number in itertools.count(1):
            beat = json.dumps([number, progress_noted(), users_code_noted(), waits_for()]).encode()
            try:
                _store().internal_kv_put(worker.encode(), beat, True, _BEATS, ANSWER_SECONDS)
            except RayError as error:  # the head is out of reach; the next beat may get through
                log.warning("heartbeat %d was not sent: %s", number, error)
            time.sleep(pause)

    threading.Thread(target=run, name="heartbeat", daemon=True).start()


@dataclass(frozen=True)
class Beat:
    """A heartbeat of a worker: its number, the work that the worker has counted, the user code that it runs, and what
    it waits for, such as a server.
    """

    number: int
    progress: int
    users_code: str = ""  # "" if it runs none
    awaited: str = ""  # "" if it waits for nothing


NO_BEAT = Beat(0, -1)


def read_beats(workers: Sequence[str]) -> dict[str, Beat]:
    """Return the last beat of each of these workers; those that have not sent one are absent.

    Raises:
        RayError: Ray's head does not answer.
    """
    keys = [worker.encode() for worker in workers]
    stored = _store().internal_kv_multi_get(keys, _BEATS, ANSWER_SECONDS)
    return {key.decode(): Beat(*json.loads(beat)) for key, beat in stored.items()}


def forget_beats(group: str) -> None:
    """Remove the beats of a group's workers, whose names begin with `group/`.

    Beats that a worker sends while it ends remain: a few bytes that nobody reads, since no later group has this name.
    """
    with suppress(RayError):
        _store().internal_kv_del(f"{group}/".encode(), True, _BEATS, ANSWER_SECONDS)


def _store() -> Any:
    """The store's client, which Ray replaces when a process leaves a cluster and joins another."""
    return internal_kv.internal_kv_get_gcs_client()


def send_notice(notice: str) -> None:
    """Send a notice from a worker to its driver. If Ray's head is out of reach, write it to the worker's log."""
    key = f"{_job()}-{time.time():020.6f}-{os.getpid()}-{next(_notice_numbers):06d}"
    try:
        internal_kv._internal_kv_put(key.encode(), notice.encode(), namespace=_NOTICES)
    except Exception as error:  # any error: a notice must not end a run
        log.warning("%s (not sent: %s)", notice, error)


def receive_notices() -> list[str]:
    """Return all notices that this driver's workers sent since the last call, oldest first."""
    if not ray.is_initialized():
        return []
    notices = []
    try:
        for key in sorted(internal_kv._internal_kv_list(f"{_job()}-".encode(), namespace=_NOTICES)):
            notice = internal_kv._internal_kv_get(key, namespace=_NOTICES)
            internal_kv._internal_kv_del(key, namespace=_NOTICES)
            if notice is not None:
                notices.append(notice.decode())
    except Exception as error:
        # The head is unreachable; the code that waits for the workers reports it.
        log.debug("cannot read notices: %s", error)
    return notices


def send_request() -> None:
    """Ask all ranks of this driver to save a checkpoint and stop, if Ray's head can be reached."""
    if ray.is_initialized():
        with suppress(RayError):
            internal_kv._internal_kv_put(_job().encode(), b"stop", namespace=_STOP)


def withdraw_request() -> None:
    """Take the request to stop back, for ranks that start later."""
    if ray.is_initialized():
        with suppress(RayError):
            internal_kv._internal_kv_del(_job().encode(), namespace=_STOP)


def listen_for_request() -> None:
    """Start the thread of a rank that waits for the request to stop."""

    def wait() -> None:
        key = _job().encode()
        while True:
            time.sleep(STOP_POLL_SECONDS)
            try:
                is_requested = internal_kv._internal_kv_get(key, namespace=_STOP) is not None
            except RayError:  # the head is out of reach, which is reported elsewhere
                continue
            if is_requested:
                request_stop()
                return

    threading.Thread(target=wait, name="stop request", daemon=True).start()


def send_claim(number: int) -> None:
    """Let jobs that wait for their first places know that this job has lost its own. `number` grows with each call."""
    with suppress(RayError):
        _store().internal_kv_put(_job().encode(), str(number).encode(), True, _CLAIMS, ANSWER_SECONDS)


def withdraw_claim(job: str = "") -> None:
    """Remove the claim of this job, or of another job that has ended."""
    with suppress(RayError):
        _store().internal_kv_del((job or _job()).encode(), False, _CLAIMS, ANSWER_SECONDS)


def claims_of_others() -> dict[str, int]:
    """Return the number of each other job's last claim. It no longer changes once that job has ended."""
    try:
        others = [key for key in _store().internal_kv_keys(b"", _CLAIMS, ANSWER_SECONDS) if key != _job().encode()]
        claims = _store().internal_kv_multi_get(others, _CLAIMS, ANSWER_SECONDS) if others else {}
    except RayError:
        return {}
    return {key.decode(): int(number) for key, number in claims.items()}


def _job() -> str:
    """The id of this driver's job. Its keys begin with it, since a cluster may run several jobs."""
    return str(ray.get_runtime_context().get_job_id())
