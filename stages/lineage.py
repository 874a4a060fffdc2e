"""Which inputs made a stage's outputs, so that nothing is run twice and every number can be traced."""

import errno
import hashlib
import json
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from files.atomic import write_json
from files.hashes import file_hash, folder_hash

PACKAGES = ("torch", "deepspeed", "accelerate", "ray", "transformers", "tokenizers", "datasets", "numpy")
LINEAGE = "lineage.json"  # written last: a stage that has one came to its end
CODE_VERSION = "HEED_CODE_VERSION"  # tells the version of code that was shipped without its history


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


_OUTPUTS = {"collect": "rankings.jsonl", "compare": "results.json", "world": "data", "tokenizer": "data"}


def require_outputs(folder: Path, stage: str) -> None:
    """Raises: FileNotFoundError for what a stage has written that is not there: its folder was away, and what was
    written meanwhile lies elsewhere.
    """
    # A folder that was made in its place meanwhile has no inputs.json.
    paths = [folder / "inputs.json", folder / _OUTPUTS.get(stage, "model"), folder / "results.json"]
    if stage == "pretrain":
        paths.append(folder / "data" / "ready")  # PPO reads these texts too
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def outputs_hash(folder: Path, stage: str) -> str:
    """One hash over what later stages read of this one."""
    path = folder / _OUTPUTS.get(stage, "model")
    if path.is_file():
        return file_hash(path)
    return folder_hash(path) if path.is_dir() else ""


def finished_with(folder: Path, stage: str) -> tuple[str, str] | None:
    """(fingerprint, outputs) of a finished stage whose outputs are as it left them, or None."""
    try:
        lineage = json.loads((folder / LINEAGE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if lineage["outputs"] != outputs_hash(folder, stage):
        return None
    return lineage["fingerprint"], lineage["outputs"]


def started_with(folder: Path) -> str:
    """The fingerprint that an unfinished stage was started with; "" where nothing was."""
    try:
        return str(json.loads((folder / "inputs.json").read_text(encoding="utf-8"))["fingerprint"])
    except (OSError, ValueError):
        return ""


def write_lineage(folder: Path, inputs: Inputs, seconds: float) -> None:
    """The last thing a stage writes: with it the stage counts as finished."""
    write_json(
        folder / LINEAGE,
        {
            "stage": inputs.stage,
            "fingerprint": inputs.fingerprint,
            "outputs": outputs_hash(folder, inputs.stage),
            "seed": inputs.seed,
            "parents": dict(inputs.parents),
            "data": dict(inputs.data),
            "code_version": code_version(),
            "packages": {name: version(name) for name in PACKAGES},
            "seconds": round(seconds, 1),
            "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
    )


def code_version() -> str:
    """The commit this code is at, marked where files differ from it; "unknown" outside a checkout."""
    if CODE_VERSION in os.environ:
        return os.environ[CODE_VERSION]
    here = Path(__file__).parent
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=here, capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"
