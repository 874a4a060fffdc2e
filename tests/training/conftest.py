"""Two gloo ranks as two processes."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from endpoints.ports import free_port

# DeepSpeed's first run on a machine compiles its shared-memory operator, which takes two minutes.
LIMIT_SECONDS = 480

StartRanks = Callable[..., None]
LimitFileSize = Callable[[int], AbstractContextManager[None]]


@pytest.fixture(scope="session")
def start_two_ranks() -> StartRanks:
    """Runs `python PROGRAM FOLDER` as two ranks (by default) until they end; a rank's output is in
    FOLDER/rank-N.log."""

    def start(program: str, folder: Path, num_ranks: int = 2, **variables: str) -> None:
        shared = {
            **os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()), **variables,
        }  # fmt: skip
        processes = []
        for rank in map(str, range(num_ranks)):
            with (folder / f"rank-{rank}.log").open("w") as log:
                command = [sys.executable, program, str(folder)]
                environment = {**shared, "RANK": rank, "LOCAL_RANK": rank}
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        try:
            codes = [process.wait(timeout=LIMIT_SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
        logs = [(folder / f"rank-{rank}.log").read_text()[-3000:] for rank in range(num_ranks)]
        assert codes == [0] * num_ranks, "\n".join(logs)

    return start


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
