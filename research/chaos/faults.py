"""The faults of a campaign: their schedule, and what each does.

The schedule is drawn from the seed before anything runs, so a campaign can be repeated. A fault is injected once, lasts
for some seconds, and is then repaired. The repair plays the operator or the environment: a node restarts, a link comes
back, space is freed. The job itself must find and replace a hung worker, and the round restarts the driver.
"""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from random import Random
from typing import ClassVar

from research.chaos.local_cluster import LocalCluster, Network, is_alive, kill_process
from research.chaos.result import stage_of

KINDS = ("worker", "generator", "node", "driver", "hang", "partition", "disk", "folder", "server")
LONGEST_SHORT_HANG_SECONDS = 6.0
SECONDS = {  # minimum and maximum duration per kind
    "node": (0.0, 5.0),
    "partition": (5.0, 40.0),
    "disk": (2.0, 12.0),
    "folder": (2.0, 8.0),
    "server": (1.0, 20.0),
}
FILLER = ".filler"  # the file that fills the small disk


@dataclass(frozen=True)
class Planned:
    """A planned fault: its kind, the stage in which it is due, and the moment as a fraction of that stage's duration.

    `seed` draws its target and duration.
    """

    kind: str
    stage: str
    moment: float
    seed: int


class Schedule:
    """Draws faults so that kinds and stages each occur equally often, up to one; moments are uniform."""

    def __init__(self, num_faults: int, seed: int, kinds: Sequence[str], stages: Sequence[str]) -> None:
        chance = Random(seed)
        drawn_kinds, drawn_stages = (_deal(num_faults, names, chance) for names in (kinds, stages))
        self._stages = tuple(stages)
        self._to_come = [
            Planned(kind, stage, chance.random(), chance.getrandbits(32))
            for kind, stage in zip(drawn_kinds, drawn_stages, strict=True)
        ]

    def __len__(self) -> int:
        """Returns the number of remaining faults."""
        return len(self._to_come)

    def take(self, number: int) -> list[Planned]:
        """Takes at most `number` faults for one run, in the order of its stages."""
        taken, self._to_come = self._to_come[:number], self._to_come[number:]
        return sorted(taken, key=lambda planned: (self._stages.index(planned.stage), planned.moment))

    def give_back(self, planned: Sequence[Planned]) -> None:
        """Returns faults that a run ended too early for; the next run takes them first."""
        self._to_come = [*planned, *self._to_come]


def _deal(number: int, names: Sequence[str], chance: Random) -> list[str]:
    dealt = list[str]()
    while len(dealt) < number:
        dealt += chance.sample(names, len(names))
    return dealt[:number]


class SmallDisk:
    """A disk that only the campaign uses and can fill: a tmpfs, so that no other process runs out of space.

    Its contents are lost when it is closed.

    Raises: OSError if this process may not mount anything.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=700", "heed-chaos", str(folder))

    def fill(self) -> None:
        """Takes all free space; call it again to take space freed since."""
        with suppress(OSError), (self.folder / FILLER).open("ab", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass

    def free(self) -> None:
        (self.folder / FILLER).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmounts at once, or if the disk is in use, as soon as it no longer is."""
        try:
            _run("umount", str(self.folder))
        except OSError:
            _run("umount", "--lazy", str(self.folder))
        self.folder.rmdir()


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[SmallDisk]:
    disk = SmallDisk(folder, num_bytes)
    try:
        yield disk
    finally:
        disk.close()


def why_no_disk() -> str:
    """Returns why this process cannot mount a disk, or "" if it can. It tries to mount one and removes it."""
    try:
        with tempfile.TemporaryDirectory(prefix="heed-probe-") as folder, small_disk(Path(folder) / "disk", 1 << 20):
            return ""
    except OSError as error:
        return f"cannot mount a disk of limited size ({error}); root can"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {' '.join(done.stderr.split())}")


class Server:
    """A program that the job calls, such as a reward's server. `command` runs it until it is killed."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command, self._log = [*command], log
        self.start()

    def start(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def close(self) -> None:
        kill_process(self._process.pid)
        self._process.wait()


class Fault:
    """One fault. `what` describes it, `seconds` is its duration, `absent` are the nodes that the supervisor must not
    restart meanwhile.
    """

    kind: ClassVar[str]
    what: str
    seconds: float = 0.0
    absent: frozenset[str] = frozenset()

    def inject(self) -> None:
        raise NotImplementedError

    def keep_up(self) -> None:
        """Maintains the fault. Called repeatedly while it lasts."""

    @property
    def is_over(self) -> bool:
        """Whether the fault has ended early because its target is gone."""
        return False

    def repair(self) -> None:
        """Ends the fault. Also called when the campaign fails, so it must work whatever state the run is in."""


class WorkerKilled(Fault):
    kind = "worker"

    def __init__(self, worker: int, what: str) -> None:
        self._worker, self.what = worker, f"{what} killed"

    def inject(self) -> None:
        kill_process(self._worker)


class ServerKilled(Fault):
    """Kills the server that the job calls, and starts it again after the fault."""

    kind = "server"

    def __init__(self, server: Server, seconds: float) -> None:
        self._server, self.seconds = server, seconds
        self.what = f"the server killed, back after {seconds:.0f} s"

    def inject(self) -> None:
        self._server.close()

    def repair(self) -> None:
        self._server.start()


class NodeKilled(Fault):
    """Kills a node. The cluster's supervisor restarts it after the fault."""

    kind = "node"

    def __init__(self, cluster: LocalCluster, node: str, seconds: float) -> None:
        self._cluster, self._node = cluster, node
        self.seconds, self.absent = seconds, frozenset({node})
        self.what = f"{node} killed, back after {seconds:.0f} s"

    def inject(self) -> None:
        self._cluster.kill_node(self._node)


class WorkerHangs(Fault):
    """Stops a worker by SIGSTOP. With infinite `seconds` it must be noticed, killed and replaced; otherwise SIGCONT
    follows.
    """

    kind = "hang"

    def __init__(self, worker: int, seconds: float) -> None:
        self._worker, self.seconds = worker, seconds
        self.what = "a worker stopped for good" if seconds == inf else f"a worker stopped for {seconds:.1f} s"

    def inject(self) -> None:
        _signal([self._worker], signal.SIGSTOP)

    @property
    def is_over(self) -> bool:
        return not is_alive(self._worker)

    def repair(self) -> None:
        _signal([self._worker], signal.SIGCONT if self.seconds < inf else signal.SIGKILL)


class LinkDown(Fault):
    """Unplugs a node from the network's switch. If Ray gives the node up meanwhile, the supervisor restarts it once the
    link is back.
    """

    kind = "partition"

    def __init__(self, network: Network, node: str, seconds: float) -> None:
        self._network, self._node = network, node
        self.seconds, self.absent = seconds, frozenset({node})
        self.what = f"{node} unplugged for {seconds:.0f} s"

    def inject(self) -> None:
        self._network.unplug(self._node)

    def repair(self) -> None:
        self._network.plug(self._node)


class DiskFull(Fault):
    """Fills the run's disk with another file, and keeps it full while the fault lasts."""

    kind = "disk"

    def __init__(self, disk: SmallDisk, seconds: float) -> None:
        self._disk, self.seconds, self.what = disk, seconds, f"the disk full for {seconds:.0f} s"

    def inject(self) -> None:
        self._disk.fill()

    def keep_up(self) -> None:
        self._disk.fill()

    def repair(self) -> None:
        self._disk.free()


class FolderMissing(Fault):
    """Renames a folder of the run and brings it back, like a file system that is unmounted and mounted again. A folder
    that the run creates in its place meanwhile is moved away, since a mount would hide it.
    """

    kind = "folder"

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder, self.seconds = folder, seconds
        self._away = folder.with_name(f".{folder.name}.away")
        self.what = f"{folder.name}/ missing for {seconds:.0f} s"

    def inject(self) -> None:
        with suppress(FileNotFoundError):  # the run has just removed it
            self._folder.rename(self._away)

    def repair(self) -> None:
        if not self._away.exists():
            return
        number = 0
        while self._folder.exists():
            number += 1
            with suppress(OSError):  # if the number is taken
                self._folder.rename(self._folder.with_name(f".{self._folder.name}.made-meanwhile-{number}"))
                self.what += "; the run made it again"
        self._away.rename(self._folder)


def make_fault(
    kind: str,
    chance: Random,
    *,
    cluster: LocalCluster,
    workers: Sequence[int],
    disk: SmallDisk | None,
    server: Server | None,
    folder: Path,
) -> Fault:
    """Returns a fault of that kind for the current state: the `workers`, the run's `folder`, and its active stage.

    `chance` draws the target and the duration.
    """
    worker, length, which = chance.choice(workers), chance.random(), chance.random()
    low, high = SECONDS.get(kind, (0.0, 0.0))
    seconds = low + (high - low) * length
    node = cluster.node_of(worker) or cluster.nodes[0]
    match kind:
        case "worker" | "generator":
            return WorkerKilled(worker, f"a {kind}")
        case "node":
            return NodeKilled(cluster, node, seconds)
        case "hang":
            return WorkerHangs(worker, inf if which < 0.5 else 1.0 + (LONGEST_SHORT_HANG_SECONDS - 1.0) * length)
        case "partition":
            assert cluster.network is not None, "cutting links needs a network of namespaces"
            return LinkDown(cluster.network, node, seconds)
        case "disk":
            assert disk is not None, "only the campaign's own disk may be filled"
            return DiskFull(disk, seconds)
        case "server":
            assert server is not None, "only the campaign's own server may be killed"
            return ServerKilled(server, seconds)
        case "folder":
            stage = folder / stage_of(folder)
            there = [path for path in (folder, stage, stage / "checkpoints") if path.is_dir()] or [folder]
            return FolderMissing(there[int(which * len(there))], seconds)
    raise AssertionError(f"unknown kind of fault: {kind!r}")


def _signal(processes: Sequence[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
