"""Storage that fails for a while: a stage waits for it, and resumes from what it has saved."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tenacity

from training.notices import RunError, cause_of, system_error

STORAGE_SECONDS = 120.0  # for which a stage waits for space, or for its folder
PROBE_BYTES = 1 << 20  # with less room than this a stage would soon fail again

_OF_STORAGE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE})


def storage_trouble(error: BaseException, folder: Path) -> str:
    """Describes in one line what is wrong with the storage of a stage that failed; "" if the storage is not the cause.

    A missing file is the storage's fault if it lies in the run of the stage's `folder`; readers report it as a
    ValueError ("...: no such file"). The exceptions that `error` was raised from count too. A `RunError` is final.
    """
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, RunError):
            return ""
        number = system_error(found)
        is_missing = number == errno.ENOENT or (isinstance(found, ValueError) and "no such file" in str(found))
        if number in _OF_STORAGE or (is_missing and str(folder.parent) in str(found)):
            return cause_of(found) if number is not None else str(found).splitlines()[0]
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
