"""A worker that is stopped while it samples is missed, and the run ends with the files of one nobody touched.

No rank waits for it in a collective there, so nothing but its silence tells.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def worker_of(pids: list[int]) -> int:
    """The process of the rank among a run's processes."""
    return next(pid for pid in pids if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::_Worker"))


def test_a_worker_stopped_while_it_samples_is_missed(
    started_run: tuple[Any, Path],
    run_debug: Callable[..., Any],
    processes: Callable[[str], list[int]],
    hashes: Callable[[Path], dict[str, str]],
    tmp_path: Path,
    request: Any,
) -> None:
    assert started_run[0].process.poll() in (None, 0)  # the two runs share the machine for a while
    command = run_debug(tmp_path, ["--set", "cluster.silence_seconds=8"])
    folder = tmp_path / "debug"
    while not (folder / "collect" / "samples").exists():
        assert command.process.poll() is None, command.output
        time.sleep(0.005)
    os.kill(worker_of(processes(command.mark)), signal.SIGSTOP)
    assert command.wait() == 0, command.output
    assert "collect: sft: rank 0 of 1 was lost: no sign of life for 8 s" in command.output
    assert hashes(folder) == hashes(request.getfixturevalue("finished_run"))
    assert command.wait_until_gone() == [], "the stopped process is left"
