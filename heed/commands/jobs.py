"""Commands for a cluster: `heed submit` and `heed jobs`."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from heed.commands.options import First, JobFile, Only, Overrides, Workers, all_overrides, read_job
from stages.progress import console

if TYPE_CHECKING:
    from cluster.jobs import ClusterJob, Jobs
    from heed.jobs.submission import Shipment

jobs_app = typer.Typer(no_args_is_help=True, help="Manage jobs on a cluster: list, status, logs, stop.")

Address = Annotated[
    str,
    typer.Option(envvar="HEED_ADDRESS", help="URL of the head's dashboard, e.g. http://head:8265.", show_default=False),
]
JobId = Annotated[str, typer.Argument(help="Job id, as shown by `heed submit` and `heed jobs list`.")]

TABLE_COLUMNS = 10_000


def submit(
    runs: Annotated[Path, typer.Option(help="Folder for run folders, on storage that all machines share.")],
    job: JobFile = None,
    address: Address = "",
    override: Overrides = None,
    workers: Workers = 0,
    first: First = "",
    only: Only = "",
    follow: Annotated[
        bool, typer.Option(help="Print the job's output until it ends, and exit with its status.")
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be sent, and send nothing.")] = False,
) -> None:
    """Run a job on a Ray cluster.

    This sends the code, the job file and the files it names below the current folder, and calls `heed run` there. The
    job is validated first. Submitting a stopped or lost job again continues it.
    """
    from heed.jobs.submission import Shipment
    from stages.lineage import CODE_VERSION, code_version

    checked = read_job(job, override, workers, first, only)
    shipment = Shipment.of(job, all_overrides(override, workers), checked)
    options = [word for option, stage in (("--from", first), ("--only", only)) if stage for word in (option, stage)]
    command = shipment.command(options, runs)
    if dry_run:
        _list_files(shipment, command)
        return
    if shipment.left_out:
        console.print(f"not sent: {', '.join(map(str, shipment.left_out))}", markup=False)
    jobs = _cluster(address)
    with shipment.packed() as folder:
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


def _list_files(shipment: "Shipment", command: str) -> None:
    """Print the files that would be sent, with their sizes, and the command that would run there."""
    from files.importing import PACKAGES, ROOT
    from heed.jobs.submission import code_files

    code, job_bytes = code_files(), len(shipment.job_text.encode())
    lines = [(job_bytes, f"{shipment.job_file} (the job, with its bases and --set values)")]
    lines += [(file.stat().st_size, str(file)) for file in shipment.files]
    packages = ", ".join(f"{package}/" for package in PACKAGES)
    lines.append((sum((ROOT / file).stat().st_size for file in code), f"{packages} ({len(code)} files of Heed's code)"))
    for size, name in (*lines, (sum(size for size, _ in lines), "bytes in all")):
        typer.echo(f"{size:>12,}  {name}")
    for path in shipment.left_out:
        typer.echo(f"{'not sent':>12}  {path}")
    typer.echo(f"command: {command}")


@jobs_app.command("list")
def list_jobs(address: Address = "") -> None:
    """List the jobs submitted since the cluster started."""
    table = Table("id", "status", "submitted", "took", "results", box=None, pad_edge=False)
    for job in _cluster(address).list():
        table.add_row(job.job_id, job.status, _clock(job.submitted_at), _took(job), _results(job))
    _print(table)


@jobs_app.command()
def status(job_id: JobId, address: Address = "") -> None:
    """Show a job's status, its last line of output, and what its run says if the run's folder is on this machine."""
    from heed.jobs.watch import now_in_words

    cluster = _cluster(address)
    job = cluster.find(job_id)
    written = [line for line in cluster.logs(job_id).splitlines() if line.strip()]
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in (
        ("status", job.status),
        ("message", job.message),
        ("submitted", _clock(job.submitted_at)),
        ("took", _took(job)),
        ("last line", written[-1] if written else ""),
        ("run", now_in_words(Path(_results(job))) if _results(job) and not job.is_over else ""),
        ("results", _results(job)),
        ("command", job.command),
    ):
        table.add_row(name, value)
    _print(table)


@jobs_app.command()
def logs(
    job_id: JobId,
    address: Address = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing until the job ends, and exit with its status.")
    ] = False,
) -> None:
    """Print a job's output."""
    jobs = _cluster(address)
    if follow:
        _follow(jobs, job_id)
    else:
        _write(jobs.logs(job_id))


@jobs_app.command()
def stop(job_id: JobId, address: Address = "") -> None:
    """Stop a job. Its run folder stays; submitting the same job again continues from it."""
    jobs = _cluster(address)
    before = jobs.find(job_id)
    if before.is_over:
        console.print(f"{job_id}: already over: {before.status}")
    else:
        console.print(f"{job_id}: {jobs.stop(job_id).status}")


def _cluster(address: str) -> "Jobs":
    from cluster.environment import token_warning
    from cluster.jobs import Jobs

    if not address:
        raise ValueError(
            "no cluster address; pass --address http://HEAD:8265 or set the environment variable HEED_ADDRESS"
        )
    if line := token_warning():
        console.print(line, markup=False)
    return Jobs(address)


def _follow(jobs: "Jobs", job_id: str) -> None:
    job = jobs.follow(job_id, _write, lambda line: console.print(line, markup=False))
    console.print(f"{job_id}: {job.status} after {_took(job)}")
    raise typer.Exit(job.exit_code)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print(table: Table) -> None:
    # Wide enough that no id or path is truncated; a terminal wraps long lines.
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
