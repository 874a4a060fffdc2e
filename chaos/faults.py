"""What goes wrong in a campaign: each fault strikes once, lasts for some seconds, and is then mended.

Mending is what an operator or the environment does: a node is started again, a link comes back, space is freed. That a
hung worker is found and replaced, and that the driver is started again, is nobody's here.
"""

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from random import Random
from typing import ClassVar

from chaos.disk import SmallDisk
from chaos.result import stage_of
from cluster.local import LocalCluster, is_alive, kill_process
from cluster.network import Network


class Fault:
    """One thing that goes wrong. `what` says it in words, `seconds` is how long it lasts, `absent` the nodes that no
    supervisor may start meanwhile.
    """

    kind: ClassVar[str]
    what: str
    seconds: float = 0.0
    absent: frozenset[str] = frozenset()

    def strike(self) -> None:
        raise NotImplementedError

    def keep_up(self) -> None:
        """Called again and again while it lasts."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended before its time, because what it struck is gone."""
        return False

    def mend(self) -> None:
        """Also called where the campaign fails, so it must work whatever has become of the run."""


class WorkerKilled(Fault):
    kind = "worker"

    def __init__(self, worker: int) -> None:
        self._worker, self.what = worker, "a worker killed"

    def strike(self) -> None:
        kill_process(self._worker)


class NodeKilled(Fault):
    """The cluster's supervisor starts it again once the fault is over."""

    kind = "node"

    def __init__(self, cluster: LocalCluster, node: str, seconds: float) -> None:
        self._cluster, self._node = cluster, node
        self.seconds, self.absent = seconds, frozenset({node})
        self.what = f"{node} killed, back after {seconds:.0f} s"

    def strike(self) -> None:
        self._cluster.kill_node(self._node)


class WorkerHangs(Fault):
    """SIGSTOP. With infinite `seconds` it must be noticed, killed and replaced; otherwise SIGCONT follows."""

    kind = "hang"

    def __init__(self, worker: int, seconds: float) -> None:
        self._worker, self.seconds = worker, seconds
        self.what = "a worker stopped for good" if seconds == inf else f"a worker stopped for {seconds:.1f} s"

    def strike(self) -> None:
        _signal([self._worker], signal.SIGSTOP)

    @property
    def is_over(self) -> bool:
        return not is_alive(self._worker)

    def mend(self) -> None:
        _signal([self._worker], signal.SIGCONT if self.seconds < inf else signal.SIGKILL)


class LinkDown(Fault):
    """A node's cable is pulled out of the network's switch. If Ray gives the node up meanwhile, the supervisor starts
    it again once it is back.
    """

    kind = "partition"

    def __init__(self, network: Network, node: str, seconds: float) -> None:
        self._network, self._node = network, node
        self.seconds, self.absent = seconds, frozenset({node})
        self.what = f"{node} unplugged for {seconds:.0f} s"

    def strike(self) -> None:
        self._network.unplug(self._node)

    def mend(self) -> None:
        self._network.plug(self._node)


class NodeFrozen(Fault):
    """SIGSTOP to everything on a node: to its peers it looks like a partition, though its own processes do not see
    theirs go. For machines where links cannot be cut.
    """

    kind = "freeze"

    def __init__(self, cluster: LocalCluster, node: str, seconds: float) -> None:
        self._cluster, self._node, self._stopped = cluster, node, list[int]()
        self.seconds, self.absent = seconds, frozenset({node})
        self.what = f"{node} frozen for {seconds:.0f} s"

    def strike(self) -> None:
        self._stopped = self._cluster.node_processes(self._node)
        _signal(self._stopped, signal.SIGSTOP)

    def mend(self) -> None:
        _signal(self._stopped, signal.SIGCONT)


class DiskFull(Fault):
    """Another file takes all the space on the run's disk, and what becomes free while it lasts."""

    kind = "disk"

    def __init__(self, disk: SmallDisk, seconds: float) -> None:
        self._disk, self.seconds, self.what = disk, seconds, f"the disk full for {seconds:.0f} s"

    def strike(self) -> None:
        self._disk.fill()

    def keep_up(self) -> None:
        self._disk.fill()

    def mend(self) -> None:
        self._disk.free()


class FolderMissing(Fault):
    """A folder of the run is renamed and comes back, as on a file system that is mounted again. What has been made in
    its place meanwhile is put aside: mounted over, nobody would see it.
    """

    kind = "folder"

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder, self.seconds = folder, seconds
        self._away = folder.with_name(f".{folder.name}.away")
        self.what = f"{folder.name}/ missing for {seconds:.0f} s"

    def strike(self) -> None:
        with suppress(FileNotFoundError):  # the run has just removed it itself
            self._folder.rename(self._away)

    def mend(self) -> None:
        if not self._away.exists():
            return
        number = 0
        while self._folder.exists():
            number += 1
            with suppress(OSError):  # a number that is taken
                self._folder.rename(self._folder.with_name(f".{self._folder.name}.made-meanwhile-{number}"))
                self.what += "; the run made it again"
        self._away.rename(self._folder)


KINDS = ("worker", "node", "driver", "hang", "partition", "freeze", "disk", "folder")
LONGEST_SHORT_HANG_SECONDS = 6.0
SECONDS = {  # how long each kind lasts, at least and at most
    "node": (0.0, 5.0),
    "partition": (5.0, 40.0),
    "freeze": (5.0, 40.0),
    "disk": (2.0, 12.0),
    "folder": (2.0, 8.0),
}


def make_fault(
    kind: str, chance: Random, *, cluster: LocalCluster, workers: Sequence[int], disk: SmallDisk | None, folder: Path
) -> Fault:
    """A fault of that kind in what is there now: the `workers`, the run's `folder`, and the stage at work in it.

    `chance` draws what it strikes and how long it lasts.
    """
    worker, length, which = chance.choice(workers), chance.random(), chance.random()
    low, high = SECONDS.get(kind, (0.0, 0.0))
    seconds = low + (high - low) * length
    node = cluster.node_of(worker) or cluster.nodes[0]
    match kind:
        case "worker":
            return WorkerKilled(worker)
        case "node":
            return NodeKilled(cluster, node, seconds)
        case "hang":
            return WorkerHangs(worker, inf if which < 0.5 else 1.0 + (LONGEST_SHORT_HANG_SECONDS - 1.0) * length)
        case "partition":
            assert cluster.network is not None, "links can be cut in a network only"
            return LinkDown(cluster.network, node, seconds)
        case "freeze":
            return NodeFrozen(cluster, node, seconds)
        case "disk":
            assert disk is not None, "only a disk of the campaign's own is filled"
            return DiskFull(disk, seconds)
        case "folder":
            stage = folder / stage_of(folder)
            there = [path for path in (folder, stage, stage / "checkpoints") if path.is_dir()] or [folder]
            return FolderMissing(there[int(which * len(there))], seconds)
    raise AssertionError(f"no fault of kind {kind!r} strikes a cluster")


def _signal(processes: Sequence[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
