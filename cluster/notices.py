"""Notices from workers for the driver's console, kept in Ray's key-value store until the driver takes them.

Passing on a worker's output through Ray would pass on everything it prints, and a file might be on the disk that causes
the trouble.
"""

import itertools
import logging
import os
import time

import ray
from ray.experimental import internal_kv

log = logging.getLogger(__name__)

_NAMESPACE = b"heed-notices"
_numbers = itertools.count()


def send(notice: str) -> None:
    """Send a notice from a worker to its driver. Where Ray's head is out of reach, write it to the worker's log."""
    key = f"{_prefix()}{time.time():020.6f}-{os.getpid()}-{next(_numbers):06d}"
    try:
        internal_kv._internal_kv_put(key.encode(), notice.encode(), namespace=_NAMESPACE)
    except Exception as error:  # of any kind: a notice must not end a run
        log.warning("%s (not sent: %s)", notice, error)


def receive() -> list[str]:
    """All notices that this driver's workers sent since the last call, oldest first."""
    if not ray.is_initialized():
        return []
    found = []
    try:
        for key in sorted(internal_kv._internal_kv_list(_prefix().encode(), namespace=_NAMESPACE)):
            notice = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
            internal_kv._internal_kv_del(key, namespace=_NAMESPACE)
            if notice is not None:
                found.append(notice.decode())
    except Exception as error:
        log.debug("no notices: %s", error)  # the head is unreachable; whoever waits for the workers reports it
    return found


def _prefix() -> str:
    """Keys of this job; a cluster may run several."""
    return f"{ray.get_runtime_context().get_job_id()}-"
