"""Runs `tests/gpu`, and the tests in on_device.py, in a process whose "cuda" is the fake device (device.py)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FEWEST = {
    "tests/gpu": 43,
    "tests/fake_cuda/on_device.py": 12,
    "tests/fake_cuda/on_device_stages.py": 4,
    "tests/fake_cuda/on_device_memory.py": 16,
}  # tests that pass


@pytest.mark.parametrize("tests", FEWEST)
def test_it_passes_on_the_fake_device(tests: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "MASTER_PORT")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    options = ["-q", "-p", "tests.fake_cuda.plugin", "-p", "no:cacheprovider", "--confcutdir=tests/gpu"]
    command = [sys.executable, "-m", "pytest", *options, tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= FEWEST[tests]
