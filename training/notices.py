"""One-line messages to the user about a run: notices while it continues, and why it ends. Also requests to stop it.

Notices say where a run resumes, what was skipped and what could not be saved. Nobody reads a worker's log, so the
process that starts a worker says where its notices go (`cluster.messages`). In any other process they are log messages.

A run that is asked to stop ends with a checkpoint. The code that controls this process passes the request on, and loops
check for it between steps.
"""

import errno
import io
import logging
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial

log = logging.getLogger(__name__)

Speaker = Callable[[str], None]
_speakers: list[Speaker] = []
_awaited = dict[object, str]()  # what this process is waiting for, by who waits

_REMEDIES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there",
    errno.EFBIG: "raise the limit on the size of files",
    errno.ENOENT: "bring the folder back",
    errno.EROFS: "make the folder writable",
    errno.EACCES: "make the folder writable",
    errno.EPERM: "make the folder writable",
    errno.ESTALE: "mount the folder again",
    errno.EIO: "check the disk",
}
# Faults of the disk rather than of Heed; a missing file may be either.
_OF_THE_DISK = frozenset(_REMEDIES) - {errno.ENOENT}
# SQLite has error codes of its own (sqlite.org/rescode.html). A database that can't be opened has lost its folder.
_OF_SQLITE = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_CANTOPEN: errno.EIO,
    sqlite3.SQLITE_READONLY: errno.EROFS,
}

_stop_request = threading.Event()


def say(notice: str) -> None:
    """Report one line to the user. Any thread may call it."""
    if _speakers:
        _speakers[-1](notice)
    else:
        log.warning("%s", notice)


def speak_through(speaker: Speaker) -> None:
    """Sends this process's notices to `speaker` from now on."""
    _speakers.append(speaker)


@contextmanager
def speaking_through(speaker: Speaker) -> Iterator[None]:
    """Sends this process's notices to `speaker` while the context is open."""
    speak_through(speaker)
    try:
        yield
    finally:
        _speakers.remove(speaker)


@contextmanager
def printing_aloud(who: str) -> Iterator[None]:
    """Report what a user's code prints, line by line after `who`, since nobody reads a worker's standard output.

    In a process without a speaker, it is printed as usual.
    """
    if not _speakers:
        yield
        return
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            say(f"{who}: {line}")


@contextmanager
def waiting() -> Iterator[Speaker]:
    """Mark this process as one that is waiting. Yields a function to set what it is waiting for, which `waits_for`
    returns to callers that show the run's state. Several threads may wait at once.
    """
    waits = object()
    try:
        yield partial(_awaited.__setitem__, waits)
    finally:
        _awaited.pop(waits, None)


@contextmanager
def waiting_aloud(notice: str) -> Iterator[None]:
    """Report what this process is waiting for as long as the context is open. The driver says it for all ranks."""
    if "RANK" not in os.environ:
        say(notice)
    with waiting() as wait_for:
        wait_for(notice)
        yield


def waits_for() -> str:
    """Returns what this process is waiting for at the moment; "" if nothing."""
    return next(filter(None, [*_awaited.values()]), "")


class RunError(RuntimeError):
    """A run cannot continue. The message is one line: what failed, why, and what to do."""


class UnrepeatableError(RuntimeError):
    """A new process cannot repeat what a lost one did. All ranks of its group are to start again."""


class CheckpointError(RunError):
    """Checkpoints cannot be written; the message says where, why, and how to continue."""


def system_error(error: BaseException) -> int | None:
    """Returns the operating system's error number for an exception, or None.

    safetensors is written in Rust and gives the number in the message only. SQLAlchemy wraps SQLite's error in `orig`.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    code = getattr(getattr(error, "orig", error), "sqlite_errorcode", None)
    if code is not None:
        return _OF_SQLITE.get(code & 0xFF)  # the higher bits give the subtype, such as which I/O error it was
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else None


def cause_of(error: BaseException) -> str:
    """The cause in one line: "No space left on device (ENOSPC)"."""
    number = system_error(error)
    if number is None:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    name = getattr(error, "filename", None)
    return f"{os.strerror(number)} ({errno.errorcode.get(number, number)}){f': {name}' if name else ''}"


def remedy_of(error: BaseException) -> str:
    """What the user can do about it, as an imperative."""
    return _REMEDIES.get(system_error(error) or 0, "fix the cause")


def in_one_line(error: BaseException) -> str:
    """What the user should read instead of a traceback; "" if the cause is not known.

    Also looks at the error's causes, since a worker's failure reaches the driver inside another error.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RunError):
            return str(cause)
        if system_error(cause) in _OF_THE_DISK:
            stage = "" if cause is error else f"{str(error).partition(':')[0]}: "
            return f"{stage}{cause_of(cause)}; {remedy_of(cause)} and run the same command again"
        cause = cause.__cause__
    return ""


class StoppedError(RunError):
    """Training has saved a checkpoint and ended, as requested."""


def request_stop() -> None:
    """Make this process's loop save after its current step and raise StoppedError."""
    _stop_request.set()


def stop_requested() -> bool:
    return _stop_request.is_set()


def withdraw_stop() -> None:
    """Forget the request, if there was one."""
    _stop_request.clear()
