"""What each host of a job sees and runs: run folder, Heed's code, Python, and packages that affect results bitwise."""

import hashlib
import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

from files import importing

if TYPE_CHECKING:
    from cluster.group import WorkerGroup

PACKAGES = ("torch", "deepspeed", "accelerate", "ray", "transformers", "tokenizers", "datasets", "numpy")
SOURCES = frozenset({".py", ".cpp", ".h"})


@dataclass(frozen=True)
class Host:
    """One host, as one of its processes sees it."""

    name: str
    code: str  # folder of Heed's code
    versions: Mapping[str, str]  # by name: "heed" (a digest of its source files), "python", and each of PACKAGES

    def unlike(self, other: "Host") -> dict[str, str]:
        """Return those of this host's versions that differ from another host's."""
        return {name: installed for name, installed in self.versions.items() if installed != other.versions[name]}


@cache
def this_host() -> Host:
    """Describe this process. Call this early, since source files may change after their import; it is cached."""
    versions = {"heed": code_digest(importing.ROOT), "python": platform.python_version()}
    return Host(socket.gethostname(), str(importing.ROOT), versions | {name: _version(name) for name in PACKAGES})


def code_digest(root: Path) -> str:
    """Return the first 12 digits of a SHA-256 over the names and contents of Heed's source files below `root`."""
    digest = hashlib.sha256()
    for path in sorted(path for name in importing.PACKAGES for path in (root / name).rglob("*")):
        if path.suffix in SOURCES and path.is_file():  # an editor's lock is a link to nothing
            digest.update(f"{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _version(name: str) -> str:
    """Return the version of a package; "none" if it is not installed. torch's version is that of the imported code."""
    if name == "torch":
        import torch

        return str(torch.__version__)
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def inspect_hosts(group: "WorkerGroup", folder: Path) -> list[Host]:
    """Return the hosts of a group, each once, after checking that they see the run's folder and run the driver's code.

    Raises:
        ValueError: `folder` is missing on some hosts, or is a different folder there, or they run other code; the
            message names them.
    """
    here = this_host()
    with NamedTemporaryFile(dir=folder, prefix=".shared-") as marker:
        sightings = group.run("hosts", _look, folder / Path(marker.name).name)
    blind = sorted({host.name for host, sees_folder in sightings if not sees_folder})
    if blind:
        raise ValueError(
            f"--runs: {folder} is not the same folder on {', '.join(blind)} as on {here.name}; an absolute path on"
            " storage that all machines of the cluster share was expected"
        )
    hosts: list[Host] = []
    for host, _ in sightings:
        if host not in hosts:
            hosts.append(host)
    _require_same_code(hosts, here)
    return hosts


def _look(path: Path) -> tuple[Host, bool]:
    return this_host(), path.exists()


def require_code_of(driver: Host) -> None:
    """Check that this process runs the driver's code. Raises: ValueError if it does not."""
    _require_same_code([this_host()], driver)


def _require_same_code(hosts: list[Host], here: Host) -> None:
    others = [host for host in hosts if "heed" in host.unlike(here)]
    if any((host.name, host.code) == (here.name, here.code) for host in others):
        raise ValueError(f"Heed's code in {here.code} has changed since this run began; run the same command again")
    if others:
        stale = ", ".join(f"{host.name} has version {host.versions['heed']} in {host.code}" for host in others)
        raise ValueError(
            f"Heed's code differs between hosts: {here.name}, where the driver runs, has version"
            f" {here.versions['heed']} in {here.code}, and {stale}; update it there, or use `heed submit`, which sends"
            " the code"
        )


def difference(host: Host) -> str:
    """Return one line about a host whose package versions differ from the driver's."""
    here = this_host()
    there, expected = (", ".join(f"{name} {one.versions[name]}" for name in host.unlike(here)) for one in (host, here))
    return (
        f"{host.name} has {there}, and {here.name}, where the driver runs, {expected}: results may differ by rounding"
    )
