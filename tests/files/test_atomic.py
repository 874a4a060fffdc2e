"""A kill or an error in the middle of a write leaves the old file or folder, and what is left behind is recognised. Two
runs never work in one folder at a time.
"""

import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from files.atomic import (
    atomic_file,
    atomic_folder,
    lock,
    remove_folder,
    remove_unfinished,
    temporary_path,
    write_json,
    write_text,
)
from training.notices import in_one_line

WRITE_FILE = """
with atomic_file(target) as temporary, temporary.open("w") as file:
    file.write("half of it")
    file.flush()
    wait()
"""
WRITE_FOLDER = """
with atomic_folder(target) as temporary:
    (temporary / "first").write_text("half of it")
    wait()
"""
REMOVE_FOLDER = """
import shutil
removes = shutil.rmtree  # while the target is there, it removes what the first kill has left
shutil.rmtree = lambda folder: removes(folder) if target.exists() else wait()
remove_folder(target)
"""
PROGRAM = """
import sys, time
from pathlib import Path
from files.atomic import atomic_file, atomic_folder, remove_folder
target = Path(sys.argv[1])
def wait():
    print("written", flush=True)
    time.sleep(600)
"""


def kill_in_the_middle(write: str, target: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", PROGRAM + write, str(target)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == "written\n"
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()


def test_a_kill_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "results.json"
    write_json(target, {"loss": 1.5})
    kill_in_the_middle(WRITE_FILE, target)
    assert json.loads(target.read_text()) == {"loss": 1.5}
    assert sorted(os.listdir(tmp_path)) == [".writing-results.json", "results.json"]
    write_json(target, {"loss": 0.5})
    assert json.loads(target.read_text()) == {"loss": 0.5}
    assert os.listdir(tmp_path) == ["results.json"]


def test_a_kill_in_the_middle_leaves_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with atomic_folder(target) as temporary:
        (temporary / "second").write_text("whole")
    kill_in_the_middle(WRITE_FOLDER, target)
    assert os.listdir(target) == ["second"]
    assert sorted(os.listdir(tmp_path)) == [".writing-model", "model"]
    with atomic_folder(target) as temporary:
        assert os.listdir(temporary) == []  # nothing is left of the killed write
        (temporary / "third").write_text("whole")
    assert os.listdir(target) == ["third"]
    assert os.listdir(tmp_path) == ["model"]


def test_a_kill_in_the_middle_of_a_removal_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    target = tmp_path / "step-000002"
    for _ in range(2):  # the second finds what the first has left
        target.mkdir()
        (target / "weights").write_text("whole")
        kill_in_the_middle(REMOVE_FOLDER, target)
        assert os.listdir(tmp_path) == [".writing-step-000002"]
    target.mkdir()
    remove_folder(target)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("write", [WRITE_FILE, WRITE_FOLDER], ids=["file", "folder"])
def test_what_a_kill_leaves_behind_is_recognised(tmp_path: Path, write: str) -> None:
    kill_in_the_middle(write, tmp_path / "new")
    assert os.listdir(tmp_path) == [temporary_path(tmp_path / "new").name]
    (tmp_path / "other").touch()
    remove_unfinished(tmp_path)
    assert os.listdir(tmp_path) == ["other"]


@pytest.mark.parametrize("write", [atomic_file, atomic_folder])
def test_an_error_leaves_the_old_contents_and_no_temporary(
    tmp_path: Path, write: Callable[[Path], AbstractContextManager[Path]]
) -> None:
    (tmp_path / "target").write_text("old")
    with pytest.raises(OSError, match="the disk is full"), write(tmp_path / "target") as temporary:  # noqa: PT012
        (temporary / "part" if write is atomic_folder else temporary).write_text("half of it")
        raise OSError("the disk is full")
    assert (tmp_path / "target").read_text() == "old"
    assert os.listdir(tmp_path) == ["target"]


@pytest.mark.parametrize("write", [lambda path: write_text(path, "text"), lambda path: write_json(path, {})])
def test_a_folder_that_has_disappeared_is_not_created_again(tmp_path: Path, write: Callable[[Path], None]) -> None:
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "away" / "file")
    assert not (tmp_path / "away").exists()


def test_a_write_that_finds_no_space_names_its_file(tmp_path: Path) -> None:
    """The system reports it by a descriptor. A limit on the size of files stands in for a full disk."""
    path, limits = tmp_path / "rows.json", resource.getrlimit(resource.RLIMIT_FSIZE)
    write_json(path, "old")
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as full:
            write_json(path, "x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = f"File too large (EFBIG): {path}; raise the limit on the size of files and run the same command again"
    assert in_one_line(full.value) == said
    assert json.loads(path.read_text()) == "old"
    assert [*tmp_path.iterdir()] == [path]


def test_json_is_indented_and_ends_with_a_newline(tmp_path: Path) -> None:
    write_json(tmp_path / "file.json", {"a": [1]})
    assert (tmp_path / "file.json").read_text() == '{\n  "a": [\n    1\n  ]\n}\n'


HOLDER = """
import sys, time
from pathlib import Path
from files.atomic import lock
with lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_run_is_refused_with_the_first_ones_process(tmp_path: Path) -> None:
    who = f"{os.getpid()} on {socket.gethostname()}"
    with lock(tmp_path), pytest.raises(ValueError, match=rf"process {who} is running this job"), lock(tmp_path):
        pass
    with lock(tmp_path):
        assert (tmp_path / "run.lock").read_text() == who


def test_a_file_system_without_locks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre mounted without -o flock is such a file system."""

    def flock(_file: object, _operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    words = (
        r"^--runs: .* cannot lock files \(Function not implemented\), .*; mount it with locks .* or use another --runs$"
    )
    with pytest.raises(ValueError, match=words), lock(tmp_path):
        pass


def test_a_killed_run_locks_nothing(tmp_path: Path) -> None:
    locker = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert locker.stdout is not None
    try:
        assert locker.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"process {locker.pid}"), lock(tmp_path):
            pass
    finally:
        locker.send_signal(signal.SIGKILL)
        locker.wait()
    with lock(tmp_path):
        pass
