"""SHA-256 of files and folders, hexadecimal; and seeds derived from names by a hash, so that no random draw depends on
what was drawn before it.
"""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

SETTLED_SECONDS = 2.0  # a file changed more recently may change again within one tick of its clock
_known: dict[tuple[int, ...], str] = {}  # SHA-256 by the file's device, inode, size and times


def json_hash(*parts: Any) -> str:
    """Returns the SHA-256 of values as JSON."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def file_hash(path: Path) -> str:
    """Returns the SHA-256 of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unchanged_hash(path: Path) -> str:
    """Returns `file_hash`, but reads a file again only if the file system says that it changed since the last call.

    This saves time because a model is an input of many stages. It does not notice damage on the disk; `file_hash` does.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if key not in _known:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            if time.time() - status.st_ctime < SETTLED_SECONDS:
                return sha256
            _known[key] = sha256
    return _known[key]


def folder_hashes(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of every file below `folder`, by relative path, sorted; see `unchanged_hash`."""
    return {name: unchanged_hash(folder / name) for name in file_names(folder)}


def folder_hash(folder: Path) -> str:
    """Returns one SHA-256 over all names and contents below `folder`."""
    return hashlib.sha256(json.dumps(folder_hashes(folder), sort_keys=True).encode()).hexdigest()


def file_names(folder: Path) -> list[str]:
    """Returns the relative paths of all files below `folder`, sorted."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def derive_seed(seed: int, *names: str | int) -> int:
    """Derive a 63-bit seed for one purpose, such as `derive_seed(run_seed, "ppo", step, rank)`."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
