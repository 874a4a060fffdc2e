"""DeepSpeed compiles its CPU communication the first time that it is used, under a lock that a kill leaves behind."""

import logging
import time
from pathlib import Path

from torch.utils import cpp_extension

log = logging.getLogger(__name__)

EXTENSION = "deepspeed_shm_comm"
STALE_SECONDS = 900.0  # compiling takes one minute, or some on a machine that is busy


def drop_stale_lock() -> None:
    """Remove the lock of a compilation that cannot be under way any more; whoever came later would wait for ever."""
    lock = Path(cpp_extension._get_build_directory(EXTENSION, verbose=False)) / "lock"
    try:
        age = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return
    if age > STALE_SECONDS:
        log.warning("%s is %.0f minutes old: its process was killed while compiling; removed", lock, age / 60)
        lock.unlink(missing_ok=True)
