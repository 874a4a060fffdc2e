"""A Ray cluster of several nodes on this machine, which can be killed, cut off and replaced.

Each node is a separate `ray start --block`, as a supervisor would run it, without processes that Heed does not use
(`cluster.local_ray`). With a `Network`, each is on a host with its own address; without one, all share this machine's
loopback interface.

The hosts of a `Network` are network namespaces joined by a bridge, each with an address and a cable to pull. Their
names contain this process's id, and the machine's own interfaces are left alone. This needs root, or a user namespace
in which the user is root (`unshare --user --map-root-user --net --mount`).
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from cluster.processes import GROUP, RAY_ENVIRONMENT, free_port

MARK = "HEED_LOCAL_CLUSTER"
HEAD = "head"
HEAD_ADDRESS = "10.77.0.1"  # in a `Network`
RAY = (sys.executable, "-P", "-m", "cluster.local_ray")
START_SECONDS = 180.0
STORE_BYTES = 150 * 1024 * 1024
INTERFACE = "eth0"  # on every host
_NAMESPACES = Path("/run/netns")
_network_numbers = count()


class Network:
    """A network of `hosts`, with names of at most 15 characters. The switch between them is a namespace too.

    Raises:
        OSError: this process is not allowed to create namespaces.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts, self._prefix = tuple(hosts), f"heed-{os.getpid()}-{next(_network_numbers)}"
        self._made = list[str]()
        try:
            self._lay_cables()
        except BaseException:
            self.close()
            raise

    def address(self, host: str) -> str:
        return f"{HEAD_ADDRESS[:-1]}{1 + self.hosts.index(host)}"

    def command(self, host: str, arguments: Sequence[str]) -> list[str]:
        """Return a command line that runs a command on that host, in the process that it starts."""
        return ["nsenter", f"--net={_NAMESPACES / self._name(host)}", "--", *arguments]

    def unplug(self, host: str) -> None:
        """Pull the host's cable out of the switch: packets to and from it are lost without notice."""
        _ip("-n", self._name("switch"), "link", "set", "dev", host, "down")

    def plug(self, host: str) -> None:
        _ip("-n", self._name("switch"), "link", "set", "dev", host, "up")

    def close(self) -> None:
        """Remove the namespaces; their cables disappear once no process is left inside."""
        while self._made:
            _ip("netns", "delete", self._made.pop(), check=False)

    def _name(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def _add(self, host: str) -> str:
        name = self._name(host)
        _ip("netns", "add", name)
        self._made.append(name)
        _ip("-n", name, "link", "set", "dev", "lo", "up")
        return name

    def _lay_cables(self) -> None:
        switch = self._add("switch")
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "dev", "bridge", "up")
        for host in self.hosts:
            name = self._add(host)
            _ip("link", "add", host, "netns", switch, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _ip("-n", switch, "link", "set", "dev", host, "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", "dev", INTERFACE, "up")


def why_no_network() -> str:
    """Tell the user why this process cannot make a network; "" if it can. Makes and removes one to find out."""
    missing = [command for command in ("ip", "nsenter") if shutil.which(command) is None]
    if missing:
        return f"{' and '.join(missing)} not found (packages iproute2 and util-linux)"
    try:
        Network(["probe"]).close()
    except OSError as error:
        return f"cannot create network namespaces ({error}); this needs root"
    return ""


def _ip(*arguments: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def host_names(num_nodes: int) -> list[str]:
    """Return the hosts that a cluster with this many nodes needs: first the head's, where drivers run too."""
    return [HEAD, *(f"node-{number + 1}" for number in range(num_nodes))]


class LocalCluster:
    """A head that runs no work, and `num_nodes` nodes of `cpus` cores each. Killing a node looks like losing a machine.

    The environment of each process has a mark that names its node; a driver that joins with `environment` has one too.
    Processes are found by this mark.
    """

    def __init__(self, num_nodes: int, cpus: int, network: Network | None = None) -> None:
        self.mark, self.cpus, self.network = f"{os.getpid()}-{secrets.token_hex(3)}", cpus, network
        self.folder = Path(tempfile.mkdtemp(prefix="heed-ray-"))  # short: it holds sockets, whose paths are limited
        # A process that has imported Ray keeps the mode it had then, and must be able to join.
        self._auth_mode = os.environ.get("RAY_AUTH_MODE", "disabled" if "ray" in sys.modules else "token")
        if self._auth_mode == "token":
            _ensure_token()
        self._port, self._nodes = 6379 if network else free_port(), dict[str, _Node]()
        self.nodes = tuple(host_names(num_nodes)[1:])
        try:
            self._start(HEAD, ["--head", f"--port={self._port}", "--num-cpus=0", "--include-dashboard=false"])
            self.wait()
            self.fill()
            self.wait()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        return f"{self._address_of(HEAD)}:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that a driver needs to join."""
        return {"RAY_ADDRESS": self.address, **self._environment("driver")}

    def driver_command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line that runs a driver on the head's host."""
        return self.network.command(HEAD, arguments) if self.network else list(arguments)

    def fill(self, absent: Collection[str] = ()) -> None:
        """Restart every node that is not running, as a supervisor would, except those in `absent`. First kills any
        process left of a node.

        Returns at once; `is_whole` says when all have joined.
        """
        for name in self.nodes:
            if name in absent:
                continue
            if name not in self._nodes or self._nodes[name].process.poll() is not None:
                self.kill_node(name)
                self._start(name, [f"--address={self.address}", f"--num-cpus={self.cpus}"])

    @property
    def is_whole(self) -> bool:
        """Whether every node runs and has joined."""
        return all(name in self._nodes and self._nodes[name].has_joined for name in (HEAD, *self.nodes))

    def wait(self) -> None:
        """Wait until all started nodes have joined. Raises RuntimeError if one does not."""
        end = time.monotonic() + START_SECONDS
        for name, node in self._nodes.items():
            while not node.has_joined:
                if node.process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"{name} of the local cluster did not start:\n{node.said[-2000:]}")
                time.sleep(0.05)

    def kill_node(self, name: str) -> None:
        """Send SIGKILL to everything on a node; it stays away until `fill`."""
        _kill_all(f"{MARK}={self.mark}/{name}\0")
        if name in self._nodes:
            self._nodes.pop(name).process.wait()

    def node_of(self, worker: int) -> str:
        """Return the node where a rank runs; "" if it has already ended."""
        marks = [name for name in self.nodes if _is_marked(worker, f"{MARK}={self.mark}/{name}\0")]
        return marks[0] if marks else ""

    def node_processes(self, name: str) -> list[int]:
        """Process ids of everything on a node: Ray's own processes, and the ranks."""
        return [pid for pid in psutil.pids() if _is_marked(pid, f"{MARK}={self.mark}/{name}\0")]

    def worker_processes(self) -> list[int]:
        """Process ids of the ranks that run on it."""
        return sorted(pid for pid in psutil.pids() if _is_rank(pid) and _is_marked(pid, f"{MARK}={self.mark}/"))

    def generator_processes(self) -> list[int]:
        """Process ids of the ranks that only sample."""
        return [pid for pid in self.worker_processes() if _is_marked(pid, f"{GROUP}=generators\0")]

    def close(self) -> None:
        """End every process of the cluster and of its drivers, and remove its folder."""
        _kill_all(f"{MARK}={self.mark}/")
        for node in self._nodes.values():
            node.process.wait()
        self._nodes.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, name: str, options: Sequence[str]) -> None:
        command = [
            *RAY, "start", "--block", f"--temp-dir={self.folder / name}", *options, "--disable-usage-stats",
            f"--node-ip-address={self._address_of(name)}", f"--object-store-memory={STORE_BYTES}",
        ]  # fmt: skip
        placed = self.network.command(name, command) if self.network else command
        self._nodes[name] = _Node(placed, {**os.environ, **self._environment(name)}, self.folder / f"{name}.log")

    def _address_of(self, name: str) -> str:
        """Without a network, every node has its own loopback address: a driver joins the node with its address."""
        return self.network.address(name) if self.network else f"127.0.0.{1 + (HEAD, *self.nodes).index(name)}"

    def _environment(self, name: str) -> dict[str, str]:
        """Variables of a node, which passes them on to the workers that it starts."""
        return {
            MARK: f"{self.mark}/{name}",
            "RAY_AUTH_MODE": self._auth_mode,
            **RAY_ENVIRONMENT,
        }


class _Node:
    """One `ray start --block`, and its output."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("w") as output:  # a restarted node begins a new log
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def has_joined(self) -> bool:
        return self.process.poll() is None and "Ray runtime started" in self.said


def _ensure_token() -> None:
    """Create the user's token, as Ray does for a cluster in a process: every user of this machine can reach it."""
    named = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if not named and not (Path.home() / ".ray" / "auth_token").exists():
        command = [*RAY, "get-auth-token", "--generate"]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, umask=0o077)


def kill_process(pid: int) -> None:
    """Send SIGKILL. Does nothing if the process has already ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Whether a process runs or is stopped; a zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _kill_all(mark: str) -> None:
    """Send SIGKILL to every process with that mark, and to those they start meanwhile, until all have ended."""
    end, dying = time.monotonic() + START_SECONDS, set[psutil.Process]()
    # A process that is exiting has lost its environment, and so its mark, but not yet its sockets.
    while dying := {
        process
        for process in psutil.process_iter()
        if (process in dying or _is_marked(process.pid, mark)) and is_alive(process.pid)
    }:
        assert time.monotonic() < end, f"processes {sorted(process.pid for process in dying)} still run after SIGKILL"
        for process in dying:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.02)


def _is_rank(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::_Worker")
    except OSError:  # it has just ended
        return False


def _is_marked(pid: int, mark: str) -> bool:
    """Whether the process's environment holds the mark. False if it has ended or belongs to another user."""
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
