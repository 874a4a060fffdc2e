"""One object per step in metrics.jsonl, mirrored to TensorBoard and the trackers that Accelerate knows."""

import importlib.util
import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from files.atomic import write_text
from training.notices import cause_of, say

TENSORBOARD_FLUSH_SECONDS = 10  # a kill costs TensorBoard at most this much; metrics.jsonl has every step


class StepLines:
    """An append-only JSONL file; each line has the `step` it belongs to. On resume, lines past the resumed step are
    removed and written again.

    A write that fails, for example on a full disk, does not stop training: lines wait in memory until one succeeds.
    The run's folder must exist: if it has disappeared, it must not be created again.
    """

    def __init__(self, path: Path, *, resume_step: int) -> None:
        self.path = path
        kept = [line for line in read_metrics(path) if line["step"] <= resume_step]
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("ab", buffering=0)
        self._whole_bytes = path.stat().st_size  # anything after them is part of a line whose write failed
        self._waiting: list[tuple[int, bytes]] = []  # step and line

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line, after those that are still waiting."""
        self._waiting.append((line["step"], f"{json.dumps(line)}\n".encode()))
        try:
            self._write_waiting()
        except OSError as error:
            if len(self._waiting) == 1:
                say(f"{self.path}: {cause_of(error)}. The run continues and writes the missing lines as soon as it can")

    def _write_waiting(self) -> None:
        """Write all waiting lines in order, and remove what a failed write left of one."""
        while self._waiting:
            line = self._waiting[0][1]
            try:
                written = self._file.write(line)
                if written != len(line):
                    self._file.write(line[written:])  # writes the rest, or raises the reason why it cannot
            except OSError:
                os.ftruncate(self._file.fileno(), self._whole_bytes)
                raise
            self._whole_bytes += len(line)
            del self._waiting[0]

    def close(self) -> None:
        """Write what is still waiting; lines that cannot be written are reported as lost."""
        try:
            self._write_waiting()
        except OSError as error:
            steps = [step for step, _ in self._waiting]
            say(f"{self.path}: {cause_of(error)}; the lines of steps {steps[0]} to {steps[-1]} are lost")
        self._file.close()


class MetricsLog:
    """The metrics of a stage, in metrics.jsonl (`StepLines`) and in the trackers."""

    def __init__(self, folder: Path, trackers: Sequence[str], *, resume_step: int) -> None:
        folder.mkdir(exist_ok=True)
        PartialState()  # trackers ask it whether this process is rank 0
        self.path = folder / "metrics.jsonl"
        self._lines = StepLines(self.path, resume_step=resume_step)
        self._trackers: dict[str, Any] = dict.fromkeys(trackers)  # each starts with the first step
        self._failing = set[str]()
        self._folder = folder
        self._started = time.monotonic()

    def log(self, step: int, num_steps: int, values: Mapping[str, float]) -> None:
        """Write the metrics of a finished step (1 .. num_steps); those that are not finite are left out."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._lines.write({"step": step, "num_steps": num_steps, **finite, "seconds": time.monotonic() - self._started})
        for name in self._trackers:
            self._track(name, step, finite)

    def _track(self, name: str, step: int, values: Mapping[str, float]) -> None:
        """Pass metrics on. A tracker that fails is restarted at the next step, and the user is notified."""
        try:
            if self._trackers[name] is None:
                self._trackers[name] = _make_tracker(name, self._folder)
            self._trackers[name].log(dict(values), step=step)
            if name in self._failing:
                say(f"{name}: logs again from step {step}; metrics.jsonl has all metrics")
                self._failing.remove(name)
        except Exception as error:  # each tracker has its own kinds of errors
            if name not in self._failing:
                say(f"{name}: {cause_of(error)}; it may miss metrics around step {step}. The run continues")
                self._failing.add(name)
            self._trackers[name] = None

    def close(self) -> None:
        self._lines.close()
        for name, tracker in self._trackers.items():
            try:
                if tracker is not None:
                    tracker.finish()
            except Exception as error:
                say(f"{name}: {cause_of(error)}; its last metrics are lost; metrics.jsonl has them all")


class TensorBoard:
    """Writes one event per step with all its metrics.

    Accelerate's tracker writes one event per metric and flushes after every step, which cost a tenth of a small model's
    step. TensorBoard's own writer has a thread, whose failures cannot be handled.
    """

    def __init__(self, folder: Path) -> None:
        # Imported only if a config names it, so it need not be installed.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(exist_ok=True)  # not its parents, which may have disappeared
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._records = RecordWriter(self._file)
        self._next_flush = 0.0
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._add(Event(wall_time=time.time(), step=step, summary=summary))

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        if time.monotonic() > self._next_flush:
            self._file.flush()
            self._next_flush = time.monotonic() + TENSORBOARD_FLUSH_SECONDS

    def finish(self) -> None:
        self._file.close()


def refuse_missing_trackers(trackers: Sequence[str]) -> None:
    """Raises: ValueError for a tracker whose library is not installed here."""
    for name in trackers:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"engine.trackers: {name!r} is not installed; run `pip install {name}`, or leave it out")


def _make_tracker(name: str, folder: Path) -> Any:
    """TensorBoard, with its events next to metrics.jsonl, or a tracker by Accelerate's name."""
    if name == "tensorboard":
        return TensorBoard(folder / "tensorboard")
    tracker = LOGGER_TYPE_TO_CLASS[name](f"{folder.parent.name}-{folder.name}")
    tracker.start()
    return tracker


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a metrics.jsonl; a last line cut off by a kill is ignored."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
