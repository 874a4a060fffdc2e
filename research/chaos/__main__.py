"""`python -m research.chaos JOB`: a job under random faults ends with the bits of the job left alone."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from heed.cli import run_app
from heed.commands.options import JobFile, Overrides, RunsFolder
from research.chaos.campaign import run_chaos
from research.chaos.result import summary
from stages.progress import results_console

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def chaos(
    job: JobFile = None,
    faults: Annotated[int, typer.Option(min=1, help="Number of faults, injected one after another.")] = 10,
    kinds: Annotated[
        str,
        typer.Option(
            help="Comma-separated list of worker,generator,node,driver,hang,partition,disk,folder,server; default: all"
            " possible."
        ),
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed for drawing the faults, their targets and times.")] = 0,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the cluster that is started on this machine.")] = 2,
    server: Annotated[str, typer.Option(help="Command of a server that the job calls; it runs on the head.")] = "",
    override: Overrides = None,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Run a job under random faults, and compare its outputs with those of an undisturbed run.

    Exit code 1: outputs differ, or a run did not recover as documented.
    """
    chosen = [kind.strip() for kind in kinds.split(",") if kind.strip()]
    result = run_chaos(
        job,
        override or [],
        runs,
        num_faults=faults,
        seed=seed,
        num_nodes=nodes,
        kinds=chosen,
        server=shlex.split(server),
    )
    results_console().print(summary(result))
    if result.has_failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_app(app)
