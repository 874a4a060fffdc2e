"""Notices of workers, for the driver's console: kept in Ray's key-value store until the driver takes them.

Ray would otherwise pass on all that a worker prints, and a file might lie on the disk that is the trouble.
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
    """From a worker to its driver. Where Ray's head is out of reach it is a message of the worker's log."""
    key = f"{_prefix()}{time.time():020.6f}-{os.getpid()}-{next(_numbers):06d}"
    try:
        internal_kv._internal_kv_put(key.encode(), notice.encode(), namespace=_NAMESPACE)
    except Exception as error:  # of any kind: a notice ends no run
        log.warning("%s (not sent: %s)", notice, error)


def receive() -> list[str]:
    """All notices of this driver's workers that were sent since the last call, oldest first."""
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
        log.debug("no notices: %s", error)  # the head is away; whoever waits for the workers reports it
    return found


def _prefix() -> str:
    """A cluster may hold several jobs."""
    return f"{ray.get_runtime_context().get_job_id()}-"
