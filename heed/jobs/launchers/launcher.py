"""What Slurm, Kubernetes and SkyPilot have in common: a job's machines, its rendered files, and the calls on it.

A launcher renders one file in its system's own format, which people can read, keep and edit, and hands it to that
system's own command. The file holds no secret: keys are named there and read where the job runs.
"""

import hashlib
import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from jinja2 import Environment, PackageLoader, StrictUndefined

from cluster.jobs import JobSource, UnreachableError
from files.atomic import atomic_folder, write_text
from heed.jobs.job import JobConfig

CPUS_PER_GPU = 4  # a rank's own thread, its data, and its share of writing checkpoints
KEYS = ("HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN")  # what runs read themselves
RENDERED = re.compile(r"^# sha256 of the other lines: ([0-9a-f]{64})\n", re.MULTILINE)


@dataclass(frozen=True)
class Machines:
    """Equal machines for a job's ranks. With no GPUs, ranks run on the machines' cores, one core each."""

    nodes: int
    gpus_per_node: int
    cpus_per_node: int
    gpu: str = ""  # "h100"; "" for any

    @classmethod
    def of(cls, job: JobConfig, nodes: int, gpus_per_node: int, gpu: str = "") -> "Machines":
        """Return the machines that hold a job's ranks. `nodes` 0 means as many as needed.

        Ranks fill one machine's GPUs after another, so that a team of ranks, such as one of tensor parallelism, stays
        on one machine. On CPUs, they are spread evenly over `nodes` machines.

        Raises: ValueError if the ranks do not fit, or would leave a machine idle.
        """
        is_gpu = job.cluster.use_gpus and gpus_per_node > 0
        if gpu and not is_gpu:
            raise ValueError(
                f"--gpu {gpu!r}: the job's ranks run on CPUs; expected --gpus-per-node above 0 and"
                " cluster.use_gpus = true"
            )
        if is_gpu:
            _check_room(nodes, gpus_per_node, job.num_ranks)
        ranks_per_node = min(gpus_per_node, job.num_ranks) if is_gpu else math.ceil(job.num_ranks / (nodes or 1))
        needed = math.ceil(job.num_ranks / ranks_per_node)
        if nodes > needed:
            raise ValueError(
                f"--nodes {nodes}: with up to {ranks_per_node} ranks each, {needed} machines hold the job's"
                f" {job.num_ranks} ranks; expected --nodes {needed}{' or fewer --gpus-per-node' if is_gpu else ''}"
            )
        if is_gpu:
            return cls(needed, ranks_per_node, CPUS_PER_GPU * ranks_per_node, gpu)
        return cls(needed, 0, ranks_per_node)


def _check_room(nodes: int, gpus_per_node: int, num_ranks: int) -> None:
    needed = math.ceil(num_ranks / gpus_per_node)
    if nodes and needed > nodes:
        raise ValueError(
            f"the job has {num_ranks} ranks with one GPU each, but {nodes} nodes with {gpus_per_node} GPUs each"
            f" have only {nodes * gpus_per_node}; {needed} nodes are needed"
        )


@dataclass(frozen=True)
class Launch:
    """A job on its way to a cluster."""

    name: str
    machines: Machines
    command: str  # `heed run` with its options, to be called in the payload's folder
    runs: Path  # on the cluster
    folder: Path  # of the rendered file, absolute
    payload: Path  # code, job file and data, in `folder`; its name is a digest of the content
    code_version: str
    image: str = ""
    volume: str = ""

    @property
    def run(self) -> Path:
        """The run's folder on the cluster."""
        return self.runs / self.name

    @property
    def label(self) -> str:
        """The job's name in lower-case letters, digits and hyphens, at most 36, as Kubernetes and Sky want names."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:36].strip("-")


class Launcher(JobSource, Protocol):
    """A system that starts machines for a job. As a `JobSource` it finds, logs and stops what it has started."""

    file: str  # the rendered file's name

    def render(self, launch: Launch) -> str:
        """Return the file's text. Raises: ValueError for an option that is missing or of no use here."""
        ...

    def submit(self, launch: Launch, path: Path) -> str:
        """Hand the rendered file at `path` to the system. Returns the job's id. Raises: ValueError in one line."""
        ...


def payload_name(packing: Path) -> str:
    """Return a name for the content of a folder that `Shipment.packed` has made."""
    digest = hashlib.sha256()
    for file in sorted(path for path in packing.rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(packing)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return f"payload-{digest.hexdigest()[:10]}"


def render(template: str, launch: Launch, **more: object) -> str:
    """Fill one of this package's templates. A comment in it is a digest, by which `write` recognises rendered text."""
    environment = Environment(
        loader=PackageLoader("heed.jobs.launchers", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["shell"] = lambda value: shlex.quote(str(value))
    values = {**vars(launch), **vars(launch.machines), "label": launch.label, "run": launch.run, **more}
    text = environment.get_template(template).render(values)
    *before, first, rest = text.split("\n", 2) if text.startswith("#!") else text.split("\n", 1)
    return "\n".join([*before, first, f"# sha256 of the other lines: {_digest(text)}", rest])


def write(launcher: Launcher, launch: Launch, packing: Path) -> bool:
    """Write the rendered file, and a copy of `packing` as the launch's payload unless that is there already.

    A queued or running job keeps the code with which it was submitted, whatever the tree here becomes. Returns False if
    a person has edited the file, which stays as it is.

    Raises: ValueError for a wrong option, or if the file was edited and the job would now be rendered differently.
    """
    path, text = launch.folder / launcher.file, launcher.render(launch)
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    found = RENDERED.search(old)
    is_edited = bool(old) and (found is None or found[1] != _digest(RENDERED.sub("", old)))
    if is_edited and (found is None or found[0] not in text):
        raise ValueError(
            f"{path} was edited, and the job, its code or an option has changed since it was rendered; undo that"
            " change, or remove the file to have it rendered again"
        )
    if not launch.payload.exists():
        launch.folder.mkdir(parents=True, exist_ok=True)
        with atomic_folder(launch.payload) as partial:
            shutil.copytree(packing, partial, dirs_exist_ok=True)
    if not is_edited:
        write_text(path, text)
    return not is_edited


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def call(
    words: Sequence[str], where: str, environment: Mapping[str, str] | None = None, accepted: Container[int] = (0,)
) -> str:
    """Run a system's command and return its standard output. Secrets go into `environment`, never into `words`.

    Raises: ValueError if the command is not installed (`where` says on which machines it is), or with its message if
        its exit code is not one of `accepted`.
    """
    if shutil.which(words[0]) is None:
        raise ValueError(f"no {words[0]} on the PATH; expected {where}")
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, env={**os.environ, **(environment or {})},
        check=False,
    )  # fmt: skip
    if done.returncode not in accepted:
        said = " ".join(done.stderr.decode(errors="replace").split()) or f"exit code {done.returncode}"
        raise ToolError(f"{shlex.join(words[:2])}: {said}", done.returncode)
    return done.stdout.decode(errors="replace")


class ToolError(UnreachableError):
    """A system's command failed. While a job is followed, it may succeed at the next try."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
