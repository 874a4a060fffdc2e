"""A lock that lets one process at a time work in a folder."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def lock(folder: Path, *, doing: str = "running this job", other: str = "--runs") -> Iterator[None]:
    """Keep other processes out of a folder. The system releases the lock when its process ends, however it ends.

    `doing` and `other` (a command-line option) go into the message.

    Raises:
        ValueError: another process has the lock; the message names it.
    """
    with (folder / "run.lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"{folder}: process {file.read()} is {doing} here; wait for it, or run with another {other}"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
