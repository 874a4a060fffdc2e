"""Two gloo ranks as two processes."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from cluster.processes import free_port
from tests.training import rank_process

# DeepSpeed's first run on a machine compiles its shared-memory operator, which takes two minutes.
LIMIT_SECONDS = 480

StartRanks = Callable[..., None]
LimitFileSize = Callable[[int], AbstractContextManager[None]]


@pytest.fixture(scope="session")
def start_two_ranks() -> StartRanks:
    """Runs `python PROGRAM FOLDER` as two ranks (by default) until they end; a rank's output is in FOLDER/rank-N.log.

    With `variables`, which libraries may read as they load, every rank is a new Python.
    """

    def start(program: str, folder: Path, num_ranks: int = 2, **variables: str) -> None:
        shared = {
            **os.environ, **rank_process.VARIABLES, "PYTHONPATH": str(Path(__file__).parents[2]),
            "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **variables,
        }  # fmt: skip
        start_rank = _start_python if variables else rank_process.start
        logs = [folder / f"rank-{rank}.log" for rank in range(num_ranks)]
        ranks = [
            start_rank(program, folder, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, log)
            for rank, log in enumerate(logs)
        ]
        end = time.monotonic() + LIMIT_SECONDS
        try:
            while (codes := [_exit_code(rank) for rank in ranks]).count(None):
                assert time.monotonic() < end, f"still running after {LIMIT_SECONDS} s: {codes}"
                time.sleep(0.02)
        finally:
            for rank in ranks:
                rank.kill()
        assert codes == [0] * num_ranks, "\n".join(log.read_text()[-3000:] for log in logs)

    return start


def _start_python(program: str, folder: Path, environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", rank_process.__name__, program, str(folder)],
            env=environment, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip


def _exit_code(process: subprocess.Popen[bytes] | BaseProcess) -> int | None:
    return process.exitcode if isinstance(process, BaseProcess) else process.poll()


@pytest.fixture
def limit_file_size() -> LimitFileSize:
    """A context in which no file can grow beyond a number of bytes. As on a full disk, a write begins and then
    fails."""

    @contextmanager
    def limit(num_bytes: int) -> Iterator[None]:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    return limit
