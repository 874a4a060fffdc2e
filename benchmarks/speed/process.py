"""Measuring processes: each with the environment that Heed gives its workers."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.speed.environments import ROOT
from cluster.group import WORKER_ENVIRONMENT

TIMEOUT_SECONDS = 1800.0  # of a measuring process


def run(command: Sequence[str], threads: int, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The JSON that a process printed as its last line, or {"failed": its last words}.

    `variables` come on top of the workers' environment.
    """
    environment = os.environ | WORKER_ENVIRONMENT
    environment |= {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment |= variables or {}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    lines = [line for line in (done.stderr if done.returncode else done.stdout).splitlines() if line.strip()]
    if done.returncode:
        return {"failed": lines[-1] if lines else f"ended with {done.returncode}"}
    return dict(json.loads(lines[-1]))
