"""A run folder that some machine cannot see, or a different version of Heed's code there, is an error. Differing
packages are reported.
"""

import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from cluster.connection import connect, disconnect
from cluster.group import WorkerGroup
from cluster.hosts import PACKAGES, code_digest, inspect_hosts, this_host
from files import importing
from heed.jobs.recovery import Workers
from training.notices import speaking_through

HERE = socket.gethostname()


@pytest.fixture
def group() -> Iterator[WorkerGroup]:
    connect(1)
    with WorkerGroup(1) as one:
        yield one


@pytest.fixture(scope="module", autouse=True)
def _ray_ends() -> Iterator[None]:
    yield
    disconnect()


def use_code(folder: Path) -> None:
    """Make this process look as if it had imported Heed from another folder."""
    importing.ROOT = folder


def find_first(folder: Path) -> None:
    """Let this process look for packages in a folder before all others."""
    sys.path.insert(0, str(folder))


def stale_copy(folder: Path) -> Path:
    """Returns a folder with Heed's code, one file of which is older."""
    for package in importing.PACKAGES:
        shutil.copytree(importing.ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    engine = folder / "training" / "engine.py"
    engine.write_text(engine.read_text() + "\n# an older line\n")
    return folder


def test_a_folder_that_all_see_is_left_as_it_was(group: WorkerGroup, tmp_path: Path) -> None:
    assert inspect_hosts(group, tmp_path) == [this_host()]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_one_machine_is_refused(
    group: WorkerGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Workers that were started elsewhere resolve a relative path to a different folder.
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    with pytest.raises(ValueError, match=rf"^--runs: runs is not the same folder on {HERE} as on {HERE};"):
        inspect_hosts(group, Path("runs"))


def test_a_stale_checkout_is_refused(group: WorkerGroup, tmp_path: Path) -> None:
    stale = stale_copy(tmp_path / "heed")
    assert code_digest(stale) != code_digest(importing.ROOT)
    group.run("start", use_code, stale)
    with pytest.raises(ValueError, match=r"^Heed's code differs between hosts: ") as caught:
        inspect_hosts(group, tmp_path)
    said = str(caught.value)
    assert f"{HERE} has version {code_digest(stale)} in {stale}; update it there" in said
    assert f"has version {code_digest(importing.ROOT)} in {importing.ROOT}, and " in said
    assert "\n" not in said


def test_code_that_changed_since_the_run_began_is_refused(
    group: WorkerGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that starts after a loss would import other code than the ranks before it."""
    copy = stale_copy(tmp_path / "heed")
    monkeypatch.setattr(importing, "ROOT", copy)
    this_host.cache_clear()
    try:
        this_host()
        (copy / "training" / "engine.py").write_text("")
        group.run("start", use_code, copy)
        with pytest.raises(ValueError, match=rf"^Heed's code in {copy} has changed since this run began; run the same"):
            inspect_hosts(group, tmp_path)
    finally:
        this_host.cache_clear()


def test_only_source_files_count_as_code(tmp_path: Path) -> None:
    copy = stale_copy(tmp_path)
    before = code_digest(copy)
    (copy / "lm" / "__pycache__").mkdir()
    (copy / "lm" / "__pycache__" / "model.pyc").write_text("compiled")
    (copy / "configs" / "jobs" / "mine.toml").write_text("seed = 1")
    (copy / "lm" / ".#model.py").symlink_to("somebody@host.1234")  # an editor's lock
    assert code_digest(copy) == before
    (copy / "lm" / "native" / "kernels.cpp").rename(copy / "lm" / "native" / "renamed.cpp")
    assert code_digest(copy) != before


def test_other_packages_are_reported_once_and_recorded(
    group: WorkerGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site" / "numpy-1.0.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.0.0\n")
    group.run("start", find_first, tmp_path / "site")
    workers = Workers([1], tmp_path, ClusterConfig())
    monkeypatch.setattr("heed.jobs.recovery.WorkerGroup", lambda *_, **__: group)
    said: list[str] = []
    with speaking_through(said.append):
        workers.start()
        workers.extra_group("more", 1)
        workers.extra_group("sampler", 1, python="/opt/vllm/bin/python")
    own = this_host().versions["numpy"]
    assert said == [
        f"{HERE} has numpy 1.0.0, and {HERE}, where the driver runs, numpy {own}: results may differ by rounding"
    ]
    assert workers.hosts == {HERE: {"numpy": "1.0.0"}, f"{HERE} /opt/vllm/bin/python": {"numpy": "1.0.0"}}


def test_the_versions_are_those_of_what_runs() -> None:
    assert {*this_host().versions} == {"heed", "python", *PACKAGES}
    assert this_host().versions["torch"] == sys.modules["torch"].__version__
    assert this_host().versions["heed"] == code_digest(importing.ROOT)
