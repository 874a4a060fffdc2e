"""Reads a run directory for the report: every stage's results, metrics, samples and lineage, and the job.

Text in these files comes from models and data. Templates escape all markup; this module replaces characters that no
page or JSON file can hold, and turns numbers that are not finite into None.
"""

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from files.records import record_of
from stages.reports.text import clean_json, clean_text

AnyResults = TypeVar("AnyResults")


@dataclass(frozen=True)
class StageFolder:
    """What one stage left. If `raw_results` is empty, it has not finished; without metrics either, it has not begun."""

    name: str
    path: Path
    raw_results: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    lineage: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]] = ()  # of samples.jsonl: responses kept for reading
    job: Mapping[str, Any] = field(default_factory=dict)  # of the run, as resolved

    def results(self, kind: type[AnyResults]) -> AnyResults | None:
        """Return the stage's results.json as a dataclass; None until the stage is finished.

        Raises:
            ValueError: a field is missing or of another type; the message names it.
        """
        if not self.raw_results:
            return None
        return record_of(self.raw_results, kind, str(self.path / "results.json"))

    def samples_as(self, kind: type[AnyResults]) -> list[AnyResults]:
        """Return the lines of samples.jsonl as dataclasses. Raises: as `results`."""
        where = self.path / "samples.jsonl"
        return [record_of(line, kind, f"{where}:{place}") for place, line in enumerate(self.samples, 1)]

    @property
    def status(self) -> str:
        """One of finished, unfinished and not run."""
        if self.raw_results:
            return "finished"
        return "unfinished" if self.metrics else "not run"

    @property
    def trained(self) -> str:
        """What the stage trained, if not all weights: its adapters, as described in their file."""
        path = self.path / "adapter" / "adapter_config.json"
        if not path.is_file():
            return ""
        settings = json.loads(path.read_text(encoding="utf-8"))
        return f"adapters of rank {settings['r']}, alpha {settings['lora_alpha']:g}"

    @property
    def seconds(self) -> float | None:
        """Wall-clock time of the finished stage, from its lineage."""
        seconds = self.lineage.get("seconds")
        return float(seconds) if isinstance(seconds, int | float) else None


@dataclass(frozen=True)
class Run:
    """A whole run directory, stages in the order of the loop. `files` maps every file that was read to its SHA-256."""

    job: dict[str, Any]
    job_text: str
    stages: dict[str, StageFolder]
    files: dict[str, str]

    @property
    def name(self) -> str:
        return str(self.job["name"])

    @property
    def shown(self) -> list[StageFolder]:
        """The stages of the job, and any others that left something in this folder."""
        return [stage for stage in self.stages.values() if stage.name in self.job or stage.status != "not run"]


def read_run(run_folder: Path, stage_names: Iterable[str]) -> Run:
    """Read `runs/JOB`.

    Raises:
        ValueError: a file is absent or malformed; the message names it, and the line.
    """
    job_path = run_folder / "job.toml"
    if not job_path.is_file():
        raise ValueError(f"{job_path}: no such file; a run directory with the job in job.toml was expected")
    files: dict[str, str] = {}
    job_text = _read_text(job_path, run_folder, files)
    try:
        job = clean_json(tomllib.loads(job_text))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{job_path}: not TOML: {error}") from None
    job.setdefault("name", run_folder.resolve().name)
    stages = {name: _read_stage(name, run_folder, job, files) for name in stage_names}
    return Run(job, clean_text(job_text), stages, files)


def _read_stage(name: str, run_folder: Path, job: Mapping[str, Any], files: dict[str, str]) -> StageFolder:
    folder = run_folder / name
    objects = {}
    for part in ("results", "lineage"):
        path = folder / f"{part}.json"
        objects[part] = parse_object(_read_text(path, run_folder, files), str(path)) if path.is_file() else {}
    metrics, samples = (_read_lines(folder / f"{part}.jsonl", run_folder, files) for part in ("metrics", "samples"))
    return StageFolder(name, folder, objects["results"], metrics, objects["lineage"], samples, job)


def _read_lines(path: Path, run_folder: Path, files: dict[str, str]) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    text = _read_text(path, run_folder, files)
    # A line without its end was cut off by a kill, or is being written now.
    lines = text[: text.rfind("\n") + 1].split("\n")
    return [parse_object(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def _read_text(path: Path, run_folder: Path, files: dict[str, str]) -> str:
    content = path.read_bytes()
    files[path.relative_to(run_folder).as_posix()] = hashlib.sha256(content).hexdigest()
    return content.decode("utf-8", errors="replace")


def parse_object(text: str, where: str) -> dict[str, Any]:
    """Parse a JSON object and clean it for a page.

    Raises:
        ValueError: the text is not a JSON object; the message begins with `where`.
    """
    try:
        value = clean_json(json.loads(text))
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a JSON object was expected, not {type(value).__name__}")
    return value
