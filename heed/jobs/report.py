"""Writes status.json while a job runs, then report.json and report.html; for `heed watch`, a page that shows both."""

import json
import os
import socket
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from files.atomic import write_json
from files.records import as_json, record_of
from heed.jobs.registry import BUILT_IN, registry_with, with_rounds
from heed.loop.config import LoopConfig
from stages.contract import StageWaitsError
from stages.progress import STATUS, WRITE_EVERY_SECONDS, Restart, RunStatus, StageProgress, console
from stages.reports.stage_report import plain_reporter
from training.notices import in_one_line, waits_for

HANG_SECONDS = 60.0  # a write that takes longer is reported

if TYPE_CHECKING:
    from stages.reports.page import Live
    from stages.reports.parts import StageReporter


def write_run_report(folder: Path) -> dict[str, Any]:
    """Write report.json and report.html into `runs/JOB`. Returns what report.json holds.

    Raises:
        ValueError: a file in the run directory is absent or malformed.
    """
    from stages.reports.report import write_report

    return write_report(folder, _reporters(folder))


def renew_status(folder: Path) -> None:
    """Note in status.json that this process is still there while the run waits: its last stage ended by waiting."""
    with suppress(OSError, ValueError):  # as when a job writes its status
        status = record_of(json.loads((folder / STATUS).read_text(encoding="utf-8")), RunStatus, STATUS)
        write_json(folder / STATUS, as_json(replace(status, updated=time.time())))


def live_run_page(folder: Path, live: "Live") -> str:
    """Returns the report as HTML, with what the run is doing now. Raises: as `write_run_report` does."""
    from stages.reports.report import live_report

    return live_report(folder, _reporters(folder), live)


def _reporters(folder: Path) -> "dict[str, StageReporter]":
    """Returns the reporters of a run's stages. If the code of a custom stage is gone, the report just shows the numbers
    of the stage's results.
    """
    try:
        values = tomllib.loads((folder / "job.toml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return BUILT_IN.reporters  # the report itself says what is wrong with the job
    try:
        loop = LoopConfig.model_validate(values["loop"]) if "loop" in values else None
        registry = registry_with(values.get("custom_stages", ()))
        return with_rounds(registry, values.get("rounds", 1), values, loop).reporters
    except ValueError:
        begun = [path.parent.name for path in sorted(folder.glob("*/inputs.json"))]
        return BUILT_IN.reporters | {name: plain_reporter(name) for name in begun if name not in BUILT_IN}


def _last_device(folder: Path) -> str:
    """Returns on what a run's ranks worked last; "" if that is not known."""
    try:
        return str(json.loads((folder / STATUS).read_text(encoding="utf-8"))["device"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


class StatusFile:
    """Keeps the status of a job and writes it every few seconds; use it as a context manager around the job.

    Nothing in the job depends on the file.
    """

    def __init__(self, folder: Path, num_ranks: Callable[[], Mapping[str, int]]) -> None:
        now = time.time()
        self._path, self._num_ranks = folder / STATUS, num_ranks
        self._status = RunStatus("running", socket.gethostname(), os.getpid(), now, now, device=_last_device(folder))
        self._progress: StageProgress | None = None
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._writing_since = 0.0  # monotonic; 0 = nothing is being written
        self._threads = [
            threading.Thread(target=run, name="status", daemon=True) for run in (self._write_often, self._say_hangs)
        ]

    def __enter__(self) -> Self:
        self._write()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if error is None:
            self._change(state="finished", stage="", phase="")
        elif isinstance(error, StageWaitsError):
            self._change(state="waiting", message=str(error))
        elif isinstance(error, KeyboardInterrupt):
            self.stopped()
        else:
            self.failed(in_one_line(error) or str(error).split("\n")[0])

    @contextmanager
    def stage(self, progress: StageProgress) -> Iterator[None]:
        """Shows the stage's name and progress while the block runs."""
        self._progress = progress
        self._change(stage=progress.stage, stage_started=time.time(), phase="", done=0, total=0)
        yield
        self._progress = None

    def works_on(self, device: str, *, is_meant: bool) -> None:
        """Notes on what the ranks work. Raises: ValueError if the run was on GPUs, there are none now, and nobody has
        asked for CPUs.
        """
        if (self._status.device, device) == ("GPU", "CPU") and not is_meant:
            raise ValueError(
                f"{self._path.parent}: this run was on GPUs, and there are none now; start their machines again, or set"
                " cluster.use_gpus = false to go on without"
            )
        self._change(device=device)

    def stopped(self) -> None:
        """Notes that somebody has ended the run."""
        self._change(state="stopped")

    def failed(self, why: str) -> None:
        """Notes why the run has failed."""
        self._change(state="failed", message=why)

    def restarted(self, why: str) -> None:
        """Notes that the stage continues after a loss, and why."""
        restart = Restart(time.time(), self._status.stage, why)
        self._change(restarts=(*self._status.restarts, restart))

    def _change(self, **values: object) -> None:
        with self._lock:
            self._status = replace(self._status, **values)  # type: ignore[arg-type]
        self._write()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        self._writing_since = time.monotonic()
        try:
            yield
        finally:
            self._writing_since = 0.0

    def _write_often(self) -> None:
        while not self._stop.wait(WRITE_EVERY_SECONDS):
            self._write()

    def _say_hangs(self) -> None:
        """Report a write that does not return, as happens on a network file system whose server is away. The main
        thread also hangs there, at its next file, and cannot report it.
        """
        said = 0.0
        while not self._stop.wait(HANG_SECONDS / 10):
            since = self._writing_since
            if since and since != said and time.monotonic() - since > HANG_SECONDS:
                said = since
                console.print(
                    f"{self._path.parent}: a write has not returned for {HANG_SECONDS:.0f} s; the run waits for its"
                    " storage",
                    markup=False,
                )

    def _write(self) -> None:
        with self._lock, self._timed(), suppress(OSError):  # if the folder is full or missing, the job itself says so
            now = replace(self._status, updated=time.time(), workers=self._num_ranks())
            if now.state == "running":
                now = replace(now, message=waits_for())
            progress = self._progress
            if progress is not None:
                now = replace(now, phase=progress.phase, done=progress.done, total=progress.total)
            write_json(self._path, as_json(now))
