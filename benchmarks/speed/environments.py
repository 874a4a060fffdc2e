"""Creates the peers' virtual environments once, in a cache folder, with the exact versions of requirements-*.txt."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STAMP = "requirements.txt"  # file in an environment that lists what was installed into it; written last


class NotInstalledError(Exception):
    """A peer cannot be installed here; the message is pip's last line."""


def python_of(name: str, cache: Path) -> Path:
    """Returns the interpreter of environment `name`, which is created if it is missing or its requirements changed.

    torch, in the version of constraints.txt, is installed first, with its dependencies. Everything else is installed
    without dependencies, because the requirements list all of them. Raises: NotInstalledError.
    """
    requirements = HERE / f"requirements-{name}.txt"
    return install(requirements, torch_pin(), cache / name)


def torch_pin() -> str:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def install(requirements: Path, torch: str, folder: Path) -> Path:
    """Installs requirements into `folder` and returns its interpreter. Raises: NotInstalledError."""
    python, stamp = folder / "bin" / "python", folder / STAMP
    wanted = torch + "\n" + requirements.read_text(encoding="utf-8")
    if not (stamp.exists() and stamp.read_text(encoding="utf-8") == wanted):
        stamp.unlink(missing_ok=True)
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        _run([str(python), "-m", "pip", "install", "--quiet", torch])
        _run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", str(requirements)])
        stamp.write_text(wanted, encoding="utf-8")
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""}, check=False)
    if done.returncode:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise NotInstalledError(said[-1] if said else f"{command[0]} ended with {done.returncode}")
