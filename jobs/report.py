"""The report of a run, with what each of its stages shows."""

import tomllib
from pathlib import Path
from typing import Any

from jobs.registry import BUILT_IN, Registry, registry_with


def write_run_report(folder: Path) -> dict[str, Any]:
    """Write report.json and report.html into `runs/JOB`. Returns what report.json holds.

    Raises:
        ValueError: a file in the run directory is absent or malformed, or a stage that its job brings is not found.
    """
    from reports.report import write_report

    return write_report(folder, _registry(folder / "job.toml").reporters)


def _registry(job: Path) -> Registry:
    """The stages that a run's job may have; the report itself says what is wrong with a job that cannot be read."""
    try:
        values = tomllib.loads(job.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return BUILT_IN
    return registry_with(values.get("custom_stages", ()))
