"""Notices when the process on Ray's head node that keeps Ray's state has ended.

Ray ends the driver a minute after that, with a line of C++ and without running any Python. A thread notices it sooner;
the main thread cannot, because it may be waiting inside Ray. A head that is merely stopped still accepts connections,
and connections to one that is out of reach time out; `cluster.calls` has a limit for that.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray
from ray.experimental import internal_kv

from cluster.messages import ANSWER_SECONDS

HEAD_SECONDS = 45.0  # how long to wait for a head that has ended; Ray ends this process after 60
CHECK_SECONDS = 2.0


@contextmanager
def call_on_lost_head(callback: Callable[[str], None]) -> Iterator[None]:
    """Once Ray's head has ended for good, call `callback` in another thread with a line that says what to do."""
    closes = threading.Event()
    watching = threading.Thread(target=_watch, args=(callback, closes), name="head", daemon=True)
    watching.start()
    try:
        yield
    finally:
        closes.set()


def _watch(callback: Callable[[str], None], closes: threading.Event) -> None:
    looked_at, gone_seconds = time.monotonic(), 0.0
    while not closes.wait(CHECK_SECONDS):
        # Time in which this process was suspended does not count.
        elapsed, looked_at = min(time.monotonic() - looked_at, 3 * CHECK_SECONDS), time.monotonic()
        address = _address()
        if not address:
            gone_seconds = 0.0
            continue
        # A restarted head does not know this job and does not answer it, unless its state was kept outside the head.
        is_gone = not _answers() if gone_seconds else _refuses(address)
        gone_seconds = gone_seconds + elapsed if is_gone else 0.0
        if gone_seconds > HEAD_SECONDS:
            callback(_line(address))
            return


def _address() -> str:
    """Return the address of the head of this process's cluster; "" if it is in no cluster, or is just leaving it."""
    try:
        return str(ray.get_runtime_context().gcs_address) if ray.is_initialized() else ""
    except Exception:  # what Ray raises depends on how far it has left
        return ""


def _refuses(address: str) -> bool:
    """Whether the machine refuses the connection because no process listens at the address."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _answers() -> bool:
    """Whether the head answers this process."""
    try:
        internal_kv.internal_kv_get_gcs_client().internal_kv_multi_get([b"-"], b"heed-head", ANSWER_SECONDS)
    except Exception:  # what Ray raises depends on how the connection was lost, and this process may leave meanwhile
        return False
    return True


def _line(address: str) -> str:
    if not os.environ.get("RAY_ADDRESS"):
        return "Ray's head on this machine has ended; run the same command again, which continues"
    return (
        f"Ray's head at {address} has ended; restart Ray there and on the other machines if they do not rejoin by"
        " themselves, then run the same command again, which continues"
    )
