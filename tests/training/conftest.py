"""Two gloo ranks as two processes, and how much memory one of them takes."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

# DeepSpeed's first run on a machine compiles its shared-memory operator, which takes two minutes.
LIMIT_SECONDS = 480

StartRanks = Callable[..., None]
Result = TypeVar("Result")


@pytest.fixture(scope="session")
def start_two_ranks() -> StartRanks:
    """Runs `python PROGRAM FOLDER` as two ranks, or so many, to their end; a rank's output is in FOLDER/rank-N.log."""

    def start(program: str, folder: Path, num_ranks: int = 2, **variables: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {
            **os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            **variables,
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


def private_bytes() -> int:
    """Memory of this process alone: pages of a mapped file, which the system may drop, are not in it."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def peak_growth(work: Callable[[], Result]) -> tuple[Result, int]:
    """What the work returns, and by how many bytes this process grew at most while it ran."""
    before, over = private_bytes(), threading.Event()
    seen = [before]

    def watch() -> None:
        while not over.wait(0.001):
            seen.append(private_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    result = work()
    seen.append(private_bytes())
    over.set()
    thread.join()
    return result, max(seen) - before
