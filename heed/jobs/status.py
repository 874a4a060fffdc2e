"""Writes RUN/status.json while a job runs, for `heed watch`. Nothing in the job depends on it."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from files.atomic import write_json
from files.records import as_json
from stages.contract import StageWaitsError
from stages.progress import STATUS, WRITE_EVERY_SECONDS, Restart, RunStatus, StageProgress
from training.notices import in_one_line


class StatusFile:
    """Keeps the status of a job and writes it every few seconds; use it as a context manager around the job."""

    def __init__(self, folder: Path, num_ranks: Callable[[], Mapping[str, int]]) -> None:
        now = time.time()
        self._path, self._num_ranks = folder / STATUS, num_ranks
        self._status = RunStatus("running", socket.gethostname(), os.getpid(), now, now)
        self._progress: StageProgress | None = None
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)

    def __enter__(self) -> Self:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._stop.set()
        self._thread.join()
        if error is None:
            self._change(state="finished", stage="", phase="")
        elif isinstance(error, StageWaitsError):
            self._change(state="waiting", message=str(error))
        elif isinstance(error, KeyboardInterrupt):
            self.stopped()
        else:
            self._change(state="failed", message=in_one_line(error) or str(error).split("\n")[0])

    @contextmanager
    def stage(self, progress: StageProgress) -> Iterator[None]:
        """While a stage runs: its name, and what it counts."""
        self._progress = progress
        self._change(stage=progress.stage, stage_started=time.time(), phase="", done=0, total=0)
        yield
        self._progress = None

    def stopped(self) -> None:
        """Somebody has ended the run."""
        self._change(state="stopped")

    def restarted(self, why: str) -> None:
        """The stage continues after a loss."""
        found = Restart(time.time(), self._status.stage, why)
        self._change(restarts=(*self._status.restarts, found))

    def _change(self, **values: object) -> None:
        with self._lock:
            self._status = replace(self._status, **values)  # type: ignore[arg-type]
        self._write()

    def _run(self) -> None:
        while not self._stop.wait(WRITE_EVERY_SECONDS):
            self._write()

    def _write(self) -> None:
        with self._lock, suppress(OSError):  # a full or missing folder is the job's own trouble, which it reports
            now = replace(self._status, updated=time.time(), workers=self._num_ranks())
            progress = self._progress
            if progress is not None:
                now = replace(now, phase=progress.phase, done=progress.done, total=progress.total)
            write_json(self._path, as_json(now))
