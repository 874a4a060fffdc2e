"""The walks that a new reader follows do not get longer."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_walk_enters_more_files_than_its_bound() -> None:
    command = [sys.executable, "-m", "benchmarks.files_entered", "--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = [int(count) for count in re.findall(r"^\S.*: (\d+) files", done.stdout, re.MULTILINE)]
    listed = re.findall(r"^    (\S+\.py)$", done.stdout, re.MULTILINE)
    assert len(counts) == 3
    assert sum(counts) == len(listed)
    assert all((ROOT / path).is_file() for path in listed)
    assert {"ppo/controller.py", "lm/block.py", "reward/objective.py"} <= set(listed)
