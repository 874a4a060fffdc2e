"""The command line."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from heed.progress import console

app = typer.Typer(
    name="heed",
    help="From raw text to a policy that people prefer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

JobFile = Annotated[Path | None, typer.Argument(help="The job file; the built-in demo where it is left out.")]
RunsFolder = Annotated[Path, typer.Option("--runs", help="Where run folders lie.")]


@app.callback()
def _main() -> None:
    """Heed takes a language model from raw text to a policy that people prefer."""


@app.command()
def run(
    job: JobFile = None,
    override: Annotated[list[str] | None, typer.Option("--set", help="ppo.kl_coef=0.05, say; may repeat.")] = None,
    workers: Annotated[int, typer.Option(help="Worker processes, instead of the job's number.", min=0)] = 0,
    first: Annotated[str, typer.Option("--from", help="Run this stage and all after it, changed or not.")] = "",
    only: Annotated[str, typer.Option(help="Run no stage but this one.")] = "",
    runs: RunsFolder = Path("runs"),
) -> None:
    """Run a job's stages in order, each unless its inputs are unchanged, and write the report.

    A run that was interrupted continues where it stopped.
    """
    from heed.job import STAGES, load_job
    from heed.pipeline import run_job

    for option, stage in (("--from", first), ("--only", only)):
        if stage and stage not in STAGES:
            raise ValueError(f"{option} {stage!r}: one of {', '.join(STAGES)} was expected")
    overrides = [*(override or []), *([f"workers={workers}"] if workers else [])]
    run_job(load_job(job, overrides), runs, first=first, only=only)


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="A run folder, such as runs/demo.")]) -> None:
    """Write report.html and report.json of a run folder anew."""
    from heed.report import write_report

    write_report(folder)
    console.print(str(folder / "report.html"))


@app.command()
def chat(
    model: Annotated[Path, typer.Argument(help="A model directory, such as runs/demo/ppo/model.")],
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest response.")] = 128,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Talk to a model: each line is a turn; an empty line starts over; end of input leaves."""
    from heed.chat import converse

    converse(model, temperature=temperature, max_tokens=max_tokens, seed=seed)


def main() -> None:
    """Entry point: what the user can mend is told in one line, without a traceback."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except ValueError as error:
        console.print(f"[bold red]error:[/] {_escape(str(error))}")
        raise SystemExit(2) from None


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
