"""Command lines for a cluster: `heed submit` and `heed jobs`."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from heed.options import First, JobFile, Only, Overrides, Workers, read_job, spell
from stages.progress import console

if TYPE_CHECKING:
    from cluster.jobs import ClusterJob, Jobs

jobs_app = typer.Typer(no_args_is_help=True, help="Jobs on a cluster: list, look, follow, stop.")

Address = Annotated[
    str, typer.Option(envvar="HEED_ADDRESS", help="The head's dashboard, such as http://head:8265.", show_default=False)
]
JobId = Annotated[str, typer.Argument(help="A job's id, as `heed submit` and `heed jobs list` show it.")]

TABLE_COLUMNS = 10_000


def submit(
    runs: Annotated[Path, typer.Option(help="Where run folders lie: a path on storage that all machines share.")],
    job: JobFile = None,
    address: Address = "",
    override: Overrides = None,
    workers: Workers = 0,
    first: First = "",
    only: Only = "",
    follow: Annotated[bool, typer.Option(help="Show what the job writes, and end as it ends.")] = True,
) -> None:
    """Run a job on a Ray cluster: `heed run` there, with this code, the job file and the files below here it names.

    The job is checked before anything is sent. Submitted again, a job that was stopped or lost continues.
    """
    from jobs.submission import packed, run_command
    from stages.lineage import CODE_VERSION, code_version

    checked = read_job(job, override, workers, first, only)
    command = run_command(job, spell(override, workers, first, only), runs)
    with packed(job, checked) as folder:
        jobs = _cluster(address)
        job_id = jobs.submit(
            checked.name,
            command,
            folder,
            environment={CODE_VERSION: code_version()},
            labels={"results": str(runs / checked.name)},
        )
    console.print(f"submitted: {job_id}  (`heed jobs logs -f`, `status` and `stop` take this name)")
    if follow:
        _follow(jobs, job_id)
    else:
        typer.echo(job_id)


@jobs_app.command("list")
def list_jobs(address: Address = "") -> None:
    """The jobs submitted since the cluster started."""
    table = Table("id", "status", "submitted", "took", "results", box=None, pad_edge=False)
    for job in _cluster(address).list():
        table.add_row(job.job_id, job.status, _clock(job.submitted_at), _took(job), _results(job))
    _print(table)


@jobs_app.command()
def status(job_id: JobId, address: Address = "") -> None:
    """How a job stands."""
    job = _cluster(address).find(job_id)
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in (
        ("status", job.status),
        ("message", job.message),
        ("submitted", _clock(job.submitted_at)),
        ("took", _took(job)),
        ("results", _results(job)),
        ("command", job.command),
    ):
        table.add_row(name, value)
    _print(table)


@jobs_app.command()
def logs(
    job_id: JobId,
    address: Address = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on to the end, and end as the job ends.")] = False,
) -> None:
    """What a job has written."""
    jobs = _cluster(address)
    if follow:
        _follow(jobs, job_id)
    else:
        _write(jobs.logs(job_id))


@jobs_app.command()
def stop(job_id: JobId, address: Address = "") -> None:
    """End a job. Its run folder keeps what was done; the same job submitted again continues there."""
    jobs = _cluster(address)
    before = jobs.find(job_id)
    if before.is_over:
        console.print(f"{job_id}: was over already, {before.status}")
    else:
        console.print(f"{job_id}: {jobs.stop(job_id).status}")


def _cluster(address: str) -> "Jobs":
    from cluster.jobs import Jobs

    if not address:
        raise ValueError(
            "no cluster is named; --address http://HEAD:8265 was expected, or the same in the variable HEED_ADDRESS"
        )
    return Jobs(address)


def _follow(jobs: "Jobs", job_id: str) -> None:
    job = jobs.follow(job_id, _write)
    console.print(f"{job_id}: {job.status} after {_took(job)}")
    raise typer.Exit(job.exit_code)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print(table: Table) -> None:
    # As wide as its words, so that no id and no path is cut; a terminal breaks lines itself.
    Console(width=TABLE_COLUMNS, highlight=False, markup=False).print(table)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _took(job: "ClusterJob") -> str:
    end = job.ended_at if job.is_over else time.time()
    minutes, seconds = divmod(max(0, round(end - job.submitted_at)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def _results(job: "ClusterJob") -> str:
    return job.labels.get("results", "")
