"""SHA-256 of files and folders, hexadecimal."""

import hashlib
import json
from pathlib import Path


def file_hash(path: Path) -> str:
    """SHA-256 of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below `folder`, by relative path, sorted."""
    return {name: file_hash(folder / name) for name in file_names(folder)}


def folder_hash(folder: Path) -> str:
    """One SHA-256 over all names and contents below `folder`."""
    return hashlib.sha256(json.dumps(folder_hashes(folder), sort_keys=True).encode()).hexdigest()


def file_names(folder: Path) -> list[str]:
    """Relative paths of all files below `folder`, sorted."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
