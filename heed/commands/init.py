"""`heed init`: write a first job for one's own model and data."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from stages.progress import console

DATA = "JSONL, JSON, CSV, Parquet or a hub id"


def init(
    job: Annotated[Path, typer.Argument(help="The job file to write.")],
    model: Annotated[str, typer.Option(help="The model to start from: a directory, a .gguf file or a hub id.")],
    demonstrations: Annotated[str, typer.Option(help=f"Conversations for SFT: {DATA}.")] = "",
    preferences: Annotated[
        str, typer.Option(help=f"Preference pairs or rankings, for a reward model and DPO: {DATA}.")
    ] = "",
    prompts: Annotated[str, typer.Option(help=f"Prompts to answer, in training and in the comparison: {DATA}.")] = "",
    reward: Annotated[
        str,
        typer.Option(
            help="A Python function that scores responses, FILE.py:NAME; FILE.py if it has one public function."
        ),
    ] = "",
    algorithm: Annotated[
        str,
        typer.Option(help="ppo, grpo, rloo or dpo (default: ppo with --prompts, otherwise dpo).", show_default=False),
    ] = "",
    form: Annotated[
        str,
        typer.Option("--format", help="Format of demonstrations and prompts, if their rows fit more than one."),
    ] = "auto",
    on_invalid: Annotated[
        Literal["refuse", "skip"], typer.Option(help="Whether malformed rows are an error, or left out and counted.")
    ] = "refuse",
    reward_function: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Write a short, complete job for your own model and data, which `heed run` takes as it is. It ends with a
    comparison of the new policy with the model that it started from.

    The formats of the data are recognised (docs/data.md). What is missing for further stages is reported.
    """
    from files.importing import function_named
    from heed.jobs.starter import Starter

    if reward_function:
        raise ValueError(f"--reward-function is now --reward: --reward {reward_function} was expected")
    reward = function_named(reward, "--reward")
    starter = Starter(
        model, demonstrations, preferences, prompts, reward, algorithm, format=form, on_invalid=on_invalid
    )
    for line in starter.write(job):
        console.print(line, markup=False)
    for line in starter.missing:
        console.print(f"left out: {line}", markup=False)
    console.print(f"{job} is ready: `heed plan {job}` estimates it, `heed run {job}` runs it", markup=False)
