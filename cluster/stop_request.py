"""The driver's request to its ranks to save a checkpoint and stop, passed on in Ray's key-value store.

A rank in a call takes no other call, so a thread of each rank 0 looks there. `training.loop` tells the other ranks.
"""

import threading
import time
from contextlib import suppress

import ray
from ray.exceptions import RayError
from ray.experimental import internal_kv

from training.notices import request_stop

POLL_SECONDS = 0.5
_NAMESPACE = b"heed-stop"


def send_request() -> None:
    """Ask all ranks of this driver, if Ray's head can be reached."""
    if ray.is_initialized():
        with suppress(RayError):
            internal_kv._internal_kv_put(_key(), b"stop", namespace=_NAMESPACE)


def withdraw_request() -> None:
    """Take it back, for ranks that start later."""
    if ray.is_initialized():
        with suppress(RayError):
            internal_kv._internal_kv_del(_key(), namespace=_NAMESPACE)


def listen() -> None:
    """Start the thread of a rank that waits for the request."""

    def wait() -> None:
        key = _key()
        while True:
            time.sleep(POLL_SECONDS)
            try:
                is_requested = internal_kv._internal_kv_get(key, namespace=_NAMESPACE) is not None
            except RayError:  # the head is out of reach, which others report
                continue
            if is_requested:
                request_stop()
                return

    threading.Thread(target=wait, name="stop request", daemon=True).start()


def _key() -> bytes:
    """One per job; a cluster may run several."""
    return str(ray.get_runtime_context().get_job_id()).encode()
