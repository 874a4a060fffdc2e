"""What a run directory holds, read for the report: every stage's results, metrics and lineage, and the job.

Text in these files comes from models and data. Markup is the template's business (it escapes all); here go the
characters that no page or JSON file can carry, and numbers that are not finite become None.
"""

import datetime
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Control characters but tab and line feed, surrogates, and the last two code points of every plane.
_LAST_TWO = "".join(chr(plane << 16 | last) for plane in range(17) for last in (0xFFFE, 0xFFFF))
UNSHOWN = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff{_LAST_TWO}]")

STAGES = ("pretrain", "sft", "collect", "reward", "ppo", "compare")


@dataclass(frozen=True)
class StageRun:
    """What one stage left. Empty results: it has not finished; no metrics either: it has not begun."""

    name: str
    results: dict[str, Any]
    metrics: list[dict[str, Any]]
    lineage: dict[str, Any]

    @property
    def status(self) -> str:
        """finished, unfinished or not run."""
        if self.results:
            return "finished"
        return "unfinished" if self.metrics else "not run"

    @property
    def seconds(self) -> float | None:
        """Wall-clock time of the finished stage, from its lineage."""
        seconds = self.lineage.get("seconds")
        return float(seconds) if isinstance(seconds, int | float) else None


@dataclass(frozen=True)
class Run:
    """A whole run directory. `files` maps every file that was read to its SHA-256."""

    job: dict[str, Any]
    job_text: str
    stages: dict[str, StageRun]
    files: dict[str, str]

    @property
    def name(self) -> str:
        return str(self.job["name"])

    @property
    def stage_names(self) -> tuple[str, ...]:
        """The stages that the job has, and any that left something here before."""
        return tuple(name for name in STAGES if name in self.job or self.stages[name].status != "not run")

    def get(self, stage: str, field: str) -> Any:
        """A field of a stage's results by its dotted path, None where it is absent."""
        return dig(self.stages[stage].results, *field.split("."))


def dig(value: Any, *keys: str) -> Any:
    """The value under nested keys, None where one is absent."""
    for key in keys:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def read_run(run_folder: Path) -> Run:
    """Read `runs/<job>`. Errors: ValueError naming the file (and line) that is absent or malformed."""
    job_path = run_folder / "job.toml"
    if not job_path.is_file():
        raise ValueError(f"{job_path}: no such file; a run directory with the job in job.toml was expected")
    files: dict[str, str] = {}
    job_text = _read_text(job_path, run_folder, files)
    try:
        job = plain(tomllib.loads(job_text))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{job_path}: not TOML: {error}") from None
    job.setdefault("name", run_folder.resolve().name)
    stages = {name: _read_stage(name, run_folder, files) for name in STAGES}
    return Run(job, clean_text(job_text), stages, files)


def _read_stage(name: str, run_folder: Path, files: dict[str, str]) -> StageRun:
    folder = run_folder / name
    objects = {}
    for part in ("results", "lineage"):
        path = folder / f"{part}.json"
        objects[part] = _parse(_read_text(path, run_folder, files), str(path)) if path.is_file() else {}
    metrics = []
    path = folder / "metrics.jsonl"
    if path.is_file():
        text = _read_text(path, run_folder, files)
        # A line without its end was cut off by a kill, or is being written now.
        lines = text[: text.rfind("\n") + 1].split("\n")
        metrics = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    return StageRun(name, objects["results"], metrics, objects["lineage"])


def _read_text(path: Path, run_folder: Path, files: dict[str, str]) -> str:
    content = path.read_bytes()
    files[path.relative_to(run_folder).as_posix()] = hashlib.sha256(content).hexdigest()
    return content.decode("utf-8", errors="replace")


def _parse(text: str, place: str) -> dict[str, Any]:
    try:
        value = plain(json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{place}: a JSON object was expected, not {type(value).__name__}")
    return value


def plain(value: Any) -> Any:
    """Only what strict JSON and a page can carry: finite numbers, clean text, None, lists and dicts of them."""
    if isinstance(value, dict):
        return {clean_text(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return clean_text(value) if isinstance(value, str) else value


def clean_text(text: str) -> str:
    """Control characters, lone surrogates and noncharacters shown as U+FFFD; tabs and line ends stay."""
    return UNSHOWN.sub("\ufffd", text.replace("\r\n", "\n"))
