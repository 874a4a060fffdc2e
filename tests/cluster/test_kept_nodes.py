"""The ways of docs/cluster.md to keep a machine in the cluster, on a machine whose raylet ends while Ray itself stays.

The machine is a process namespace, so `pgrep` and `ray stop` see nothing but its own Ray.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from research.chaos.local_cluster import LocalCluster

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
SHELL = re.search(r"^```\n(while true; do\n.*?done\n)```", PAGE, re.MULTILINE | re.DOTALL)
SYSTEMD = re.search(r"^ExecStart=(.*)$", PAGE, re.MULTILINE)
STARTED, SECONDS = "Ray runtime started", 300.0
NODE = "--num-cpus=1 --object-store-memory=150000000 --disable-usage-stats --node-ip-address=127.0.0.2"
RAY = f'#!/bin/sh\n[ "$1" = start ] && set -- "$@" {NODE}\nexec {Path(sys.executable).parent}/ray "$@"\n'

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(os.geteuid()) or not shutil.which("unshare"), reason="process namespaces need root"),
]


def until(is_so: Callable[[], bool], log: Path) -> None:
    end = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < end, f"not in {SECONDS:g} s:\n{log.read_text()}"
        time.sleep(0.1)


class Machine:
    """Runs a command as the first process of a machine: what is left there ends with it, as with a unit of systemd."""

    def __init__(self, command: str, cluster: LocalCluster, folder: Path) -> None:
        ray = folder / "ray"
        ray.write_text(RAY)
        ray.chmod(0o755)
        command = command.replace("10.0.0.1:6379", cluster.address).replace("/shared/heed/.venv/bin/ray", str(ray))
        wrapped = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "/bin/sh", "-c", command]
        path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.log = folder / "log"
        with self.log.open("ab") as output:
            environment = {**os.environ, **cluster.environment, "PATH": path}
            self.process = subprocess.Popen(wrapped, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def find(self, words: str) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in found if one.is_running() and words in " ".join(one.cmdline())]

    def lose_raylet(self) -> None:
        """Kills a process whose end ends the raylet."""
        until(lambda: STARTED in self.log.read_text() and bool(self.find("RuntimeEnvAgent")), self.log)
        self.find("RuntimeEnvAgent")[0].kill()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(num_nodes=0, cpus=0) as head:
        yield head


def test_a_shell_brings_the_node_back(cluster: LocalCluster, tmp_path: Path) -> None:
    assert SHELL is not None
    machine = Machine(SHELL[1], cluster, tmp_path)
    try:
        machine.lose_raylet()
        until(lambda: machine.log.read_text().count(STARTED) == 2, machine.log)
    finally:
        machine.end()


@pytest.mark.nightly  # the shell's loop begins and loses a node by the same commands
def test_the_unit_s_process_ends_and_systemd_starts_it_again(cluster: LocalCluster, tmp_path: Path) -> None:
    assert SYSTEMD is not None
    shell, option, command = shlex.split(SYSTEMD[1])
    assert (shell, option) == ("/bin/sh", "-c")
    machine = Machine(command, cluster, tmp_path)
    try:
        machine.lose_raylet()
        machine.process.wait(timeout=SECONDS)
        machine = Machine(command, cluster, tmp_path)  # `Restart=always`
        until(lambda: machine.log.read_text().count(STARTED) == 2, machine.log)
    finally:
        machine.end()
