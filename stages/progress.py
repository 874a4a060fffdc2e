"""A stage's progress: a bar with elapsed and remaining time on a terminal, otherwise a line every 30 seconds.

Stages that train write metrics.jsonl, and the bar follows that file, so workers need not report to the driver.
RUN/status.json has the state of a running job: its stage and phase, its workers, and their restarts.
"""

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from training.notices import waits_for

console = Console(stderr=True, highlight=False, soft_wrap=True)  # each message stays on one line at any width

POLL_SECONDS = 0.5
LINE_EVERY_SECONDS = 30.0
LAST_NOTICES_SECONDS = 2.0  # Ray answers at once, or not at all if its head has ended
PIPE_COLUMNS = 1_000  # wide enough that no table in a file or a pipe is cut
STATUS = "status.json"
WRITE_EVERY_SECONDS = 5.0  # of status.json; it is also written when something changes

State = Literal["running", "finished", "waiting", "stopped", "failed"]


def results_console() -> Console:
    """The console for results, on standard output. Messages go to `console`, on standard error."""
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    return Console(highlight=False, markup=False, width=width)


class StageProgress:
    """Counts units of work done. `update` may be called from any thread."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.phase, self.done, self.total = "", 0, 0
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last_line, self._done_at_line = time.monotonic(), 0
        if console.is_terminal:
            self._bar = Progress(
                TextColumn(f"[bold]{stage:<9}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[metrics]}"),
                TextColumn("elapsed"),
                TimeElapsedColumn(),
                TextColumn("remaining"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self._bar.start()

    def update(self, done: int, total: int, metrics: str = "") -> None:
        """Report that `done` of `total` units are done, with the newest metrics as text.

        Without a terminal, no line repeats the last one: while nothing is computed, repeats would look like work.
        """
        self.done, self.total = done, total
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(self.stage, total=total, metrics="")
            self._bar.update(self._task, completed=done, total=total, metrics="waiting" if waits_for() else metrics)
        elif done != self._done_at_line and time.monotonic() - self._last_line > LINE_EVERY_SECONDS:
            self._last_line, self._done_at_line = time.monotonic(), done
            console.print(f"{self.stage}: {done}/{total} {metrics}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def follow(stage: str, folder: Path) -> Iterator[StageProgress]:
    """Show a stage's progress from its metrics.jsonl, if it writes one, and print the notices of its workers.

    The last line of an interrupted run is not shown, since the stage resumes from an earlier checkpoint.
    """
    from cluster.messages import receive_notices  # imports Ray and torch, which commands that only print do not need
    from training.metrics import read_metrics

    progress = StageProgress(stage)
    stop, left_over = threading.Event(), read_metrics(folder / "metrics.jsonl")[-1:]

    def pass_on() -> None:
        for notice in receive_notices():
            print_notice(notice)

    def poll() -> None:
        is_over = False
        while not is_over:
            is_over = stop.wait(POLL_SECONDS)
            pass_on()
            lines = read_metrics(folder / "metrics.jsonl")
            if lines and lines[-1:] != left_over:
                progress.update(lines[-1]["step"], lines[-1]["num_steps"], in_words(lines[-1]))

    thread = threading.Thread(target=poll, name=f"progress of {stage}", daemon=True)
    thread.start()
    try:
        yield progress
    finally:
        stop.set()
        thread.join(LAST_NOTICES_SECONDS)
        progress.close()


def print_notice(notice: str) -> None:
    """Print a line of `training.notices` on the console."""
    console.print(escape(notice))


def in_words(line: dict[str, Any]) -> str:
    """Returns a line of metrics as the console shows it."""
    shown = [f"{name} {line[name]:.3g}" for name in ("loss", "score") if name in line]
    kls = {name: line[name] for name in ("kl_nats", "teacher_kl_nats") if name in line}
    shown += [f"{name} {'about 0' if kl < 0 else f'{kl:.3g}'}" for name, kl in kls.items()]
    shown += [f"{name} {value:g}" for name, value in line.items() if name.startswith("failures/") and value]
    return "  ".join([*shown, f"{line['tokens_per_second']:,.0f} tokens/s"])


@dataclass(frozen=True)
class Restart:
    """The stage continued after it had lost workers or storage. `at` is in seconds since the epoch."""

    at: float
    stage: str
    why: str


@dataclass(frozen=True)
class RunStatus:
    """State of a run. Times are in seconds since the epoch. `done` of `total` is 0 of 0 if the stage counts nothing.

    `workers` is the number of ranks by group, each on a `device`: "GPU" or "CPU". `message` says why a job failed, or
    what it is waiting for. A running job may wait for lost machines, for places that another job holds, for its
    storage, or for a host to compile kernels.
    """

    state: State
    host: str
    pid: int
    started: float
    updated: float
    stage: str = ""
    stage_started: float = 0.0
    phase: str = ""
    done: int = 0
    total: int = 0
    workers: Mapping[str, int] | None = None
    device: str = ""
    restarts: tuple[Restart, ...] = ()
    message: str = ""
