"""Makes `.quarter/`: the part of the tree that the steps read, the commit, and the wheels that a GPU machine may lack.

    .venv/bin/python benchmarks/gpu/quarter/prepare.py      # in the root of Heed's tree, with network

The wheels are for Python 3.12 on x86-64 Linux, in the versions of constraints.txt.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[3]
CARRIED = ROOT / ".quarter"
MOST_BYTES = 60 * 2**20  # some machines take 64 MiB
# What no step reads, as beginnings of paths; but what they read there.
LEFT_OUT = ("research/", "docs/", "tests/", "configs/jobs/")
READ = ("tests/gpu/", "tests/tiers.py", "tests/ppo/phases.py")
# What torch, Transformers and Accelerate do not bring.
PACKAGES = (
    "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "hjson", "einops", "msgpack", "ninja",
    "py-cpuinfo",
)  # fmt: skip
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")


def main() -> None:
    shutil.rmtree(CARRIED, ignore_errors=True)
    for path in carried(tracked()):
        target = CARRIED / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    (CARRIED / "commit.txt").write_text(commit.stdout, encoding="utf-8")
    download(CARRIED / "wheels")
    print(f"{CARRIED}: {require_small(CARRIED) / 2**20:.1f} MiB")


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in done.stdout.split("\0") if (ROOT / path).is_file()]


def carried(paths: Iterable[str]) -> list[str]:
    """Returns the files that steps may read."""
    return [path for path in paths if path.startswith(READ) or not path.startswith(LEFT_OUT)]


def require_small(folder: Path) -> int:
    """Returns the bytes of all files in a folder. Raises: ValueError if they are more than can be carried."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > MOST_BYTES:
        raise ValueError(f"{folder} has {size / 2**20:.1f} MiB; at most {MOST_BYTES / 2**20:.0f} were expected")
    return size


def pinned(name: str, constraints: str) -> str:
    """Returns `name==version` from the text of constraints.txt, where "-", "_" and capitals are not told apart.

    Raises: ValueError if it is not there.
    """
    pattern = re.sub("[-_]", "[-_]", name)
    found = re.search(rf"^{pattern}==\S+", constraints, re.MULTILINE | re.IGNORECASE)
    if found is None:
        raise ValueError(f"constraints.txt has no version of {name}")
    return found[0]


def download(folder: Path) -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pip = [sys.executable, "-m", "pip"]
    platforms = [part for name in PLATFORMS for part in ("--platform", f"{name}_x86_64")]
    options = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", *platforms]
    wheels = [pinned(name, constraints) for name in PACKAGES]
    subprocess.run([*pip, "download", "-q", "--no-deps", *options, "-d", str(folder), *wheels], check=True)
    # DeepSpeed has no wheels.
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(folder), pinned("deepspeed", constraints)], check=True)


if __name__ == "__main__":
    main()
