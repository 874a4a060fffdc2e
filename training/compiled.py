"""DeepSpeed compiles its CPU communication at its first use, under a lock that a kill leaves behind."""

import logging
import time

from training.internals import extension_folder

log = logging.getLogger(__name__)

EXTENSION = "deepspeed_shm_comm"
STALE_SECONDS = 900.0  # compiling takes a minute, a few on a busy machine


def drop_stale_lock() -> None:
    """Remove the lock of a compilation that cannot be running any more; later processes would wait for it forever."""
    lock = extension_folder(EXTENSION) / "lock"
    try:
        age = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return
    if age > STALE_SECONDS:
        log.warning("%s is %.0f minutes old: its process was killed while compiling; removed", lock, age / 60)
        lock.unlink(missing_ok=True)
