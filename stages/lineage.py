"""Records what a stage's outputs were made from, so that nothing runs twice and every number can be traced."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.hosts import this_host
from files.atomic import write_json
from files.hashes import folder_hash, unchanged_hash

LINEAGE = "lineage.json"  # written last: a stage that has one is finished
CODE_VERSION = "HEED_CODE_VERSION"  # set if the code was shipped without its git history


@dataclass(frozen=True)
class Inputs:
    """Everything a stage's result depends on."""

    stage: str
    seed: int
    config: Mapping[str, Any]
    parents: Mapping[str, str]  # stage -> hash of its outputs
    data: Mapping[str, str]  # source -> SHA-256

    @property
    def fingerprint(self) -> str:
        text = json.dumps([self.stage, self.seed, self.config, self.parents, self.data], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def require_outputs(folder: Path, outputs: Sequence[str]) -> None:
    """Check that a stage has written its outputs.

    Raises: FileNotFoundError if one is missing. The folder was then away while the output was written elsewhere.
    """
    # A folder that was created in its place has no inputs.json.
    for path in (folder / "inputs.json", *(folder / name for name in outputs), folder / "results.json"):
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def outputs_hash(path: Path) -> str:
    """Return one hash over the output that later stages read, a file or a folder; "" if it is missing."""
    if path.is_file():
        return unchanged_hash(path)
    return folder_hash(path) if path.is_dir() else ""


def path_hash(name: str) -> str:
    """Return the SHA-256 of a file or a folder; for a hub id, that of its name."""
    path = Path(name)
    if path.is_dir():
        return folder_hash(path)
    return unchanged_hash(path) if path.is_file() else hashlib.sha256(name.encode()).hexdigest()


def finished_with(folder: Path, output: str) -> tuple[str, str] | None:
    """Return (fingerprint, hash of the output) of a finished stage whose output has not changed since, or None."""
    try:
        lineage = json.loads((folder / LINEAGE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if lineage["outputs"] != outputs_hash(folder / output):
        return None
    return lineage["fingerprint"], lineage["outputs"]


def data_of(folder: Path) -> set[str] | None:
    """Return the hashes of the data that a finished stage learned from; None for a folder that is no stage's."""
    try:
        return set(json.loads((folder / LINEAGE).read_text(encoding="utf-8"))["data"].values())
    except (OSError, ValueError):
        return None


def started_with(folder: Path) -> str:
    """Return the fingerprint that an unfinished stage was started with; "" if it was not started."""
    try:
        return str(json.loads((folder / "inputs.json").read_text(encoding="utf-8"))["fingerprint"])
    except (OSError, ValueError):
        return ""


def forced_by(folder: Path) -> str:
    """Return the submission whose `--from` started a stage; "" if none did."""
    try:
        return str(json.loads((folder / "inputs.json").read_text(encoding="utf-8")).get("submission", ""))
    except (OSError, ValueError):
        return ""


def write_lineage(
    folder: Path, inputs: Inputs, output: str, seconds: float, hosts: Mapping[str, Mapping[str, str]]
) -> None:
    """Write what a stage was made from. This comes last, because a stage with this file counts as finished.

    `hosts` has, by name, the hosts of the ranks, each with the versions that differ from the driver's.
    """
    write_json(
        folder / LINEAGE,
        {
            "stage": inputs.stage,
            "fingerprint": inputs.fingerprint,
            "outputs": outputs_hash(folder / output),
            "seed": inputs.seed,
            "parents": dict(inputs.parents),
            "data": dict(inputs.data),
            "code_version": code_version(),
            "packages": this_host().versions,
            "hosts": hosts,
            "seconds": round(seconds, 1),
            "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
    )


def code_version() -> str:
    """Return the commit of this code, marked if files differ from it; "unknown" outside a checkout or without git."""
    if CODE_VERSION in os.environ:
        return os.environ[CODE_VERSION]
    if shutil.which("git") is None:
        return "unknown"
    here = Path(__file__).parent
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=here, capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"
