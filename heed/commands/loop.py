"""`heed loop`: rounds of labels, reward model, policy and comparison, until they are no longer worth their labels."""

import os
from pathlib import Path
from typing import Annotated

import typer

from heed.commands.options import JobFile, Overrides, RunsFolder, Workers, all_overrides, last_state
from stages.progress import console


def loop(
    job: JobFile = None,
    override: Overrides = None,
    workers: Workers = 0,
    runs: RunsFolder = Path("runs"),
    wait: Annotated[
        bool,
        typer.Option(
            help="Wait for people's labels; with --no-wait, end instead, and the same command continues later."
        ),
    ] = True,
) -> None:
    """Run a job's preference loop: collect labels, train the reward model and the policy, compare, and repeat until the
    gain per hundred labels is no longer worth it or the labels are used.

    RUN/report.html grows with each round. An interrupted loop continues where it stopped.
    """
    from cluster import local_ray
    from files.importing import imports_uncollected

    if not os.environ.get("RAY_ADDRESS") and last_state(job, override, runs) not in {"", "finished"}:
        local_ray.begin()  # Ray starts while this process imports, which takes seconds too
    with console.status("reading the job"), imports_uncollected():
        from heed.jobs.job_file import load_job
        from heed.jobs.loop import run_loop

    given = all_overrides(override, workers)
    run_loop(lambda rounds: load_job(job, [*given, *([f"rounds={rounds}"] if rounds else [])]), runs, waits=wait)
