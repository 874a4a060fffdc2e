"""Runs measuring processes.

Heed's processes have the environment of its workers. A peer's have the same allocator, but OpenMP's default wait policy
(spinning), which makes them up to 40% faster on a quiet machine.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.speed.environments import ROOT
from cluster.environment import WORKER_ENVIRONMENT

TIMEOUT_SECONDS = 1800.0  # per measuring process
RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # of this process, if it has an engine


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
