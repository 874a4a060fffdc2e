"""Files and folders that are whole or absent: written under a temporary name, synced, then renamed.

The temporary name of `NAME` is `.writing-NAME`, in the same folder. A process killed while it writes or removes a
file leaves this name behind. The next write of the same name replaces it, and `remove_unfinished` removes all such
files in a folder.
`lock` lets one process at a time work in a folder.
"""

import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PREFIX = ".writing-"
# The beginnings of their names in the list of mounts.
NETWORK_FILE_SYSTEMS = (
    "nfs", "cifs", "smb", "lustre", "gpfs", "ceph", "beegfs", "glusterfs", "afs", "9p", "virtiofs", "orangefs", "pvfs2",
    "panfs", "wekafs", "fuse.",
)  # fmt: skip


def temporary_path(path: Path) -> Path:
    """Returns where `path` is written until it is complete."""
    return path.with_name(f"{PREFIX}{path.name}")


def remove_unfinished(folder: Path) -> None:
    """Remove the unfinished files and folders that killed processes left in a folder."""
    for path in folder.glob(f"{PREFIX}*"):
        _remove(path)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields the temporary path to write; if the block succeeds, the file replaces `path`.

    If the block raises, `path` stays as it was and the temporary file is removed, because on a full disk a retry
    needs its space. The folder of `path` must exist: a run folder that has disappeared must not be created again.
    """
    temporary = temporary_path(path)
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    except BaseException as error:
        _remove(temporary)
        if isinstance(error, OSError) and error.errno and not error.filename:  # a full disk, say
            error.filename = str(path)
        raise


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yields an empty temporary folder to fill; if the block succeeds, it replaces `path`, whatever was there.

    If the block raises, `path` stays as it was and the temporary folder is removed.
    """
    temporary = temporary_path(path)
    _remove(temporary)
    temporary.mkdir()
    try:
        yield temporary
        commit_folder(temporary, path)
    except BaseException:
        _remove(temporary)
        raise


def commit_folder(temporary: Path, path: Path) -> None:
    """Sync everything in a fully written folder and rename it to `path`, replacing what was there."""
    for written in temporary.rglob("*"):
        sync(written)
    sync(temporary)
    _remove(path)
    temporary.rename(path)
    sync(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder. If the process is killed meanwhile, the name is gone and the rest counts as unfinished."""
    temporary = temporary_path(path)
    if temporary.exists():
        shutil.rmtree(temporary)
    path.rename(temporary)
    shutil.rmtree(temporary)


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, value: Any) -> None:
    """Write an indented JSON file, whole or not at all."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSON Lines file, whole or not at all."""
    with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def sync(path: Path) -> None:
    """Flush a file or folder to disk, so that a rename never becomes visible before the contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove a file or a folder. What cannot be removed, for example because its disk is gone, stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def on_network(path: Path) -> bool:
    """Whether a file lies on a file system that other machines share. SQLite must not use a write-ahead log there: the
    log's index is in memory, which only processes of one machine share (sqlite.org/wal.html).
    """
    import psutil  # imported here, since most programs that write files do not call this

    folder = path.resolve().parent
    mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.is_relative_to(mount.mountpoint)]
    # Of several at one place, as with an automounter, the last one is on top.
    kind = max(reversed(mounts), key=lambda mount: len(mount.mountpoint)).fstype if mounts else ""
    return str(kind).startswith(NETWORK_FILE_SYSTEMS)


@contextmanager
def lock(folder: Path, *, doing: str = "running this job", other: str = "--runs") -> Iterator[None]:
    """Keep other processes out of a folder. The system releases the lock when its process ends, however it ends.

    `doing` and `other` (a command-line option) go into the message.

    Raises:
        ValueError: another process has the lock, which the message names; or the file system has no locks.
    """
    with (folder / "run.lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"{folder}: process {file.read()} is {doing} here; wait for it, or run with another {other}"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            raise ValueError(
                f"{other}: {folder} is on a file system that cannot lock files ({os.strerror(error.errno)}), so nothing"
                " would keep a second process out; mount it with locks (Lustre: -o flock; NFS: with its lock service)"
                f" or use another {other}"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
