"""`python -m research.study NAME`: tests published findings, by default in the playground (research/findings)."""

from pathlib import Path
from typing import Annotated

import typer

from heed.cli import run_app
from heed.commands.options import Overrides
from research.studies.study import NAMES, QUICK, TRIAL, own_job, run_study
from stages.progress import results_console

ROOT = Path(__file__).parents[1]
app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def study(
    finding: Annotated[
        str,
        typer.Argument(help=f"Findings of research/findings, with commas between: {NAMES}."),
    ],
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds; at least 2 for any verdict.")] = 3,
    runs: Annotated[Path, typer.Option("--runs", help="Folder for run folders and findings.")] = Path("runs/study"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Use the debug job's size to try the command; results mean nothing.")
    ] = False,
    measures: Annotated[
        Path | None,
        typer.Option("--measures", help="Folder with measures of earlier seeds (seed-N.npz), which are not run again."),
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option(
            "--job",
            help="Job that the arms are made of (default: research/jobs/study.toml, or that of the finding:"
            " study-choice.toml, study-freshness.toml, study-judge.toml, study-router-replay.toml).",
        ),
    ] = None,
    override: Overrides = None,
) -> None:
    """Test published findings (research/findings), by default in the playground. An interrupted study continues."""
    if job is not None and quick:
        raise ValueError(f"--quick with --job {job}: one of them was expected")
    own = own_job(finding)
    if quick and own in ("study-freshness.toml", "study-router-replay.toml"):
        raise ValueError(f"--quick with {finding}: its arms are not those of the debug job; no --quick was expected")
    job = job or (ROOT / "configs" / "jobs" / "debug.toml" if quick else ROOT / "research" / "jobs" / own)
    overrides = [*(QUICK if quick else ()), *(override or [])]
    found = run_study(finding, job, runs, num_seeds=seeds, overrides=overrides, stored=measures)
    for one in found:
        results_console().print(f"{one.finding.title}: [bold]{one.verdict}[/]{f' ({TRIAL})' if quick else ''}")


if __name__ == "__main__":
    run_app(app)
