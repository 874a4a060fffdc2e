"""Runs a job undisturbed, then repeatedly under faults, and compares the outputs each time.

All runs use a cluster of several nodes on this machine; each node has its own network namespace if those can be made.
Faults are injected one after another, each after the run has made progress since the previous one.
"""

import itertools
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path

from cluster.processes import end_by_sigterm
from heed.jobs.job import JobConfig
from heed.jobs.job_file import load_job
from research.chaos.faults import KINDS, Schedule, Server, SmallDisk, small_disk, why_no_disk
from research.chaos.local_cluster import LocalCluster, Network, host_names, why_no_network
from research.chaos.result import ChaosResult, Injected, differing_stages
from research.chaos.round import Driver, Round, wait_for_nodes
from stages.lineage import LINEAGE
from stages.progress import console

FAULTS_PER_RUN = 8  # a little more than a job has stages
EARLIER = 0.8  # factor on a stage's assumed duration after a run in which a fault's moment did not come
MAX_EMPTY_ROUNDS = 5
MIN_DISK_BYTES = 64 << 20
# Short limits, so that a campaign does not wait half an hour per hang. They change no result.
LIMITS = (
    "cluster.silence_seconds=15",
    "cluster.stall_seconds=60",
    "cluster.start_seconds=90",
    "engine.collective_timeout_seconds=30",
)


def run_chaos(
    job_file: Path | None,
    overrides: Sequence[str],
    runs: Path,
    *,
    num_faults: int,
    seed: int,
    num_nodes: int,
    kinds: Sequence[str] = (),
    server: Sequence[str] = (),
) -> ChaosResult:
    """Runs the job undisturbed, then under faults of these kinds (default: all that this machine and the job allow).

    `server` is the command of a program that the job calls. It runs on the head's host.

    Raises: ValueError for a job that cannot run here or ends too soon for faults, and for kinds that are unknown or
    impossible; RuntimeError if the undisturbed run fails, or if a run never ends despite restarts.
    """
    overrides = [*LIMITS, *overrides]
    job = load_job(job_file, overrides)
    impossible = _impossible_kinds(job, has_server=bool(server))
    chosen = choose_kinds(kinds, impossible)
    if job.loop is not None:
        raise ValueError(
            f"job {job.name!r} has [loop], whose rounds depend on what they find; a job without it was expected"
        )
    runs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(_ends_when_terminated())
        network = None
        if "partition" not in impossible:
            network = stack.enter_context(closing(Network(host_names(num_nodes))))
        cpus = -(-job.num_ranks // num_nodes)
        cluster = stack.enter_context(LocalCluster(num_nodes, cpus, network))
        campaign = Campaign(job, job_file, overrides, runs, cluster)
        if server:
            log = runs / f"{job.name}-server.log"
            campaign.server = stack.enter_context(closing(Server(cluster.driver_command(server), log)))
        calm_seconds = campaign.run_calm()
        if "disk" in chosen:
            size = max(MIN_DISK_BYTES, 4 * _size_of(campaign.calm))
            campaign.disk = stack.enter_context(small_disk(runs / f"{job.name}-chaos-disk", size))
        chaos_seconds = campaign.run_rounds(Schedule(num_faults, seed, chosen, job.stage_names))
    unused = {kind: why for kind, why in impossible.items() if not kinds}
    result = campaign.result(calm_seconds, chaos_seconds, unused)
    (runs / f"{job.name}-chaos.json").write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    return result


def choose_kinds(wanted: Sequence[str], impossible: dict[str, str]) -> list[str]:
    """Returns the kinds to draw from: those wanted, or by default all that are possible here.

    Raises: ValueError for an unknown kind, or one that is impossible here.
    """
    for kind in wanted:
        if kind not in KINDS:
            raise ValueError(f"--kinds: {kind!r} is not a kind of fault; some of {', '.join(KINDS)} were expected")
        if kind in impossible:
            raise ValueError(f"--kinds: {kind} is not possible here: {impossible[kind]}")
    if wanted:
        return list(dict.fromkeys(wanted))
    return [kind for kind in KINDS if kind not in impossible]


def _impossible_kinds(job: JobConfig, *, has_server: bool) -> dict[str, str]:
    why = {
        "partition": why_no_network(),
        "disk": why_no_disk(),
        "server": "" if has_server else "no server was given",
        "generator": "" if job.extra_ranks else "no process of the job only samples",
    }
    return {kind: reason for kind, reason in why.items() if reason}


class Campaign:
    """The runs of one campaign, and the outcomes of its faults so far."""

    def __init__(
        self,
        job: JobConfig,
        job_file: Path | None,
        overrides: Sequence[str],
        runs: Path,
        cluster: LocalCluster,
    ) -> None:
        self.job, self.runs, self.cluster = job, runs, cluster
        self._job_file, self._overrides = job_file, overrides
        self.disk: SmallDisk | None = None
        self.server: Server | None = None
        self.faults, self.differing, self.rounds = list[Injected](), set[str](), 0
        self.calm = runs / f"{job.name}-calm"
        self._stage_seconds = dict[str, float]()  # the assumed duration of each stage
        self._fastest = dict[str, float]()  # the shortest time that each stage took

    def run_calm(self) -> float:
        """Runs the undisturbed job that the others are compared with. Returns its duration in seconds."""
        begun = time.monotonic()
        driver = self._start(self.calm)
        if driver.process.wait() != 0:
            raise RuntimeError(f"{driver.log}: the undisturbed run ended with {driver.process.returncode}")
        self._stage_seconds = shortest_seconds({}, self.calm, self.job.stage_names)
        self._fastest = dict(self._stage_seconds)
        return time.monotonic() - begun

    def useful_seconds(self, calm_seconds: float) -> float:
        """Returns how many seconds an undisturbed run takes once kernels are compiled."""
        first = shortest_seconds({}, self.calm, self.job.stage_names)
        return calm_seconds - sum(first.values()) + sum(self._fastest.values())

    def run_rounds(self, schedule: Schedule) -> float:
        """Runs the job until all faults of the schedule were injected. Returns how many seconds that took.

        Raises: ValueError if runs end before a fault could be injected.
        """
        begun, num_empty = time.monotonic(), 0
        while len(schedule):
            num_before = len(schedule)
            self.run_round(schedule)
            num_empty = num_empty + 1 if len(schedule) == num_before else 0
            if num_empty == MAX_EMPTY_ROUNDS:
                raise ValueError(
                    f"{num_empty} runs of {self.job.name!r} in a row ended before a fault could be injected; a job"
                    " whose stages take more steps was expected"
                )
        return time.monotonic() - begun

    def result(self, calm_seconds: float, chaos_seconds: float, unused: Mapping[str, str]) -> ChaosResult:
        """Returns the outcomes; `unused` are the kinds of faults that this machine does not allow, and why."""
        return ChaosResult(
            tuple(self.faults),
            self.rounds,
            tuple(sorted(self.differing)),
            calm_seconds,
            chaos_seconds,
            dict(unused),
            self.useful_seconds(calm_seconds),
        )

    def run_round(self, schedule: Schedule) -> None:
        """Runs the job to its end under the next faults of the schedule."""
        self.rounds += 1
        name = self._unused_name()
        folder = (self.disk.folder if self.disk else self.runs) / name
        run = Round(
            folder, lambda: self._start(folder), cluster=self.cluster, disk=self.disk, server=self.server,
            stages=self.job.stage_names,
        )  # fmt: skip
        try:
            self._inject(run, schedule)
            run.finish()
            struck = {fault.stage for fault in run.faults}
            undisturbed = [stage for stage in self.job.stage_names if stage not in struck]
            self._stage_seconds |= shortest_seconds(self._stage_seconds, folder, undisturbed)
            self._fastest |= shortest_seconds(self._fastest, folder, undisturbed)
            self.differing |= set(differing_stages(self.calm, folder, self.job.registry))
        finally:
            run.close()
            self.faults += run.faults
            if self.disk and folder.exists():
                shutil.move(folder, self.runs / name)

    def _unused_name(self) -> str:
        """Returns the name of a new run: one of an earlier campaign is finished, and would end before any fault."""
        names = (f"{self.job.name}-chaos-{number}" for number in itertools.count(self.rounds))
        return next(name for name in names if not (self.runs / name).exists())

    def _inject(self, run: Round, schedule: Schedule) -> None:
        plan = schedule.take(FAULTS_PER_RUN)
        for planned in plan:
            if not run.reach(planned, self._stage_seconds[planned.stage]):
                # The machine is faster now than in every run so far, so the moment must come earlier in the next run.
                self._stage_seconds[planned.stage] *= EARLIER
                break
            fault = run.inject(planned)
            noticed = f", noticed after {fault.noticed_seconds:.1f} s" if fault.noticed_seconds >= 0 else ""
            message = f": {fault.message}" if fault.message else ""
            number = len(self.faults) + len(run.faults)
            console.print(
                f"fault {number}: {fault.what} in {fault.stage}{noticed}, {fault.outcome}{message}", markup=False
            )
        schedule.give_back(plan[len(run.faults) :])

    def _start(self, folder: Path) -> Driver:
        """Starts a driver once all nodes have joined, as an operator would."""
        wait_for_nodes(self.cluster)
        changed = [part for override in [*self._overrides, f"name={folder.name}"] for part in ("--set", override)]
        job = [str(self._job_file)] if self._job_file else []
        command = [sys.executable, "-c", "from heed.cli import main; main()", "run", *job, *changed]
        return Driver(
            self.cluster.driver_command([*command, "--runs", str(folder.parent)]),
            self.cluster.environment,
            self.runs / f"{folder.name}.log",
        )


def shortest_seconds(known: Mapping[str, float], run: Path, stages: Sequence[str]) -> dict[str, float]:
    """Returns the shortest time that each stage has taken, over `known` and a run that has ended.

    The undisturbed run alone would mislead. On a new machine it compiles kernels and takes several times as long as
    later runs, which would then end before a moment that is due late in a stage.
    """
    seconds = {
        stage: float(json.loads((run / stage / LINEAGE).read_text(encoding="utf-8"))["seconds"]) for stage in stages
    }
    return {stage: min(taken, known.get(stage, taken)) for stage, taken in seconds.items()}


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def _ends_when_terminated() -> Iterator[None]:
    """Treats SIGTERM like Ctrl-C, so that namespaces, mounts and processes are removed on it too."""
    before = signal.getsignal(signal.SIGTERM)
    end_by_sigterm()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
