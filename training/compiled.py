"""DeepSpeed compiles its CPU communication at its first use, under a lock that a kill leaves behind."""

import hashlib
import logging
import os
import time

import torch

from training.internals import extension_folder

log = logging.getLogger(__name__)

EXTENSION = "deepspeed_shm_comm"
STALE_SECONDS = 900.0  # compiling takes a minute, a few on a busy machine


def choose_extension_folder() -> None:
    """Compile into a folder of this installation's own, unless TORCH_EXTENSIONS_DIR names one.

    Compiler commands contain the installation's paths, so two of them on one machine would compile it in turns.
    """
    from torch.utils.cpp_extension import get_default_build_root  # imports setuptools, for a second

    installed = hashlib.sha256(f"{torch.__file__} {torch.__version__}".encode()).hexdigest()[:8]
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(get_default_build_root(), f"heed-{installed}"))


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
