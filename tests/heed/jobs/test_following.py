"""Following a job whose head stops answering, or refuses connections, on a real Ray head."""

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import Any

import psutil
import pytest

from cluster.processes import free_port

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
# `heed` with time limits short enough for a test.
HEED = """
import sys
from cluster import jobs
jobs.REACH_SECONDS, jobs.ANSWER_SECONDS, jobs.FOLLOW_SECONDS = 30.0, 2.0, float(sys.argv.pop(1))
from heed.cli import main
main()
"""
SUBMIT = """
import sys, tempfile
from pathlib import Path
from cluster.jobs import Jobs
with tempfile.TemporaryDirectory() as folder:
    print(Jobs(sys.argv[1]).submit("talker", sys.argv[2], Path(folder), {}, {}))
"""


class Follower:
    """A running `heed jobs logs -f`."""

    def __init__(self, head: Any, job_id: str, limit_seconds: float, address: str = "") -> None:
        arguments = [str(limit_seconds), "jobs", "logs", "-f", job_id, "--address", address or head.address]
        self.process = run(head, HEED, *arguments)
        self.said = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line

    def wait_for(self, words: str, seconds: float = 90.0) -> None:
        end = time.monotonic() + seconds
        while words not in self.said:
            assert self.process.poll() is None, self.said
            assert time.monotonic() < end, f"not said: {words}\n{self.said}"
            time.sleep(0.1)

    @property
    def lines(self) -> list[str]:
        """The output so far, without the lines in which Ray says what it runs."""
        return [line for line in self.said.splitlines() if not re.search("job_manager.py|^Running entrypoint", line)]

    def wait(self) -> int:
        code = self.process.wait(timeout=120)
        self._reader.join(timeout=30)
        return code


def run(head: Any, code: str, *arguments: str) -> Popen[str]:
    environment = {**os.environ, **head.environment, "PYTHONPATH": str(ROOT), "COLUMNS": "1000"}
    return Popen([sys.executable, "-c", code, *arguments], env=environment, text=True, stdout=PIPE, stderr=STDOUT)


@pytest.fixture
def talker(ray_head: Any, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The id of a job that prints one line, waits until a file appears, prints another line and ends; and that file."""
    go = tmp_path / "go"
    command = f"echo first line; while [ ! -e {go} ]; do sleep 0.2; done; echo last line"
    submitting = run(ray_head, SUBMIT, ray_head.address, command)
    said, _ = submitting.communicate(timeout=120)
    assert submitting.returncode == 0, said
    yield said.split()[-1], go
    go.touch()


@contextmanager
def stopped_dashboard(head: Any, processes_of: Callable[[str], list[int]]) -> Iterator[None]:
    """Stops the process that answers the head's HTTP requests; the system still accepts connections for it."""
    port = int(head.address.rpartition(":")[2])
    listening = set[int]()
    for candidate in processes_of(f"head-{os.getpid()}"):
        with suppress(psutil.NoSuchProcess):
            found = psutil.Process(candidate).net_connections("tcp")
            listening |= {candidate for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port == port}
    (pid,) = listening
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.long
def test_a_head_that_stops_answering_for_a_while(
    ray_head: Any, talker: tuple[str, Path], processes: Callable[[str], list[int]]
) -> None:
    job_id, go = talker
    follower = Follower(ray_head, job_id, 60)
    follower.wait_for("\nfirst line\n")
    with stopped_dashboard(ray_head, processes):
        follower.wait_for(
            f"{ray_head.address}: no answer for 2 s; the job runs on without this connection, trying again"
        )
    go.touch()
    assert follower.wait() == 0, follower.said
    *said, over = follower.lines
    assert f"{ray_head.address} answers again" in said
    # On a busy machine, the head may also be slow to answer before or after this.
    assert [line for line in said if ray_head.address not in line] == ["first line", "last line"]
    assert over.startswith(f"{job_id}: SUCCEEDED after ")


@pytest.mark.nightly
def test_a_head_that_does_not_answer_again(
    ray_head: Any, talker: tuple[str, Path], processes: Callable[[str], list[int]]
) -> None:
    job_id, _ = talker
    follower = Follower(ray_head, job_id, 4)
    follower.wait_for("\nfirst line\n")
    with stopped_dashboard(ray_head, processes):
        begun = time.monotonic()
        assert follower.wait() == 2, follower.said
        assert time.monotonic() - begun < 90
    assert follower.lines == [
        "first line",
        f"{ray_head.address}: no answer for 2 s; the job runs on without this connection, trying again for 4 s",
        f"error: {ray_head.address}: no answer for 2 s; the job does not depend on this connection; to follow it again:"
        f" heed jobs logs -f {job_id} --address {ray_head.address}",
    ]


class Tunnel:
    """A TCP proxy in front of the head's dashboard, as an SSH tunnel is."""

    def __init__(self, address: str) -> None:
        self.port, self.target = free_port(), int(address.rpartition(":")[2])
        self.open()

    def open(self) -> None:
        self.server = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self.server,), daemon=True).start()

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:  # closed
                return
            upstream = socket.create_connection(("127.0.0.1", self.target))
            for here, there in ((client, upstream), (upstream, client)):
                threading.Thread(target=self._pump, args=(here, there), daemon=True).start()

    def _pump(self, here: socket.socket, there: socket.socket) -> None:
        with closing(here):
            try:
                while part := here.recv(65536):
                    there.sendall(part)
                there.shutdown(socket.SHUT_WR)
            except OSError:
                return

    def close(self) -> None:
        self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()


@pytest.mark.long
def test_a_connection_that_is_refused_for_a_while(ray_head: Any, talker: tuple[str, Path]) -> None:
    job_id, go = talker
    tunnel = Tunnel(ray_head.address)
    address = f"http://127.0.0.1:{tunnel.port}"
    follower = Follower(ray_head, job_id, 60, address)
    follower.wait_for("\nfirst line\n")
    tunnel.close()
    follower.wait_for(f"{address}: no connection ([Errno 111] Connection refused); the job runs on")
    go.touch()
    tunnel.open()
    assert follower.wait() == 0, follower.said
    *said, over = follower.lines
    assert f"{address} answers again" in said
    # On a busy machine, the head may also be slow to answer before or after this.
    assert [line for line in said if address not in line] == ["first line", "last line"]
    assert over.startswith(f"{job_id}: SUCCEEDED after ")
    tunnel.close()
