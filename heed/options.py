"""What `heed run` and `heed submit` are both told about a job."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from jobs.job import JobConfig

JobFile = Annotated[Path | None, typer.Argument(help="The job file; the built-in demo where it is left out.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="ppo.kl_coef=0.05, say; may repeat.")]
Workers = Annotated[int, typer.Option(help="Worker processes, instead of the job's number.", min=0)]
First = Annotated[str, typer.Option("--from", help="Run this stage and all after it, changed or not.")]
Only = Annotated[str, typer.Option(help="Run no stage but this one.")]
Weights = Annotated[
    list[str] | None, typer.Option("--weight", help="NAME=NUMBER: an objective of the judge; may repeat.")
]
RunsFolder = Annotated[Path, typer.Option("--runs", help="Where run folders lie.")]


def read_job(path: Path | None, overrides: list[str] | None, workers: int, first: str, only: str) -> "JobConfig":
    """The checked job. Errors: ValueError for an unknown stage, and what `load_job` finds."""
    from jobs.job import STAGES
    from jobs.job_file import load_job

    for option, stage in (("--from", first), ("--only", only)):
        if stage and stage not in STAGES:
            raise ValueError(f"{option} {stage!r}: one of {', '.join(STAGES)} was expected")
    return load_job(path, [*(overrides or []), *([f"workers={workers}"] if workers else [])])


def read_weights(weights: list[str] | None) -> dict[str, float]:
    """Errors: ValueError for what is not NAME=NUMBER, and a name that is there twice."""
    found: dict[str, float] = {}
    for given in weights or []:
        name, _, number = given.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or not math.isfinite(weight) or name in found:
            raise ValueError(f"--weight {given!r}: NAME=NUMBER was expected, each name once")
        found[name] = weight
    return found


def spell(overrides: list[str] | None, workers: int, first: str, only: str) -> list[str]:
    """The same options as words of a command line."""
    words = [word for override in overrides or [] for word in ("--set", override)]
    for option, value in (("--workers", workers), ("--from", first), ("--only", only)):
        words += [option, str(value)] if value else []
    return words
