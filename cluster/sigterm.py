"""SIGTERM, by which Slurm, systemd, containers and `heed jobs stop` end a process: treated like Ctrl-C."""

import ctypes
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGACTION_BYTES = 1024  # more than any platform's `struct sigaction` has
_wakeup_fd = -1  # of the `call_on_sigterm` that is active; -1 if none is


def end_by_sigterm() -> None:
    """Treat SIGTERM like Ctrl-C. Does nothing outside the main thread, since only the main thread can set a handler."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM after Ray was started, in any thread.

    Ray's own handler prints a C++ stack trace, and ends the process before it can say where it stopped.
    """
    libc, handler = ctypes.CDLL(None), ctypes.create_string_buffer(SIGACTION_BYTES)
    libc.sigaction(signal.SIGTERM, None, handler)
    try:
        yield
    finally:
        libc.sigaction(signal.SIGTERM, handler, None)


@contextmanager
def call_on_sigterm(callback: Callable[[], None]) -> Iterator[None]:
    """Call `callback` in another thread as soon as SIGTERM arrives. Does nothing outside the main thread.

    A main thread that waits inside Ray notices a signal up to a second late. If the signal has also ended Ray's own
    processes, as Slurm's and systemd's do, Ray ends this process before that, without a message.
    """
    global _wakeup_fd
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)  # as `set_wakeup_fd` requires
    earlier = signal.set_wakeup_fd(-1)
    listener = threading.Thread(target=_listen, args=(reader, earlier, callback), name="SIGTERM", daemon=True)
    listener.start()
    try:
        _wakeup_fd = writer.fileno()
        signal.set_wakeup_fd(_wakeup_fd, warn_on_full_buffer=False)
        yield
    finally:
        signal.set_wakeup_fd(earlier)
        _wakeup_fd = -1
        writer.shutdown(socket.SHUT_WR)  # ends the listener, after it has reported what is pending
        listener.join()
        writer.close()
        reader.close()


def _listen(reader: socket.socket, earlier: int, callback: Callable[[], None]) -> None:
    """Read the number of each signal, one byte each, until the other end is shut down.

    `earlier` is the wakeup file descriptor that was set before, such as an event loop's; -1 for none.
    """
    while numbers := reader.recv(64):
        if earlier != -1:
            with suppress(OSError):
                os.write(earlier, numbers)
        if signal.SIGTERM in numbers:
            callback()


def _hear_nothing() -> None:
    """Stop reporting signals in a forked child: it inherits the file descriptor, but its signals are its own."""
    if _wakeup_fd != -1:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_hear_nothing)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
