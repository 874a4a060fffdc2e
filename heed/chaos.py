"""`heed chaos`: a job under random kills, compared with the same job left alone.

Both run on a cluster of several nodes on this machine. Workers, whole nodes and the driver are killed without grace at
random moments; a killed node is replaced and a killed driver started again, as an operator would.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.local import LocalCluster, kill_process
from heed.job import STAGES
from heed.job_file import load_job
from heed.lineage import LINEAGE, outputs_hash
from heed.progress import console
from heed.recovery import milestones

KINDS = ("worker", "node", "driver")
KILLS_A_RUN = 6  # more than so many hit the first stages alone, since the run must get going again after each
NOTICE_SECONDS = 10.0  # how long a kill's notice is waited for


@dataclass(frozen=True)
class Kill:
    """One kill: what was hit, in which stage, and after how many seconds the driver said that a worker was lost.

    None: it was the driver, or no worker that had work to do; that one is missed when it is next needed.
    """

    kind: str
    stage: str
    noticed_seconds: float | None


@dataclass(frozen=True)
class ChaosResult:
    """What became of a job under kills. `differing` are the stages whose outputs differ from the undisturbed run's."""

    kills: tuple[Kill, ...]
    rounds: int
    differing: tuple[str, ...]
    calm_seconds: float
    chaos_seconds: float


class Schedule:
    """What is hit, and when: every kind once in three kills, at moments drawn around `pause_seconds`."""

    def __init__(self, num_kills: int, seed: int, pause_seconds: float) -> None:
        self.num_kills, self.pause_seconds = num_kills, pause_seconds
        self.chance, self.kills = random.Random(seed), list[Kill]()
        self._deck: list[str] = []

    @property
    def is_over(self) -> bool:
        return len(self.kills) >= self.num_kills

    def next_pause(self) -> float:
        return self.chance.uniform(0.0, 2.0) * self.pause_seconds

    def next_kind(self) -> str:
        if not self._deck:
            self._deck = self.chance.sample(KINDS, len(KINDS))
        return self._deck.pop()


class Driver:
    """`heed run` as a process of its own, in a group of its own."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("a") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from heed.cli import main; main()", *command],
                env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run_chaos(
    job_file: Path | None, overrides: Sequence[str], runs: Path, *, num_kills: int, seed: int, num_nodes: int
) -> ChaosResult:
    """Run the job undisturbed, then again and again under kills until there were so many; compare every time.

    Errors: ValueError for a job that cannot run here; RuntimeError where a run fails.
    """
    job = load_job(job_file, overrides)
    cpus = -(-job.num_ranks // num_nodes)
    runs.mkdir(parents=True, exist_ok=True)

    def start(name: str, environment: dict[str, str]) -> Driver:
        changed = [part for override in [*overrides, f"name={name}"] for part in ("--set", override)]
        return Driver(
            ["run", *([str(job_file)] if job_file else []), *changed, "--runs", str(runs)],
            environment,
            runs / f"{name}.log",
        )

    with LocalCluster(num_nodes, cpus) as cluster:
        begun = time.monotonic()
        calm = start(f"{job.name}-calm", cluster.environment)
        _finish(calm)
        calm_seconds = time.monotonic() - begun
        schedule = Schedule(num_kills, seed, calm_seconds / min(1 + num_kills, KILLS_A_RUN))
        begun, rounds, differing = time.monotonic(), 0, set[str]()
        while not schedule.is_over:
            rounds += 1
            name = f"{job.name}-chaos-{rounds}"
            restart = lambda name=name: start(name, cluster.environment)  # noqa: E731
            _disturb(cluster, restart, runs / name, schedule)
            differing |= set(differing_stages(runs / f"{job.name}-calm", runs / name))
        chaos_seconds = time.monotonic() - begun
    result = ChaosResult(tuple(schedule.kills), rounds, tuple(sorted(differing)), calm_seconds, chaos_seconds)
    (runs / f"{job.name}-chaos.json").write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    return result


def summary(result: ChaosResult) -> str:
    """In a few lines: what was killed, how soon it was noticed, whether anything differs."""
    counts = ", ".join(f"{sum(kill.kind == kind for kill in result.kills)} {kind}" for kind in KINDS)
    noticed = sorted(kill.noticed_seconds for kill in result.kills if kill.noticed_seconds is not None)
    times = f"noticed after {noticed[len(noticed) // 2]:.1f} s (median), {noticed[-1]:.1f} s at most" if noticed else ""
    same = "every stage left the same bits" if not result.differing else f"differing: {', '.join(result.differing)}"
    return "\n".join(
        [
            f"{len(result.kills)} kills in {result.rounds} runs: {counts}",
            *([f"{len(noticed)} losses {times}"] if noticed else []),
            f"{result.calm_seconds:.0f} s undisturbed, {result.chaos_seconds / result.rounds:.0f} s a run under kills",
            same,
        ]
    )


def _disturb(cluster: LocalCluster, start: Callable[[], Driver], folder: Path, schedule: Schedule) -> None:
    """One run to its end, hit as long as the schedule says so, and never before it got going again."""
    driver, before = start(), pulse(folder)
    while driver.is_running and not schedule.is_over:
        _wait(driver, schedule.next_pause())
        workers = cluster.worker_processes()
        if not driver.is_running or not workers or pulse(folder) == before:
            continue
        kind, stage, losses, noticed = schedule.next_kind(), stage_of(folder), driver.said.count("was lost"), None
        if kind == "driver":
            driver.kill()
            driver = start()
        elif kind == "worker":
            kill_process(schedule.chance.choice(workers))
            noticed = _notice(driver, losses)
        else:
            cluster.kill_node_of(schedule.chance.choice(workers))
            noticed = _notice(driver, losses)
            cluster.fill()
        schedule.kills.append(Kill(kind, stage, noticed))
        before = pulse(folder)
        after = "" if noticed is None else f", noticed after {noticed:.1f} s"
        console.print(f"kill {len(schedule.kills)} of {schedule.num_kills}: {kind} in {stage}{after}")
    _finish(driver)


def _wait(driver: Driver, seconds: float) -> None:
    end = time.monotonic() + seconds
    while driver.is_running and time.monotonic() < end:
        time.sleep(0.05)


def _notice(driver: Driver, losses: int) -> float | None:
    """Seconds until the driver says that it lost a worker; None where it does not in time, or is done."""
    struck = time.monotonic()
    while time.monotonic() - struck < NOTICE_SECONDS:
        if driver.said.count("was lost") > losses:
            return time.monotonic() - struck
        if not driver.is_running:
            return None
        time.sleep(0.05)
    return None


def _finish(driver: Driver) -> None:
    if driver.process.wait() != 0:
        raise RuntimeError(f"{driver.log}: the run ended with {driver.process.returncode}:\n{driver.said[-2000:]}")


def stage_of(folder: Path) -> str:
    """The stage that is at work in a run folder: begun, and not finished."""
    begun = [stage for stage in STAGES if (folder / stage / "inputs.json").exists()]
    return next((stage for stage in begun if not (folder / stage / LINEAGE).exists()), "start")


def pulse(folder: Path) -> list[tuple[str, int]]:
    """Something that changes with every step of a run: the sizes of its logs, and what it has saved."""
    logs = [(str(path), path.stat().st_size) for path in folder.glob("*/metrics.jsonl")]
    return sorted(logs) + [(stage, len(milestones(folder / stage))) for stage in STAGES]


def differing_stages(calm: Path, chaos: Path) -> list[str]:
    """The stages whose outputs differ between two run folders."""
    stages = [stage for stage in STAGES if (calm / stage).exists()]
    return [stage for stage in stages if outputs_hash(calm / stage, stage) != outputs_hash(chaos / stage, stage)]
