"""SIGTERM, by which Slurm, systemd, containers and `heed jobs stop` end a process: treated like Ctrl-C."""

import ctypes
import signal
import socket
import threading
from collections.abc import Callable, Iterator
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


@contextmanager
def told_at_sigterm(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` in another thread as soon as SIGTERM comes. Does nothing outside the main thread.

    A main thread that waits inside Ray hears of a signal up to a second later. Where the signal has ended Ray's own
    processes too, as Slurm's and systemd's do, Ray ends this one before that, without a word.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, written = socket.socketpair()
    written.setblocking(False)  # as `set_wakeup_fd` wants it
    earlier = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
    listener = threading.Thread(target=_listen, args=(heard, tell), name="SIGTERM", daemon=True)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier)
        written.close()  # ends the listener, after what it has to tell
        listener.join()
        heard.close()


def _listen(heard: socket.socket, tell: Callable[[], None]) -> None:
    """Read the number of each signal, one byte each, until the other end is closed."""
    while numbers := heard.recv(64):
        if signal.SIGTERM in numbers:
            tell()


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
