"""Storage that fails for a while: a stage waits for it, and resumes from what it has saved."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tenacity

from training.failures import RunError, cause_of, system_error

STORAGE_SECONDS = 120.0  # for which a stage waits for space, or for its folder
PROBE_BYTES = 1 << 20  # with less room than this a stage would soon fail again

_OF_STORAGE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE})


def storage_trouble(error: BaseException, folder: Path) -> str:
    """What is wrong with the storage of a run whose stage has failed, in one line; "" where it is not the storage.

    A file that is missing is the storage's fault if it lies in the run of the stage's `folder`. Looks at what the error
    was raised from, too. What has been decided already, a `RunError`, is nobody's to try again.
    """
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, RunError):
            return ""
        number = system_error(found)
        is_missing = number == errno.ENOENT and str(folder.parent) in str(found)
        if number in _OF_STORAGE or is_missing:
            return cause_of(found)
        found = found.__cause__
    return ""


def wait_for_storage(folder: Path, seconds: float = STORAGE_SECONDS) -> bool:
    """Wait until a stage's folder is there and has room; False where it stays away."""
    found: bool = tenacity.Retrying(
        retry=tenacity.retry_if_result(lambda usable: not usable),
        stop=tenacity.stop_after_delay(seconds),
        wait=tenacity.wait_fixed(0.5),
        retry_error_callback=lambda _: False,
    )(_is_usable, folder)
    return found


@contextmanager
def missing_in_one_line(run: Path) -> Iterator[None]:
    """Between stages nothing waits for the storage. Raises: RunError where files of the run's folder are missing."""
    try:
        yield
    except FileNotFoundError as error:
        if str(run) not in str(error):
            raise
        raise RunError(f"{cause_of(error)}; bring the folder back and run the same command again") from error


def _is_usable(folder: Path) -> bool:
    """`inputs.json` is the first thing in it, so a folder that somebody has made again is told from the stage's own."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(PROBE_BYTES))  # no file system can make less of it
            file.flush()
            os.fsync(file.fileno())
        return (folder / "inputs.json").is_file()
    except OSError:
        return False
