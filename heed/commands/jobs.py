"""Commands for a cluster: `heed submit` and `heed jobs`."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from files.urls import without_credentials
from heed.commands.options import First, JobFile, Only, Overrides, Workers, all_overrides, read_job
from stages.progress import console

if TYPE_CHECKING:
    from cluster.jobs import ClusterJob, Jobs, JobSource
    from heed.jobs.job import JobConfig
    from heed.jobs.launchers.launcher import Launch, Launcher
    from heed.jobs.submission import Shipment

jobs_app = typer.Typer(no_args_is_help=True, help="Manage jobs on a cluster: list, status, logs, stop.")

Address = Annotated[
    str,
    typer.Option(envvar="HEED_ADDRESS", help="URL of the head's dashboard, e.g. http://head:8265.", show_default=False),
]
JobId = Annotated[
    str,
    typer.Argument(help="Job id, as shown by `heed submit` and `heed jobs list`, such as demo-1a2b3c or slurm:1234."),
]

MACHINES = "Machines, if no Ray cluster is running"
GPUS_PER_NODE = 8
TABLE_COLUMNS = 10_000


def _machine(text: str, *names: str, **more: Any) -> Any:
    """Returns an option of `heed submit` for machines that Slurm, Kubernetes or SkyPilot start."""
    return typer.Option(*names, help=text, rich_help_panel=MACHINES, **{"show_default": False, **more})


OnSlurm = Annotated[bool, _machine("Start the cluster as a Slurm job.", "--slurm")]
OnKubernetes = Annotated[bool, _machine("Start the cluster as a RayJob of KubeRay.", "--kubernetes")]
OnSky = Annotated[bool, _machine("Start the cluster in a cloud, through SkyPilot.", "--sky")]
Nodes = Annotated[int, _machine("Number of machines (default: as many as the ranks need).", min=0)]
GpusPerNode = Annotated[int, _machine("GPUs per machine; 0 for ranks on CPUs.", min=0, show_default=True)]
Gpu = Annotated[str, _machine("Kind of GPU, such as h100.")]
Image = Annotated[str, _machine("Container image with the packages of constraints.txt.")]
Volume = Annotated[str, _machine("Claim or volume that the machines mount at --runs.")]
Out = Annotated[
    Path | None,
    _machine("Folder for the rendered file and the code (default: RUN/launch; launch/NAME if --runs is not here)."),
]


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
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="List what would be sent, render what would be submitted, and send nothing."),
    ] = False,
    slurm: OnSlurm = False,
    kubernetes: OnKubernetes = False,
    sky: OnSky = False,
    nodes: Nodes = 0,
    gpus_per_node: GpusPerNode = GPUS_PER_NODE,
    gpu: Gpu = "",
    image: Image = "",
    volume: Volume = "",
    out: Out = None,
) -> None:
    """Run a job on a Ray cluster: a running one, or one that Slurm, Kubernetes or SkyPilot starts for it.

    This sends the code, the job file and the files it names below the current folder, and calls `heed run` there. The
    job is validated first. Submitting a stopped or lost job again continues it.
    """
    from heed.jobs.submission import Shipment

    launcher = _chosen_launcher(slurm=slurm, kubernetes=kubernetes, sky=sky)
    wanted = Wanted(nodes, gpus_per_node, gpu, image, volume, out)
    if launcher is None:
        wanted.refuse()
    checked = read_job(job, override, workers, first, only)
    if checked.loop is not None:
        raise ValueError(f"{job}: the job has [loop], which only `heed loop` runs; a job without [loop] was expected")
    _refuse_unknown_vllm(checked)
    shipment = Shipment.of(job, all_overrides(override, workers), checked)
    options = [word for option, stage in (("--from", first), ("--only", only)) if stage for word in (option, stage)]
    command = shipment.command(options, runs)
    if dry_run:
        _list_files(shipment, command)
    elif shipment.left_out:
        console.print(f"not sent: {', '.join(map(str, shipment.left_out))}", markup=False)
    if launcher is not None:
        launch = _rendered(launcher, wanted, shipment, checked, command, runs)
        if dry_run:
            console.print("the same command without --dry-run submits it, edited or not", markup=False)
        else:
            _submitted(launcher, launcher.submit(launch, launch.folder / launcher.file), follow=follow)
    elif not dry_run:
        cluster = _cluster(address)
        _submitted(cluster, _sent(cluster, shipment, checked.name, command, runs), follow=follow)


def _refuse_unknown_vllm(job: "JobConfig") -> None:
    """Raises: ValueError if a stage samples with vLLM of this clone's environment, which is not sent."""
    for stage in job.stages:
        sampler = getattr(job.section_of(stage), "sampler", None)
        if getattr(sampler, "python", None) == "":
            raise ValueError(
                f"{stage.name}.sampler.python is empty; the Python with vLLM on the cluster's machines was expected"
            )


@dataclass(frozen=True)
class Wanted:
    """The machines that a launcher starts, by the options of `heed submit`."""

    nodes: int
    gpus_per_node: int
    gpu: str
    image: str
    volume: str
    out: Path | None

    def refuse(self) -> None:
        """Raises: ValueError for an option that only launchers read."""
        if self != (none := Wanted(0, GPUS_PER_NODE, "", "", "", None)):
            given = [f"--{one.replace('_', '-')}" for one in vars(self) if getattr(self, one) != getattr(none, one)]
            raise ValueError(
                f"{', '.join(given)}: expected only with --slurm, --kubernetes or --sky, which start machines"
            )


def _rendered(
    launcher: "Launcher", wanted: Wanted, shipment: "Shipment", job: "JobConfig", command: str, runs: Path
) -> "Launch":
    """Write the packed code and the launcher's file. Report that, or that an edited file stays as it is."""
    from heed.jobs.launchers.launcher import Launch, Machines, payload_name, write
    from stages.lineage import code_version

    machines = Machines.of(job, wanted.nodes, wanted.gpus_per_node, wanted.gpu)
    folder = runs / job.name / "launch" if runs.is_dir() else Path("launch", job.name)
    folder = (wanted.out or folder).absolute()
    with shipment.packed() as packing:
        payload, version = folder / payload_name(packing), code_version()
        launch = Launch(job.name, machines, command, runs, folder, payload, version, wanted.image, wanted.volume)
        is_rendered = write(launcher, launch, packing)
    line = "rendered: {}" if is_rendered else "edited, so used as it is: {} (remove it to render it again)"
    console.print(line.format(folder / launcher.file), markup=False, soft_wrap=True)
    return launch


def _sent(cluster: "Jobs", shipment: "Shipment", job_name: str, command: str, runs: Path) -> str:
    """Send the job to a running Ray cluster. Returns its id."""
    from stages.lineage import CODE_VERSION, code_version

    environment, labels = {CODE_VERSION: code_version()}, {"results": str(runs / job_name)}
    with shipment.packed() as packing:
        return cluster.submit(job_name, command, packing, environment=environment, labels=labels)


def _submitted(jobs: "JobSource", job_id: str, *, follow: bool) -> None:
    console.print(f"submitted: {job_id}  (`heed jobs logs -f`, `status` and `stop` take this name)")
    if follow:
        _follow(jobs, job_id)
    else:
        typer.echo(job_id)


def _chosen_launcher(*, slurm: bool, kubernetes: bool, sky: bool) -> "Launcher | None":
    chosen = [name for name, is_chosen in (("slurm", slurm), ("kubernetes", kubernetes), ("sky", sky)) if is_chosen]
    if len(chosen) > 1:
        raise ValueError(f"--{' --'.join(chosen)}: one of them was expected")
    return _launcher(chosen[0]) if chosen else None


def _launcher(name: str) -> "Launcher | None":
    """Returns a launcher by the prefix of its ids; None if there is none of this name."""
    from heed.jobs.launchers.kubernetes import Kubernetes
    from heed.jobs.launchers.sky import Sky
    from heed.jobs.launchers.slurm import Slurm

    launchers: tuple[Launcher, ...] = (Slurm(), Kubernetes(), Sky())
    return next((launcher for launcher in launchers if launcher.address == name), None)


def _source(job_id: str, address: str) -> "JobSource":
    """Returns what knows a job: the launcher that its id names, else the Ray cluster at the address."""
    name, colon, _ = job_id.partition(":")
    return (_launcher(name) if colon else None) or _cluster(address)


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
    """List the jobs submitted to a Ray cluster since it started.

    Others are listed by `squeue --me`, `kubectl get rayjobs` and `sky queue`.
    """
    table = Table("id", "status", "submitted", "took", "results", box=None, pad_edge=False)
    for job in _cluster(address).list():
        table.add_row(job.job_id, job.status, _clock(job.submitted_at), _took(job), _results(job))
    _print(table)


@jobs_app.command()
def status(job_id: JobId, address: Address = "") -> None:
    """Show a job's status, its last line of output, and what its run says if the run's folder is on this machine."""
    from heed.jobs.watch import now_in_words

    jobs = _source(job_id, address)
    job = jobs.find(job_id)
    written = [line for line in jobs.logs(job_id).splitlines() if line.strip()]
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in (
        ("status", job.status),
        ("message", job.message),
        ("submitted", _clock(job.submitted_at)),
        ("took", _took(job)),
        ("last line", without_credentials(written[-1]) if written else ""),
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
    jobs = _source(job_id, address)
    if follow:
        _follow(jobs, job_id)
    else:
        _write(jobs.logs(job_id))


@jobs_app.command()
def stop(job_id: JobId, address: Address = "") -> None:
    """Stop a job. Its run folder stays; submitting the same job again continues from it."""
    jobs = _source(job_id, address)
    before = jobs.find(job_id)
    if before.is_over:
        console.print(f"{job_id}: already over: {before.status}")
    else:
        console.print(f"{job_id}: {jobs.stop(job_id).status}")


def _cluster(address: str) -> "Jobs":
    from cluster.jobs import Jobs
    from cluster.processes import token_warning

    if not address:
        raise ValueError(
            "no cluster address; pass --address http://HEAD:8265 or set the environment variable HEED_ADDRESS; without"
            " a running cluster, `heed submit` takes --slurm, --kubernetes or --sky"
        )
    if line := token_warning():
        console.print(line, markup=False)
    return Jobs(address)


def _follow(jobs: "JobSource", job_id: str) -> None:
    from cluster.jobs import follow

    job = follow(jobs, job_id, _write, lambda line: console.print(line, markup=False))
    console.print(f"{job_id}: {job.status} after {_took(job)}")
    raise typer.Exit(job.exit_code)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print(table: Table) -> None:
    # Wide enough that no id or path is truncated; a terminal wraps long lines.
    Console(width=TABLE_COLUMNS, highlight=False, markup=False).print(table)


def _clock(seconds: float) -> str:
    """Returns a local time; "unknown" for 0, since SkyPilot's status has no times."""
    return "unknown" if not seconds else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _took(job: "ClusterJob") -> str:
    end = job.ended_at if job.is_over else time.time()
    if not job.submitted_at or not end:  # KubeRay notes no end of a job that was stopped
        return "unknown"
    minutes, seconds = divmod(max(0, round(end - job.submitted_at)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def _results(job: "ClusterJob") -> str:
    return job.labels.get("results", "")
