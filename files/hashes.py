"""SHA-256 of files and folders, hexadecimal."""

import hashlib
import json
import os
import time
from pathlib import Path

SETTLED_SECONDS = 2.0  # a file changed less long ago may change again within one tick of its clock
_known: dict[tuple[int, ...], str] = {}  # SHA-256 by what the file system says of a file


def file_hash(path: Path) -> str:
    """SHA-256 of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unchanged_hash(path: Path) -> str:
    """As `file_hash`, but a file that this process has hashed is read again only if the file system says it changed.

    A model is an input of many stages. To find damage on the disk, read the file.
    """
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        key = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        if key not in _known:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            if time.time() - found.st_ctime < SETTLED_SECONDS:
                return sha256
            _known[key] = sha256
    return _known[key]


def folder_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below `folder`, by relative path, sorted; see `unchanged_hash`."""
    return {name: unchanged_hash(folder / name) for name in file_names(folder)}


def folder_hash(folder: Path) -> str:
    """One SHA-256 over all names and contents below `folder`."""
    return hashlib.sha256(json.dumps(folder_hashes(folder), sort_keys=True).encode()).hexdigest()


def file_names(folder: Path) -> list[str]:
    """Relative paths of all files below `folder`, sorted."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
