"""Checks that every node sees the run folder: ranks write to it wherever they are placed."""

import socket
from pathlib import Path
from tempfile import NamedTemporaryFile

from cluster.group import WorkerGroup


def require_shared(group: WorkerGroup, folder: Path) -> None:
    """Raises ValueError naming the machines on which `folder` is missing or a different folder."""
    with NamedTemporaryFile(dir=folder, prefix=".shared-") as marker:
        found = group.run("run folder", _sees, folder / Path(marker.name).name)
    blind = sorted({host for host, seen in found if not seen})
    if blind:
        raise ValueError(
            f"--runs: {folder} is not the same folder on {', '.join(blind)} as on {socket.gethostname()}; an absolute"
            " path on storage that all machines of the cluster share was expected"
        )


def _sees(path: Path) -> tuple[str, bool]:
    return socket.gethostname(), path.exists()
