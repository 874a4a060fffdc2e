"""`heed init`: write a first job for one's own model and data."""

from pathlib import Path
from typing import Annotated

import typer

from stages.progress import console

DATA = "JSONL, JSON, CSV, Parquet or a hub id"


def init(
    job: Annotated[Path, typer.Argument(help="The job file to write.")],
    model: Annotated[str, typer.Option(help="The model to start from: a directory, a .gguf file or a hub id.")],
    demonstrations: Annotated[str, typer.Option(help=f"Conversations for SFT: {DATA}.")] = "",
    preferences: Annotated[
        str, typer.Option(help=f"Preference pairs or rankings, for a reward model or, without --prompts, DPO: {DATA}.")
    ] = "",
    prompts: Annotated[str, typer.Option(help=f"Prompts for PPO: {DATA}.")] = "",
    reward_function: Annotated[
        str, typer.Option(help="A Python function that scores responses, FILE.py:FUNCTION, in place of preferences.")
    ] = "",
) -> None:
    """Write a short, complete job for your own model and data, which `heed run` takes as it is.

    The formats of the data are recognised (docs/data.md). What is missing for further stages is reported.
    """
    from jobs.starter import Starter

    starter = Starter(model, demonstrations, preferences, prompts, reward_function)
    for line in starter.write(job):
        console.print(line, markup=False)
    for line in starter.missing:
        console.print(f"left out: {line}", markup=False)
    console.print(f"{job} is ready: `heed plan {job}` estimates it, `heed run {job}` runs it", markup=False)
