"""Runs measuring processes, and measures a process's peak memory.

Heed's processes have the environment of its workers. A peer's have the same allocator, but OpenMP's default wait policy
(spinning), which makes them up to 40% faster on a quiet machine.
"""

import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.speed.environments import ROOT
from cluster.processes import WORKER_ENVIRONMENT

TIMEOUT_SECONDS = 1800.0  # per measuring process
RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # of this process, if it has an engine
WATCH_SECONDS = 0.001  # between two looks at a process's memory
Result = TypeVar("Result")


def run(
    command: Sequence[str],
    threads: int,
    variables: Mapping[str, str] | None = None,
    *,
    given: Mapping[str, str] = WORKER_ENVIRONMENT,
) -> dict[str, Any]:
    """Returns the JSON that a process printed as its last line, or {"failed": its last error line}.

    `given` replaces the workers' environment; `variables` are added to it.
    """
    own = {*WORKER_ENVIRONMENT, *RANK_NAMES}
    inherited = {name: value for name, value in os.environ.items() if name not in own}
    environment = inherited | dict(given)
    environment |= {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment |= variables or {}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    lines = [line for line in (done.stderr if done.returncode else done.stdout).splitlines() if line.strip()]
    if done.returncode:
        return {"failed": lines[-1] if lines else f"ended with {done.returncode}"}
    return dict(json.loads(lines[-1]))


def private_bytes() -> int:
    """Returns this process's private memory, without pages of mapped files, which the system may drop."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def peak_growth(work: Callable[[], Result]) -> tuple[Result, int]:
    """Returns the result of `work`, and the peak growth of this process in bytes while it ran."""
    before, over = private_bytes(), threading.Event()
    seen = [before]

    def watch() -> None:
        while not over.wait(WATCH_SECONDS):
            seen.append(private_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        result = work()
    finally:
        seen.append(private_bytes())
        over.set()
        thread.join()
    return result, max(seen) - before
