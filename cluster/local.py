"""A Ray cluster of several nodes on this machine, whose nodes can be killed and replaced."""

import os
import signal
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ray.cluster_utils import Cluster

MARK = "HEED_LOCAL_CLUSTER"


class LocalCluster:
    """A head that runs no work, and `num_nodes` nodes of `cpus` cores each; a node's death is as a machine's.

    Every process of it, and of those that join it with `environment`, carries a mark by which it is found.
    """

    def __init__(self, num_nodes: int, cpus: int) -> None:
        self.mark, self.cpus = f"{os.getpid()}-{id(self)}", cpus
        os.environ[MARK] = self.mark  # nodes inherit it, and hand it on to the workers that they start
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.num_nodes, self._nodes = num_nodes, list[Any]()
        self.fill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cluster.shutdown()
        os.environ.pop(MARK, None)

    @property
    def environment(self) -> dict[str, str]:
        """What a driver's environment needs to join."""
        return {"RAY_ADDRESS": self._cluster.address, MARK: self.mark}

    def kill_node_of(self, worker: int) -> None:
        """SIGKILL to everything on the node where this rank runs; nothing where the rank has ended already."""
        parent = _parent(worker)
        for node in self._nodes:
            if any(info.process.pid == parent for info in node.all_processes["raylet"]):
                self._nodes.remove(node)
                self._cluster.remove_node(node, allow_graceful=False)
                return

    def fill(self) -> None:
        """Start as many nodes as are missing."""
        while len(self._nodes) < self.num_nodes:
            self._nodes.append(self._cluster.add_node(num_cpus=self.cpus))

    def worker_processes(self) -> list[int]:
        """Process ids of the ranks that work on it."""
        return sorted(pid for pid in _processes() if self._is_rank(pid))

    def _is_rank(self, pid: int) -> bool:
        folder = Path(f"/proc/{pid}")
        try:
            return (
                folder.joinpath("cmdline").read_bytes().startswith(b"ray::_Worker")
                and f"{MARK}={self.mark}\0".encode() in folder.joinpath("environ").read_bytes()
            )
        except OSError:  # it ended while it was looked at, or is another user's
            return False


def kill_process(pid: int) -> None:
    """SIGKILL; nothing where it has ended already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _processes() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
