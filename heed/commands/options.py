"""Options that several commands share."""

import json
import math
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stages.progress import console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from heed.jobs.job import JobConfig
    from lm.sampling import Choice
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
Submission = Annotated[str, typer.Option(hidden=True, help="A submission, for which --from counts once.")]
Only = Annotated[str, typer.Option(help="Run this stage only.")]
Weights = Annotated[
    list[str] | None,
    typer.Option("--weight", help="NAME=NUMBER: weight of one of the reward model's objectives; may repeat."),
]
Greedy = Annotated[bool, typer.Option("--greedy", help="Take the likeliest token at each step.")]
Beams = Annotated[
    int,
    typer.Option(
        help="Beam search: this many texts, ranked by log-probability per token (default: none).",
        min=0,
        show_default=False,
    ),
]
Temperature = Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")]
TopK = Annotated[int, typer.Option(min=0, help="Sample from this many of the likeliest tokens; 0 is all.")]
TopP = Annotated[
    float,
    typer.Option(
        min=0.0, max=1.0, help="Sample from the fewest tokens whose probabilities sum to this (nucleus sampling)."
    ),
]
Host = Annotated[str, typer.Option(help="Address to listen on. For users on other machines, put a TLS proxy in front.")]
Port = Annotated[int, typer.Option(min=1, max=65_535)]
RunsFolder = Annotated[Path, typer.Option("--runs", help="Folder that holds run folders.")]


def all_overrides(overrides: list[str] | None, workers: int) -> list[str]:
    """Returns the values of `--set`, with `--workers` as one more."""
    return [*(overrides or []), *([f"workers={workers}"] if workers else [])]


def read_job(path: Path | None, overrides: list[str] | None, workers: int, first: str, only: str) -> "JobConfig":
    """Returns the validated job. Raises: ValueError for a stage that it lacks, and as `load_job` does."""
    from heed.jobs.job_file import load_job

    job = load_job(path, all_overrides(overrides, workers))
    for option, stage in (("--from", first), ("--only", only)):
        if stage and stage not in job.stage_names:
            lacks = f"the job has no [{stage}]; " if stage in job.registry else ""
            raise ValueError(f"{option} {stage!r}: {lacks}one of {', '.join(job.stage_names)} was expected")
    return job


def require_cores_for(workers: int) -> None:
    """Raise ValueError if this machine would run the job and has fewer cores than `--workers`; otherwise the error
    would be about batches.
    """
    from cluster.connection import require_cores

    if not os.environ.get("RAY_ADDRESS"):
        require_cores(workers)


def last_state(job: Path | None, overrides: list[str] | None, runs: Path) -> str:
    """Returns the state of a job's last run, such as "finished", from its status.json; "" if there is none, or if the
    job file cannot be read. Imports nothing, since a command asks before it imports.
    """
    named = [override.removeprefix("name=") for override in overrides or [] if override.startswith("name=")]
    try:
        name = named[-1] if named else tomllib.loads(job.read_text(encoding="utf-8"))["name"] if job else "demo"
        return str(json.loads((runs / name / "status.json").read_text(encoding="utf-8"))["state"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


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


def typed(context: typer.Context) -> list[str]:
    """Returns the options that were given on the command line, as they are written there."""
    return [
        option.opts[0]
        for option in context.command.params
        if option.opts[0].startswith("--")
        and getattr(context.get_parameter_source(option.name or ""), "name", "DEFAULT") != "DEFAULT"
    ]


def read_choice(
    context: typer.Context, *, greedy: bool, beams: int, temperature: float, top_k: int, top_p: float, several: str
) -> "Choice":
    """Returns how the next token is chosen; greedy with `--greedy` and, where it has no effect, with `--beams`.

    `several` is the option that asks for more than one sample, or "".
    Raises: ValueError for options that exclude each other.
    """
    from lm.sampling import Choice

    found = [option for option, is_on in (("--greedy", greedy), ("--beams", beams > 0)) if is_on]
    sampling = [option for option in typed(context) if option in ("--temperature", "--top-k", "--top-p")]
    if len(found) + bool(sampling) > 1:
        raise ValueError(
            f"{' with '.join([*found, *sampling])}: one way to choose tokens was expected: --greedy, --beams, or"
            " sampling with --temperature, --top-k and --top-p"
        )
    if top_p == 0 or (temperature == 0 and len(sampling) > 1):
        raise ValueError(
            f"--temperature {temperature:g}, --top-k {top_k}, --top-p {top_p:g}: a temperature and a --top-p above 0"
            " were expected; --greedy takes the likeliest token"
        )
    if several and (found or temperature == 0):
        raise ValueError(
            f"{several} with {found[0] if found else '--temperature 0'}: samples that differ were expected, which need"
            " a --temperature above 0"
        )
    if "--seed" in typed(context) and (found or temperature == 0):
        raise ValueError(
            f"--seed with {found[0] if found else '--temperature 0'}, which draws nothing: sampling, or no --seed, was"
            " expected"
        )
    return Choice(temperature=0) if found else Choice(temperature, top_k, top_p)


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
