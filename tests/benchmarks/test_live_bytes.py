"""The counter of live bytes, in a process that starts with it."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.live_bytes import environment

PROGRAM = """
import threading
import torch
from benchmarks.live_bytes import LiveBytes
live, million = LiveBytes(), 1_000_000
with live.phase("hold"):
    held = torch.zeros(million)
with live.phase("work"):
    (held[:64] + torch.ones(2 * million).sum()).sum()
with live.phase("free in another thread"):
    kept = [torch.zeros(million)]
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
hold, work, freed = live.phases.values()
assert hold.growth == hold.after - hold.before == 4 * million, hold
assert work.after == work.before and 8 * million < work.growth < 8 * million + 4096, work
assert freed.growth == 4 * million and freed.after == freed.before, freed
"""


def test_every_tensor_is_counted_and_no_freed_one(tmp_path: Path) -> None:
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], env=variables, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
