"""Options that several commands share."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stages.progress import console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from heed.jobs.job import JobConfig
    from training.data import Prompt

JobFile = Annotated[Path | None, typer.Argument(help="Job file; the built-in demo if left out.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Set a job field, e.g. ppo.kl.coef=0.05, or remove it with FIELD=none; may repeat."),
]
Workers = Annotated[
    int, typer.Option(help="Number of worker processes (default: the job's).", min=0, show_default=False)
]
First = Annotated[str, typer.Option("--from", help="Run this stage and all later ones, even if unchanged.")]
Only = Annotated[str, typer.Option(help="Run this stage only.")]
Weights = Annotated[
    list[str] | None,
    typer.Option("--weight", help="NAME=NUMBER: weight of one of the reward model's objectives; may repeat."),
]
RunsFolder = Annotated[Path, typer.Option("--runs", help="Folder that holds run folders.")]


def all_overrides(overrides: list[str] | None, workers: int) -> list[str]:
    """Returns the values of `--set`, with `--workers` as one more."""
    return [*(overrides or []), *([f"workers={workers}"] if workers else [])]


def read_job(path: Path | None, overrides: list[str] | None, workers: int, first: str, only: str) -> "JobConfig":
    """Returns the validated job. Raises: ValueError for an unknown stage, and as `load_job` does."""
    from heed.jobs.job_file import load_job

    job = load_job(path, all_overrides(overrides, workers))
    for option, stage in (("--from", first), ("--only", only)):
        if stage and stage not in job.registry:
            raise ValueError(f"{option} {stage!r}: one of {', '.join(job.registry.names)} was expected")
    return job


def read_weights(weights: list[str] | None) -> dict[str, float]:
    """Parses weights. Raises: ValueError for anything but NAME=NUMBER, and for a repeated name."""
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


def model_folder(name: Path) -> Path:
    """Returns the folder of a model that is named by its folder, a .gguf file, or a hub id.

    Raises: ValueError as for `lm.hub.model_directory`.
    """
    from lm.hub import model_directory

    return model_directory(str(name))


def refuse_run_folder(folder: Path) -> None:
    """Raise ValueError naming the models in the folder of a run or a stage, which is no model itself."""
    if (folder / "config.json").is_file():
        return
    if (folder / "model" / "config.json").is_file():
        raise ValueError(f"{folder} is the folder of a stage; its model is {folder / 'model'}")
    models = sorted(folder.glob("*/model/config.json"), key=lambda path: path.stat().st_mtime)
    if models:
        listed = ", ".join(str(path.parent) for path in models)
        raise ValueError(f"{folder} is the folder of a run; its models are {listed}")


def length_that_fits(policies: "Sequence[Path]", prompts: "Sequence[Prompt]", max_new_tokens: int) -> int:
    """Returns the longest response that fits next to every prompt, at most `max_new_tokens`; says so if it is less."""
    from reward.sampling import length_that_fits as found

    length = found(policies, prompts, max_new_tokens)
    if length < max_new_tokens:
        console.print(
            f"--max-new-tokens {max_new_tokens} is reduced to {length}: the longest prompt uses the rest of the context"
        )
    return length
