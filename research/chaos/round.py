"""One run under faults: wait for the moment, inject, repair, and check that the run makes progress again.

The run is `heed run` as a separate process, which the campaign kills and restarts as an operator would.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from research.chaos.faults import Fault, Planned, Server, SmallDisk, make_fault
from research.chaos.local_cluster import LocalCluster
from research.chaos.result import (
    FAILED,
    LOSS,
    RECOVERED,
    REPLACED,
    REPLACEMENT,
    RESTARTED,
    TOLERATED,
    Injected,
    pulse,
    stage_of,
    worse,
)
from stages.lineage import LINEAGE

POLL_SECONDS = 0.05
STUCK_SECONDS = 240.0  # after this long without progress the run is given up and the fault counts as failed
MAX_ENDS = 5  # number of times in a row that a driver may end without progress


class Driver:
    """One run of a command in its own process group; its output is appended to `log`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log, self._start_of_output = log, log.stat().st_size if log.exists() else 0
        self.was_killed = False
        with log.open("a") as file:
            self.process = subprocess.Popen(
                command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def output(self) -> str:
        """The output of this process, without that of earlier ones."""
        with self.log.open("rb") as file:
            file.seek(self._start_of_output)
            return file.read().decode(errors="replace")

    @property
    def num_losses(self) -> int:
        """How often the driver has reported lost workers and continued."""
        return len(LOSS.findall(self.output))

    @property
    def num_replaced(self) -> int:
        """How often the driver has replaced a generator while all others kept their state."""
        return self.output.count(REPLACEMENT)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def has_finished(self) -> bool:
        return self.process.poll() == 0

    @property
    def was_explained(self) -> bool:
        """Whether the driver ended as documented: with one line that says what to do, without a traceback."""
        return not self.is_running and "Traceback (most recent call last)" not in self.output

    @property
    def last_line(self) -> str:
        return next((line for line in reversed(self.output.splitlines()) if line.strip()), "")

    def kill(self) -> None:
        self.was_killed = True
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Round:
    """One run under faults: its folder, its driver, and the outcomes of the faults so far."""

    def __init__(
        self,
        folder: Path,
        start: Callable[[], Driver],
        *,
        cluster: LocalCluster,
        disk: SmallDisk | None,
        server: Server | None,
        stages: Sequence[str],
    ) -> None:
        """`start` starts the run's driver, or restarts it, which continues where the last one stopped."""
        self._folder, self._start, self._cluster, self._stages = folder, start, cluster, stages
        self._disk, self._server = disk, server
        self.faults, self._driver = list[Injected](), start()
        self._before = pulse(folder)  # its value when progress was last checked
        self._num_ends = 0
        self._reached = dict[str, float]()  # when each stage in which faults are due was first seen

    def reach(self, planned: Planned, stage_seconds: float) -> bool:
        """Waits for the moment of a fault; returns False if the last stage ends before it. If the planned stage is
        already over, the fault hits the active one.
        """
        self._wait_until(self._is_moving)
        due = self._stages[self._stages.index(planned.stage) :]
        self._wait_until(
            lambda: self._is_done or (stage_of(self._folder) in due and bool(self._cluster.worker_processes()))
        )
        if stage_of(self._folder) == planned.stage:
            end = self._reached.setdefault(planned.stage, time.monotonic()) + planned.moment * stage_seconds
            self._wait_until(lambda: time.monotonic() >= end or stage_of(self._folder) != planned.stage)
        self._wait_until(lambda: self._is_done or bool(self._targets(planned.kind)))
        return not self._is_done

    def inject(self, planned: Planned) -> Injected:
        """Injects one fault and waits until the run makes progress again or has finished."""
        stage, begun, losses = stage_of(self._folder), time.monotonic(), self._driver.num_losses
        driver, replaced, noticed = self._driver, self._driver.num_replaced, -1.0

        def check_noticed() -> None:
            nonlocal noticed
            if noticed < 0 and not self._driver.was_killed and self._driver.num_losses > losses:
                noticed = time.monotonic() - begun

        what, is_unnoticed = self._endure(planned, check_noticed)
        outcome, message = self._revive()
        if is_unnoticed:
            outcome, message = FAILED, f"not noticed in {STUCK_SECONDS:.0f} s"
        self._before, moved = pulse(self._folder), time.monotonic()
        stuck = moved + STUCK_SECONDS
        while not self._is_moving() and not self._driver.has_finished:
            check_noticed()
            self._keep_up()
            if not self._driver.is_running:
                outcome, message = worse((outcome, message), self._revive())
            elif time.monotonic() > stuck:
                outcome, message = FAILED, f"no progress for {STUCK_SECONDS:.0f} s: {self._driver.last_line}"
                self._driver.kill()
                self._driver, stuck = self._start(), time.monotonic() + STUCK_SECONDS
        check_noticed()
        if outcome == TOLERATED and noticed >= 0:
            outcome = RECOVERED
        elif outcome == TOLERATED and self._driver is driver and driver.num_replaced > replaced:
            outcome = REPLACED
        now = time.monotonic()
        self.faults.append(Injected(planned.kind, what, stage, outcome, noticed, now - moved, now - begun, message))
        return self.faults[-1]

    def _endure(self, planned: Planned, check_noticed: Callable[[], None]) -> tuple[str, bool]:
        """Injects the fault, waits until it is over, and repairs it. Returns its description, and whether a fault that
        had to be noticed was not.
        """
        if planned.kind == "driver":
            self._driver.kill()
            return "the driver killed", False
        fault, end = self._make(planned), time.monotonic() + STUCK_SECONDS
        due = min(time.monotonic() + fault.seconds, end)
        try:
            fault.inject()
            while time.monotonic() < due and not fault.is_over and self._driver.is_running:
                fault.keep_up()
                check_noticed()
                self._keep_up(fault.absent)
        finally:
            fault.repair()
        return fault.what, time.monotonic() >= end

    def _make(self, planned: Planned) -> Fault:
        return make_fault(
            planned.kind, Random(planned.seed), cluster=self._cluster, workers=self._targets(planned.kind) or [0],
            disk=self._disk, server=self._server, folder=self._folder,
        )  # fmt: skip

    def _targets(self, kind: str) -> Sequence[int]:
        """Returns the processes that a fault of that kind can hit."""
        if kind not in ("worker", "generator"):
            return self._cluster.worker_processes()
        generators = self._cluster.generator_processes()
        return generators if kind == "generator" else [*{*self._cluster.worker_processes()} - {*generators}]

    def finish(self) -> None:
        """Waits until the run has ended."""
        self._wait_until(lambda: False)

    def close(self) -> None:
        """Ends the driver if it still runs, because the campaign failed or was stopped."""
        if self._driver.is_running:
            self._driver.kill()

    def _revive(self) -> tuple[str, str]:
        """Restarts a driver that ended early. Returns the fault's outcome so far, and the driver's last line.

        Raises: RuntimeError if it keeps ending.
        """
        driver = self._driver
        if driver.is_running or driver.has_finished:
            return TOLERATED, ""
        if self._is_moving():
            self._num_ends = 0
        self._num_ends += 1
        if self._num_ends > MAX_ENDS:
            raise RuntimeError(
                f"{driver.log}: the run ended {self._num_ends} times without progress: {driver.last_line}"
            )
        self._driver = self._start()
        if driver.was_killed:
            return RESTARTED, ""
        return (RESTARTED if driver.was_explained else FAILED), driver.last_line

    def _blame(self, outcome: str, message: str) -> None:
        """Attributes an early end of the driver between two faults to the last one.

        Raises: RuntimeError if there was none.
        """
        if not self.faults:
            raise RuntimeError(f"{self._driver.log}: the run ended before any fault: {message}")
        last = self.faults[-1]
        outcome, message = worse((last.outcome, last.message), (outcome, message))
        self.faults[-1] = replace(last, outcome=outcome, message=message)

    @property
    def _is_done(self) -> bool:
        """Whether all stages have finished, even if the report is still being written."""
        return self._driver.has_finished or (self._folder / self._stages[-1] / LINEAGE).exists()

    def _is_moving(self) -> bool:
        return pulse(self._folder) != self._before

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        """Waits until `holds` or the driver has finished; restarts a driver that ends early between faults."""
        end = time.monotonic() + 4 * STUCK_SECONDS
        while not holds() and not self._driver.has_finished:
            self._keep_up()
            if not self._driver.is_running and not self._driver.has_finished:
                self._blame(*self._revive())
            if time.monotonic() > end:
                raise RuntimeError(f"{self._driver.log}: the run does not end: {self._driver.last_line}")

    def _keep_up(self, absent: frozenset[str] = frozenset()) -> None:
        self._cluster.fill(absent)
        time.sleep(POLL_SECONDS)


def wait_for_nodes(cluster: LocalCluster) -> None:
    """Waits until every node has joined. Raises: RuntimeError if one does not restart."""
    end = time.monotonic() + STUCK_SECONDS
    while not cluster.is_whole:
        if time.monotonic() > end:
            raise RuntimeError("the cluster's nodes do not restart")
        cluster.fill()
        time.sleep(POLL_SECONDS)
