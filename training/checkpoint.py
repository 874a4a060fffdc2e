"""Checkpoints that are whole or absent: written aside, hashed, synced, renamed, verified before an older one goes."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below `folder` but the manifest, by relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(folder)): file_hash(path) for path in files}


def folder_hash(folder: Path) -> str:
    """One SHA-256 over all names and contents below `folder`."""
    return hashlib.sha256(json.dumps(folder_hashes(folder), sort_keys=True).encode()).hexdigest()


def writing_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f".writing-{step:06d}"


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:06d}"


def begin_checkpoint(checkpoints: Path, step: int) -> Path:
    """An empty folder to write step `step` into."""
    drop_unfinished(checkpoints)
    folder = writing_folder(checkpoints, step)
    folder.mkdir(parents=True)
    return folder


def drop_unfinished(checkpoints: Path) -> None:
    """Remove what a killed run was writing."""
    for folder in checkpoints.glob(".writing-*"):
        shutil.rmtree(folder, ignore_errors=True)


def commit_checkpoint(writing: Path, step: int, hashes: Mapping[str, str], keep: int) -> Path:
    """Turn a fully written folder into `step-NNNNNN`, then drop all but the newest `keep` checkpoints.

    `hashes` are the files' SHA-256 as those who wrote them know them; the new folder is read again before one goes.
    """
    checkpoints = writing.parent
    manifest = {"step": step, "sha256": dict(sorted(hashes.items()))}
    (writing / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for path in writing.rglob("*"):
        sync(path)
    final = step_folder(checkpoints, step)
    shutil.rmtree(final, ignore_errors=True)
    writing.rename(final)
    sync(checkpoints)
    assert _damage(final) is None, f"checkpoint {final} does not verify right after it was written: {_damage(final)}"
    for old in _step_folders(checkpoints)[keep:]:
        shutil.rmtree(old)
    return final


def latest_checkpoint(checkpoints: Path) -> tuple[Path, int] | None:
    """The newest checkpoint that verifies, and its step; a damaged one is passed over with a warning."""
    for folder in _step_folders(checkpoints):
        damage = _damage(folder)
        if damage is None:
            return folder, int(folder.name.removeprefix("step-"))
        log.warning("checkpoint %s is damaged and passed over: %s", folder, damage)
    return None


def _step_folders(checkpoints: Path) -> list[Path]:
    """Newest first."""
    return sorted(checkpoints.glob("step-*"), key=lambda folder: int(folder.name.removeprefix("step-")), reverse=True)


def _damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        expected = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError) as error:
        return f"no readable manifest ({error})"
    found = folder_hashes(folder)
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    return f"files changed, missing or added: {', '.join(wrong[:5])}" if wrong else None


def sync(path: Path) -> None:
    """Push a file or folder to the disk, so that a rename never becomes visible before its contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
