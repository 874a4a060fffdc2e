"""Runs a rank's program in a process that was forked from one that has imported what ranks import.

Importing takes a rank three CPU seconds, longer than most of these programs run.
"""

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

VARIABLES = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}  # read by imports


def start(program: str, folder: Path, environment: Mapping[str, str], log: Path) -> BaseProcess:
    """Start `python PROGRAM FOLDER`, with its output in `log`; only what it registers with atexit is not run."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([f"{__name__}_imports"])
    process = forks.Process(target=_run, args=(program, folder, dict(environment), log))
    process.start()
    return process


def settled(measure: Callable[[], int], seconds: float = 0.3) -> int:
    """What is measured once it stays the same: gloo's threads hold what they have reduced for a moment longer."""
    found, end = measure(), time.monotonic() + 30
    since = time.monotonic()
    while time.monotonic() - since < seconds and time.monotonic() < end:
        time.sleep(0.05)
        if (now := measure()) != found:
            found, since = now, time.monotonic()
    return found


def _run(program: str, folder: Path, environment: Mapping[str, str], log: Path) -> None:
    assert f"{__name__}_imports" in sys.modules, "nothing was imported before the fork"
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    _run_program(program, str(folder))


def _run_program(program: str, folder: str) -> None:
    sys.argv = [program, folder]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":  # a rank that is not forked, but whose imports cost the garbage collector nothing either
    import tests.training.rank_process_imports  # noqa: F401

    _run_program(*sys.argv[1:])
