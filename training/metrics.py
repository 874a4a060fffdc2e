"""One object a step in metrics.jsonl, mirrored to TensorBoard and the trackers that Accelerate knows."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

TENSORBOARD_FLUSH_SECONDS = 10  # a kill costs TensorBoard so much of the curves; metrics.jsonl has every step


class MetricsLog:
    """Append-only; on resume, what lies at or past the resumed step is cut off and written anew."""

    def __init__(self, folder: Path, trackers: Sequence[str], *, resume_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        PartialState()  # the trackers ask it whether this process is the main one
        self.path = folder / "metrics.jsonl"
        kept = [line for line in read_metrics(self.path) if line["step"] <= resume_step]
        aside = self.path.with_suffix(".writing")
        aside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        aside.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        self._trackers = [_make_tracker(name, folder) for name in trackers]
        self._started = time.monotonic()

    def log(self, step: int, num_steps: int, values: Mapping[str, float]) -> None:
        """Write the figures of a finished step (1 .. num_steps)."""
        line = {"step": step, "num_steps": num_steps, **values, "seconds": time.monotonic() - self._started}
        self._write(line)
        for tracker in self._trackers:
            tracker.log(dict(values), step=step)

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
        for tracker in self._trackers:
            tracker.finish()


class TensorBoard:
    """Events in `folder`, all figures of a step in one: Accelerate's tracker makes an event of each figure and waits
    after every step until they lie in the file, which took a tenth as long as a small model's step.
    """

    def __init__(self, folder: Path) -> None:
        # Asked for by name only, so it need not be installed.
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder), flush_secs=TENSORBOARD_FLUSH_SECONDS)

    def log(self, values: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def finish(self) -> None:
        self._writer.close()


def _make_tracker(name: str, folder: Path) -> Any:
    """TensorBoard, which keeps its events beside metrics.jsonl, or a tracker by Accelerate's name."""
    if name == "tensorboard":
        return TensorBoard(folder / "tensorboard")
    tracker = LOGGER_TYPE_TO_CLASS[name](f"{folder.parent.name}-{folder.name}")
    tracker.start()
    return tracker


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics.jsonl; a last line cut off by a kill is left out."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
