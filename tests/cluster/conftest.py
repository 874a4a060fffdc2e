"""Separate hosts on this machine: network namespaces on one bridge, each with the host table that Debian writes."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cluster.group import WorkerGroup

ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).parent / "ray")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass
class Host:
    """One host: `run` starts a program there. Its own name resolves to 127.0.1.1, as on Debian and Ubuntu.

    `replaced` names files in whose place its programs see other files.
    """

    name: str
    address: str
    folder: Path
    environment: Mapping[str, str]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    replaced: dict[Path, Path] = field(default_factory=dict)

    def run(self, command: Sequence[str], log: str, **environment: str) -> subprocess.Popen[bytes]:
        table = self.folder / f"{self.name}.hosts"
        table.write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")
        files = {Path("/etc/hosts"): table, **self.replaced}
        mounts = "".join(f"mount --bind {there} {place} && " for place, there in files.items())
        inside = f'{mounts}hostname {self.name} && exec "$@"'
        wrapped = ["ip", "netns", "exec", self.name, "unshare", "--mount", "--uts", "sh", "-c", inside, "sh", *command]
        with (self.folder / log).open("wb") as output:
            process = subprocess.Popen(
                wrapped, env={**self.environment, **environment}, stdout=output, stderr=subprocess.STDOUT,
                cwd=ROOT, start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def start_head(self, **environment: str) -> None:
        """A Ray head with room for one rank."""
        self.run(
            [RAY, "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=1", "--include-dashboard=false",
             "--no-monitor", "--include-log-monitor=false",
             f"--node-ip-address={self.address}", "--port=6379", f"--temp-dir={self.folder}/r"],
            "head.log", **environment,
        )  # fmt: skip

    def start_node(self, head: "Host", **environment: str) -> None:
        """A Ray node with room for one rank, restarted whenever it ends."""
        once = (
            f"{RAY} start --block --disable-usage-stats --include-log-monitor=false --num-cpus=1"
            f" --node-ip-address={self.address} --address={head.address}:6379"
        )
        self.run(["sh", "-c", f"while true; do {once}; sleep 1; done"], "node.log", **environment)

    def wait_for(self, process: subprocess.Popen[bytes], log: str, words: str, seconds: float) -> None:
        """Waits until a program has printed something. Raises: AssertionError if it ends or time runs out before
        that."""
        end = time.monotonic() + seconds
        while words not in self.said(log):
            assert process.poll() is None, self.said(log)
            assert time.monotonic() < end, f"not in {seconds:g} s: {words}\n{self.said(log)}"
            time.sleep(0.1)

    def said(self, log: str) -> str:
        return (self.folder / log).read_text(errors="replace")

    def cut(self) -> None:
        """Takes the host's link down: packets to and from it are lost without an answer."""
        ip("link", "set", f"v{self.name}", "down")

    def mend(self) -> None:
        ip("link", "set", f"v{self.name}", "up")

    def end(self) -> None:
        """Sends SIGKILL to everything that runs on it."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=30)
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        for pid in found.stdout.split():
            os.kill(int(pid), signal.SIGKILL)


@pytest.fixture(scope="module")
def opened() -> Iterator[list[WorkerGroup]]:
    """Groups that a file's tests pass on; they are closed after the last."""
    groups: list[WorkerGroup] = []
    yield groups
    for group in groups:
        group.close()


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that can reach each other; both are stopped and removed with everything that runs on them."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need root, ip and unshare")
    mark = secrets.token_hex(2)
    bridge, names = f"b{mark}", [f"h{mark}{letter}" for letter in "ab"]
    folder = Path(tempfile.mkdtemp(prefix="heed-"))  # Ray keeps sockets here, whose paths must be short
    (folder / "token").touch(mode=0o600)
    (folder / "token").write_text(secrets.token_hex(16))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ACCELERATE_"))}
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
    ):
        inherited.pop(name, None)
    own = {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    hosts = []
    try:
        try:
            ip("link", "add", bridge, "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        ip("link", "set", bridge, "up")
        for number, name in enumerate(names, start=1):
            ip("netns", "add", name)
            ip("link", "add", f"v{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"v{name}", "master", bridge, "up")
            ip("-n", name, "addr", "add", f"10.213.7.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            hosts.append(Host(name, f"10.213.7.{number}", folder, {**inherited, **own, "OMP_WAIT_POLICY": "PASSIVE"}))
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            host.end()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            subprocess.run(["ip", "link", "del", f"v{name}"], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)
