"""A small disk that only the campaign uses and can fill: a tmpfs, so that no other process runs out of space."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FILLER = ".filler"


class SmallDisk:
    """A mounted folder of limited size. Its contents are lost when it is closed.

    Raises: OSError if this process may not mount anything.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=700", "heed-chaos", str(folder))

    def fill(self) -> None:
        """Takes all free space; call it again to take space freed since."""
        with suppress(OSError), (self.folder / FILLER).open("ab", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass

    def free(self) -> None:
        (self.folder / FILLER).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmounts at once, or if the disk is in use, as soon as it no longer is."""
        try:
            _run("umount", str(self.folder))
        except OSError:
            _run("umount", "--lazy", str(self.folder))
        self.folder.rmdir()


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[SmallDisk]:
    disk = SmallDisk(folder, num_bytes)
    try:
        yield disk
    finally:
        disk.close()


def why_no_disk() -> str:
    """Returns why this process cannot mount a disk, or "" if it can. It tries to mount one and removes it."""
    try:
        with tempfile.TemporaryDirectory(prefix="heed-probe-") as folder, small_disk(Path(folder) / "disk", 1 << 20):
            return ""
    except OSError as error:
        return f"cannot mount a disk of limited size ({error}); root can"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {' '.join(done.stderr.split())}")
