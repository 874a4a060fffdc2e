"""Packs a job for a cluster: this code, the job file and the files that it names, in one folder.

The code's dependencies are left out. The cluster's machines are prepared with the pins of constraints.txt
(docs/cluster.md): installing torch and compiling DeepSpeed's parts when a job starts would cost minutes per node and
could fail late.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomli_w

from files.importing import PACKAGES, ROOT, user_folders
from files.lookup import no_such_file
from files.rows import LOADERS
from heed.jobs.job import JobConfig
from heed.jobs.job_file import BASE, read_job_values, read_toml

SHIPPED_MIB = 100  # the head keeps shipped files in memory; larger ones belong in the shared folder


def run_command(path: Path | None, options: Sequence[str], runs: Path) -> str:
    """`heed run` with its options, as a shell command for the folder that `packed` makes.

    Raises: ValueError for a runs folder that other machines cannot find.
    """
    if not runs.is_absolute():
        raise ValueError(
            f"--runs is {str(runs)!r}; an absolute path on storage that all machines of the cluster share was expected"
        )
    named = [path.name] if path else []
    return shlex.join(["python", "-m", "heed", "run", *named, "--runs", str(runs), *options])


@contextmanager
def packed(path: Path | None, job: JobConfig) -> Iterator[Path]:
    """Yield a folder in which `heed run` finds every file at the path that it has here.

    Raises: ValueError for data that is missing, leads out of the current folder, or is too large to send.
    """
    names = list(_shipped(job))
    with TemporaryDirectory(prefix="heed-submit-") as temporary:
        folder = Path(temporary)
        if path is not None:
            _write_job_file(path, folder / path.name)
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if Path(name).is_dir():
                shutil.copytree(name, folder / name, dirs_exist_ok=True)
            else:
                shutil.copyfile(name, folder / name)
        for package in PACKAGES:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / package, folder / package, ignore=ignored, dirs_exist_ok=True)
        yield folder


def _write_job_file(source: Path, target: Path) -> None:
    """Copy the job file. A job with a base is written as one complete file, since its bases may lie anywhere."""
    if BASE in read_toml(source, str(source)):
        target.write_text(tomli_w.dumps(read_job_values(source)), encoding="utf-8")
    else:
        shutil.copyfile(source, target)


def _shipped(job: JobConfig) -> Iterator[str]:
    """Yields the files and folders below the current one that the job names. Absolute paths refer to the cluster."""
    room = SHIPPED_MIB * 2**20
    for field, name in named_paths(job):
        if Path(name).is_absolute():
            continue
        if not Path(name).exists():
            if Path(name.removesuffix(".gz")).suffix in (*LOADERS, ".py", ".gguf"):
                raise ValueError(f"{field}: {name}: {no_such_file(name)}")
            continue  # a hub id, or something that the run itself will write
        if ".." in Path(name).parts:
            raise ValueError(
                f"{field} is {name!r}, which leads out of the current folder and cannot be shipped; a path below it, or"
                " an absolute path on storage that all machines of the cluster share was expected"
            )
        room -= _num_bytes(Path(name))
        if room < 0:
            raise ValueError(
                f"{field}: with {name}, more than {SHIPPED_MIB} MiB would be shipped; put it on storage that all"
                " machines of the cluster share and give its absolute path"
            )
        _refuse_hiding(field, Path(name))
        yield name


def _refuse_hiding(field: str, path: Path) -> None:
    """Raise ValueError for a file that one of Heed's would replace, or that would hide an installed module. On the
    cluster, Python looks for modules in the job's folder first.
    """
    files = [path] if path.is_file() else [below for below in path.rglob("*") if below.is_file()]
    for file in files:
        heeds = ROOT / file
        if file.parts[0] in PACKAGES and heeds.is_file() and not file.samefile(heeds):
            raise ValueError(f"{field}: {file} has the same path as a file of Heed's code; another name was expected")
    name = path.stem
    if path.suffix != ".py" or len(path.parts) > 1 or name in PACKAGES:  # a package hides a module
        return
    of_users = {"", str(Path.cwd()), *user_folders()}
    installed = [folder for folder in sys.path if folder not in of_users]
    if name in sys.stdlib_module_names or PathFinder.find_spec(name, installed) is not None:
        raise ValueError(f"{field}: {path} would hide the installed module {name!r}; another name was expected")


def named_paths(job: JobConfig) -> Iterator[tuple[str, str]]:
    """Yields (field, value) for everything in a job that may name a file or a model."""
    for number, place in enumerate(job.custom_stages):
        if ".py:" in place:
            yield f"custom_stages.{number}", place.partition(":")[0]
    models = {f"{stage.name}.{field}" for stage in job.known_stages for field in stage.model_fields}
    functions = {f"{stage.name}.{field}" for stage in job.known_stages for field in stage.function_fields}
    yield from _named_in(job.model_dump(), models, functions, "")


def _named_in(value: Any, models: set[str], functions: set[str], place: str) -> Iterator[tuple[str, str]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        field = f"{place}.{key}".removeprefix(".")
        if isinstance(item, Path) or ((key == "source" or field in models) and item):
            yield field, str(item)
        elif field in functions and ".py:" in item:
            yield field, item.partition(":")[0]
        else:
            yield from _named_in(item, models, functions, field)


def _num_bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(Path(folder, name).stat().st_size for folder, _, names in os.walk(path) for name in names)
