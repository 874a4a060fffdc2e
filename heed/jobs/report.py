"""The report of a run, with what each of its stages shows."""

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heed.jobs.registry import BUILT_IN, registry_with
from heed.jobs.rounds import with_rounds
from stages.reports.stage_report import plain_reporter

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


def live_run_page(folder: Path, live: "Live") -> str:
    """The report as HTML with what the run is doing now. Raises: as `write_run_report` does."""
    from stages.reports.report import live_report

    return live_report(folder, _reporters(folder), live)


def _reporters(folder: Path) -> "dict[str, StageReporter]":
    """How the stages of a run are shown. A run outlives the code of a stage that its job brought: without that code
    the numbers of the stage's results are shown.
    """
    try:
        values = tomllib.loads((folder / "job.toml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return BUILT_IN.reporters  # the report itself says what is wrong with the job
    try:
        return with_rounds(registry_with(values.get("custom_stages", ())), values.get("rounds", 1), values).reporters
    except ValueError:
        begun = [path.parent.name for path in sorted(folder.glob("*/inputs.json"))]
        return BUILT_IN.reporters | {name: plain_reporter(name) for name in begun if name not in BUILT_IN}
