"""Packs a job for a cluster: this code, the job file and the files that it names, in one folder.

The code's dependencies are left out. The cluster's machines are prepared with the pins of constraints.txt
(docs/cluster.md): installing torch and compiling DeepSpeed's parts when a job starts would cost minutes per node and
could fail late.
"""

import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.machinery import PathFinder
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomli_w

from files.fields import no_such_file
from files.importing import PACKAGES, ROOT, user_folders
from files.rows import LOADERS
from heed.jobs.job import JobConfig
from heed.jobs.job_file import DEMO, job_values

SHIPPED_MIB = 100  # the head keeps shipped files in memory; larger ones belong in the shared folder


@dataclass
class Shipment:
    """What is sent to run a job: its file, complete with bases and `--set` values, and files of the current folder.

    The values are in the file and not in the command, because Ray shows the command to anyone who lists its jobs.
    """

    job_file: str  # the file's name
    job_text: str
    files: list[Path] = field(default_factory=list)  # relative to the current folder
    left_out: list[Path] = field(default_factory=list)  # files in named folders that are not sent

    @classmethod
    def of(cls, path: Path | None, overrides: Sequence[str], job: JobConfig) -> "Shipment":
        """Find what a job needs from this machine. Absolute paths refer to the cluster.

        Raises: ValueError for data that is missing, leads out of the current folder or (by a link) out of the folder
            that the job names, or is too large to send.
        """
        shipment = cls(Path(path or DEMO).name, tomli_w.dumps(job_values(path, overrides)))
        for key, name in named_paths(job):
            if not Path(name).is_absolute():
                shipment._add(key, name)
        return shipment

    def _add(self, key: str, name: str) -> None:
        path = Path(name)
        if not path.exists():
            if Path(name.removesuffix(".gz")).suffix in (*LOADERS, ".py", ".gguf"):
                raise ValueError(f"{key}: {name}: {no_such_file(name)}")
            return  # it is a hub id, or the run itself will write it
        if ".." in path.parts:
            raise ValueError(
                f"{key} is {name!r}, which leads out of the current folder and cannot be shipped; a path below it, or"
                " an absolute path on storage that all machines of the cluster share was expected"
            )
        files, left_out = [path], list[Path]()
        if path.is_dir():
            files = list(_files_below(key, path, (path.resolve(),), left_out))
        self.files = list(dict.fromkeys([*self.files, *files]))
        self.left_out = list(dict.fromkeys([*self.left_out, *left_out]))
        if sum(file.stat().st_size for file in self.files) > SHIPPED_MIB * 2**20:
            raise ValueError(
                f"{key}: with {name}, more than {SHIPPED_MIB} MiB would be shipped; put it on storage that all"
                " machines of the cluster share and give its absolute path"
            )
        _refuse_hiding(key, path, files)

    def command(self, options: Sequence[str], runs: Path) -> str:
        """Return `heed run` with its options as a shell command, to be run in the folder that `packed` makes.

        Raises: ValueError for a `runs` that is not absolute, because other machines cannot find it.
        """
        if not runs.is_absolute():
            raise ValueError(
                f"--runs is {str(runs)!r}; an absolute path on storage that all machines of the cluster share was"
                " expected"
            )
        return shlex.join(["python", "-m", "heed", "run", self.job_file, "--runs", str(runs), *options])

    @contextmanager
    def packed(self) -> Iterator[Path]:
        """Yield a folder in which `heed run` finds every file at the same path as on this machine."""
        with TemporaryDirectory(prefix="heed-submit-") as temporary:
            folder = Path(temporary)
            job_file = folder / self.job_file
            job_file.touch(mode=0o600)  # it may hold credentials; Ray keeps modes when it unpacks
            job_file.write_text(self.job_text, encoding="utf-8")
            for root, file in (*((Path(), file) for file in self.files), *((ROOT, file) for file in code_files())):
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / file, folder / file)
            yield folder


def code_files() -> list[Path]:
    """Returns the files of Heed's packages, relative to their root."""
    found = (path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file())
    return sorted(path.relative_to(ROOT) for path in found if path.parent.name != "__pycache__")


def _files_below(key: str, folder: Path, above: tuple[Path, ...], left_out: list[Path]) -> Iterator[Path]:
    """Yields the files in a named folder, but adds those whose names start with a dot, such as .env, to `left_out`.

    `above` are the real paths of the named folder and of the folders between it and `folder`.

    Raises: ValueError for a link to send that leads out of the named folder, to a folder that contains the link, or to
        nothing.
    """
    for path in sorted(folder.iterdir()):
        target = path.resolve()
        if path.name.startswith("."):
            left_out.append(path)
        elif path.is_symlink() and (not target.exists() or target in above or not target.is_relative_to(above[0])):
            raise ValueError(
                f"{key}: {path} is a link to {target}; in a folder that is sent, links to other files in that folder"
                " were expected: put the file there itself, or give an absolute path on storage that all machines of"
                " the cluster share"
            )
        elif any(part.startswith(".") for part in target.relative_to(above[0]).parts):
            left_out.append(path)
        elif path.is_dir():
            yield from _files_below(key, path, (*above, target), left_out)
        elif path.is_file():
            yield path
        else:
            left_out.append(path)  # a socket or a device


def _refuse_hiding(field: str, path: Path, files: Sequence[Path]) -> None:
    """Raise ValueError for a file that one of Heed's would replace, or that would hide an installed module. On the
    cluster, Python looks for modules in the job's folder first.
    """
    for file in files:
        heeds = ROOT / file
        if file.parts[0] in PACKAGES and heeds.is_file() and not file.samefile(heeds):
            raise ValueError(f"{field}: {file} has the same path as a file of Heed's code; another name was expected")
    name = path.stem
    if path.suffix != ".py" or len(path.parts) > 1 or name in PACKAGES:  # a package hides a module
        return
    if _is_installed(name):
        raise ValueError(f"{field}: {path} would hide the installed module {name!r}; another name was expected")


def _is_installed(module: str) -> bool:
    of_users = {"", str(Path.cwd()), *user_folders()}
    installed = [folder for folder in sys.path if folder not in of_users]
    return module in sys.stdlib_module_names or PathFinder.find_spec(module, installed) is not None


def _code_of(place: str) -> str:
    """Returns the file or folder with the code that MODULE:NAME or FILE.py:NAME names; "" if it is installed."""
    module = place.partition(":")[0]
    top = module.partition(".")[0]
    if module.endswith(".py"):
        return module
    found = None if top in PACKAGES or _is_installed(top) else PathFinder.find_spec(top, [str(Path.cwd())])
    return "" if found is None else top if found.submodule_search_locations else f"{top}.py"


def named_paths(job: JobConfig) -> Iterator[tuple[str, str]]:
    """Yields (field, value) for everything in a job that may name a file or a model."""
    for number, place in enumerate(job.custom_stages):
        if code := _code_of(place):
            yield f"custom_stages.{number}", code
    if job.world is not None and ":" in job.world.kind and (code := _code_of(job.world.kind)):
        yield "world.kind", code
    models = {f"{stage.name}.{field}" for stage in job.known_stages for field in stage.model_fields}
    functions = {f"{stage.name}.{field}" for stage in job.known_stages for field in stage.function_fields}
    functions.add("ppo.environment.environment")  # of verifiers, without a name of a function
    yield from _named_in(job.model_dump(), models, functions, "")


def _named_in(value: Any, models: set[str], functions: set[str], place: str) -> Iterator[tuple[str, str]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        field = f"{place}.{key}".removeprefix(".")
        if isinstance(item, Path) or ((key == "source" or any(fnmatchcase(field, of) for of in models)) and item):
            if "://" not in str(item):  # a judge behind an endpoint
                yield field, str(item)
        elif any(fnmatchcase(field, function) for function in functions) and item:
            if code := _code_of(item):
                yield field, code
        else:
            yield from _named_in(item, models, functions, field)
