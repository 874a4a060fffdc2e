"""Checkpoints that are whole or absent: written under a temporary name, hashed, synced, read back, then renamed.

Older ones are removed only after that.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from files.atomic import PREFIX, commit_folder, remove_folder, remove_unfinished, sync
from files.hashes import file_hash, file_names
from lm.progress import note_progress

MANIFEST = "manifest.json"
NUM_SHOWN = 5  # damaged files named in a message

# Returns the names of the files in a checkpoint folder whose SHA-256 differs from the given one.
Check = Callable[[Path, Mapping[str, str]], Sequence[str]]


def writing_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"{PREFIX}{step:06d}"


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:06d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def begin_checkpoint(checkpoints: Path, step: int) -> Path:
    """Create an empty folder to write step `step` into.

    Only `checkpoints` itself is created: a run folder that has disappeared must not be created in its place.
    """
    checkpoints.mkdir(exist_ok=True)
    remove_unfinished(checkpoints)
    folder = writing_folder(checkpoints, step)
    folder.mkdir()
    return folder


def commit_checkpoint(writing: Path, step: int, hashes: Mapping[str, str], keep: int) -> Path:
    """Turn a fully written folder into `step-NNNNNN`, then remove all but the newest `keep` checkpoints.

    `hashes` are the SHA-256 of the files, which the caller has read back. May be called again after it failed.
    """
    checkpoints = writing.parent
    final = step_folder(checkpoints, step)
    if not (final / MANIFEST).is_file() or writing.is_dir():
        manifest = {"step": step, "sha256": dict(sorted(hashes.items()))}
        (writing / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        commit_folder(writing, final)
    else:  # an earlier call failed after the rename
        sync(checkpoints)
    found = read_manifest(final)
    assert found.sha256 == hashes, f"checkpoint {final} does not verify right after it was written: {found.damage}"
    # Checkpoints of later steps are damaged ones that this run has skipped.
    newest_first = [folder for folder in step_folders(checkpoints) if step_of(folder) <= step]
    later = [folder for folder in step_folders(checkpoints) if step_of(folder) > step]
    for old in (*later, *newest_first[keep:]):
        remove_folder(old)
    return final


@dataclass(frozen=True)
class Manifest:
    """The files that a checkpoint folder should hold, by relative path.

    `damage` says what is missing or added; "" if nothing is.
    """

    folder: Path
    sha256: Mapping[str, str]
    damage: str


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest, and check that the folder holds the files it names. Their contents are not read."""
    try:
        expected = dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"])
        found = set(_names(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Manifest(folder, {}, f"no readable manifest ({error})")
    return Manifest(folder, expected, _describe(expected.keys() ^ found))


def changed_files(folder: Path, sha256: Mapping[str, str]) -> list[str]:
    """Names of the files whose SHA-256 differs from the given one, or that cannot be read."""
    return [name for name, expected in sha256.items() if _hash_or_cause(folder / name) != expected]


def _hash_or_cause(path: Path) -> str:
    note_progress()
    try:
        return file_hash(path)
    except OSError as error:
        return str(error)


@dataclass(frozen=True)
class Resumption:
    """Where a stage resumes: step and name of the newest valid checkpoint; 0 and "" if there is none.

    `damaged` maps the names of newer checkpoints, which are skipped, to what is wrong with them.
    """

    step: int
    name: str
    damaged: Mapping[str, str]

    def notices(self, stage: str, num_steps: int, unit: str = "step") -> list[str]:
        """What the user should know, one line each."""
        passed = [f"{stage}: checkpoint {name} is damaged and passed over: {d}" for name, d in self.damaged.items()]
        if not self.name:
            return [f"{stage}: starts from {unit} 0 of {num_steps} (no checkpoint yet)"]
        return [*passed, f"{stage}: resumes from {unit} {self.step} of {num_steps} (checkpoints/{self.name})"]


def find_resumption(checkpoints: Path, stage: str, check: Check = changed_files) -> Resumption:
    """Find the newest checkpoint that verifies. `check` reads the files, on a cluster on several machines.

    Raises:
        ValueError: there are checkpoints and none verifies, or the folder cannot be read. Only the user can decide to
            pay for training again from step 0.
    """
    return choose_sound(checkpoints, stage, [read_manifest(folder) for folder in step_folders(checkpoints)], check)


def choose_sound(checkpoints: Path, stage: str, newest_first: Sequence[Manifest], check: Check) -> Resumption:
    """Like `find_resumption`, for manifests that were read before."""
    damaged: dict[str, str] = {}
    for manifest in newest_first:
        damage = manifest.damage or _describe(check(manifest.folder, manifest.sha256))
        if not damage:
            return Resumption(step_of(manifest.folder), manifest.folder.name, damaged)
        damaged[manifest.folder.name] = damage
    if damaged:
        causes = "; ".join(f"{name}: {damage}" for name, damage in damaged.items())
        raise ValueError(
            f"{checkpoints}: every checkpoint of {stage} is damaged ({causes}); restore one, or run again with"
            f" --from {stage}, which starts the stage from step 0"
        )
    return Resumption(0, "", {})


def latest_checkpoint(checkpoints: Path) -> tuple[Path, int] | None:
    """The newest checkpoint that verifies, and its step; None if none was written. Raises like `find_resumption`."""
    found = find_resumption(checkpoints, "the stage")
    return (checkpoints / found.name, found.step) if found.name else None


def share_of_files(sha256: Mapping[str, str], rank: int, num_ranks: int) -> dict[str, str]:
    """The files that one rank verifies; together, the ranks verify all."""
    return dict(sorted(sha256.items())[rank::num_ranks])


def step_folders(checkpoints: Path) -> list[Path]:
    """All checkpoints, newest first; [] if the folder does not exist.

    Raises:
        ValueError: the folder exists but cannot be read.
    """
    try:
        names = os.listdir(checkpoints)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"{checkpoints}: the folder of checkpoints cannot be read: {error.strerror}") from None
    return sorted((checkpoints / name for name in names if re.fullmatch(r"step-\d+", name)), key=step_of, reverse=True)


def _names(folder: Path) -> list[str]:
    """Relative paths of the files below `folder`, without the manifest."""
    return [name for name in file_names(folder) if Path(name).name != MANIFEST]


def _describe(names: Sequence[str] | set[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
    return f"files changed, missing or added: {', '.join(sorted(names)[:NUM_SHOWN])}{more}"
