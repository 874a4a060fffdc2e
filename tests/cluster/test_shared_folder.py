"""A run folder that some machine cannot see is an error."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.connection import connect, disconnect
from cluster.group import WorkerGroup, require_shared


@pytest.fixture(scope="module")
def group() -> Iterator[WorkerGroup]:
    connect(1)
    with WorkerGroup(1) as one:
        yield one
    disconnect()


def test_a_folder_that_all_see_is_left_as_it_was(group: WorkerGroup, tmp_path: Path) -> None:
    require_shared(group, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_one_machine_is_refused(
    group: WorkerGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A relative path means another folder for workers that were started elsewhere.
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    with pytest.raises(ValueError, match=rf"^--runs: runs is not the same folder on {socket.gethostname()} as on"):
        require_shared(group, Path("runs"))
