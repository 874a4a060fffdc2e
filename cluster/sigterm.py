"""SIGTERM, by which Slurm, systemd, containers and `heed jobs stop` end a process: treated like Ctrl-C."""

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGACTION_BYTES = 1024  # more than any platform's `struct sigaction` has


def end_by_sigterm() -> None:
    """Treat SIGTERM like Ctrl-C. Does nothing outside the main thread, which alone can set a handler."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Give SIGTERM back to its handler after Ray was started, in whatever thread.

    Ray's own handler prints a stack trace of C++, and ends the process before it can say where it stopped.
    """
    libc, handler = ctypes.CDLL(None), ctypes.create_string_buffer(SIGACTION_BYTES)
    libc.sigaction(signal.SIGTERM, None, handler)
    try:
        yield
    finally:
        libc.sigaction(signal.SIGTERM, handler, None)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
