"""One process at a time works in a folder."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def hold(folder: Path, *, doing: str = "running this job", other: str = "--runs") -> Iterator[None]:
    """Keep other processes out of a folder. The system lets go of the lock when its holder ends, however it ends.

    `doing` and `other`, an option, are for the message. Errors: ValueError naming the process that holds the folder.
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
