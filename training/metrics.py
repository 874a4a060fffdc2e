"""One object a step in metrics.jsonl, mirrored to TensorBoard and the trackers that Accelerate knows."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS


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
        self._trackers = []
        for name in trackers:
            tracker = _make_tracker(name, folder)
            tracker.start()
            self._trackers.append(tracker)
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


def _make_tracker(name: str, folder: Path) -> Any:
    """A tracker by Accelerate's name; the file-based one keeps its events beside metrics.jsonl."""
    tracker_class = LOGGER_TYPE_TO_CLASS[name]
    stage, job = folder.name, folder.parent.name
    if tracker_class.requires_logging_directory:
        return tracker_class("tensorboard", logging_dir=folder)
    return tracker_class(f"{job}-{stage}")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics.jsonl; a last line cut off by a kill is left out."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
