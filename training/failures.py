"""Failures with a known cause, shown to the user as one line."""

import errno
import os
import re
import sqlite3


class RunError(RuntimeError):
    """A run cannot continue. The message is one line: what failed, why, and what to do."""


class CheckpointError(RunError):
    """Checkpoints cannot be written; the message says where, why, and how to continue."""


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


# SQLite has error codes of its own (sqlite.org/rescode.html). A database that can't be opened has lost its folder.
_OF_SQLITE = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_CANTOPEN: errno.EIO,
    sqlite3.SQLITE_READONLY: errno.EROFS,
}


def system_error(error: BaseException) -> int | None:
    """Returns the operating system's error number for an exception, or None.

    safetensors is written in Rust and gives the number in the message only. SQLAlchemy wraps SQLite's error in `orig`.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    code = getattr(getattr(error, "orig", error), "sqlite_errorcode", None)
    if code is not None:
        return _OF_SQLITE.get(code & 0xFF)  # the higher bits say which kind of, say, I/O error it was
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


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


# Faults of the disk rather than of Heed; a missing file may be either.
_OF_THE_DISK = frozenset(_REMEDIES) - {errno.ENOENT}


def in_one_line(error: BaseException) -> str:
    """What the user should read instead of a traceback; "" if the cause is not known.

    Also looks at what the error was raised from: a worker's failure reaches the driver inside another one.
    """
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, RunError):
            return str(found)
        if system_error(found) in _OF_THE_DISK:
            stage = "" if found is error else f"{str(error).partition(':')[0]}: "
            return f"{stage}{cause_of(found)}; {remedy_of(found)} and run the same command again"
        found = found.__cause__
    return ""
