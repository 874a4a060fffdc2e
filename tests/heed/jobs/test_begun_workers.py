"""Ranks that start while data is prepared: the first stage gets them, and a mistake in the data ends them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray

from cluster import local_ray
from cluster.config import ClusterConfig
from heed.jobs.recovery import Workers

ROOT = Path(__file__).parents[3]


@pytest.fixture
def _own_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield
    local_ray.close()


def process_id() -> int:
    return os.getpid()


@pytest.mark.nightly
@pytest.mark.usefixtures("_own_ray")
def test_a_stage_gets_the_ranks_that_were_begun(tmp_path: Path) -> None:
    workers = Workers([2, 1], tmp_path, ClusterConfig())
    workers.begin()
    assert workers.num_ranks() == {}
    ranks = set(workers().run("test", process_id))
    assert len(ranks) == 2
    assert set(workers().run("test", process_id)) == ranks
    workers.close()
    assert not ray.is_initialized()


@pytest.mark.nightly
@pytest.mark.usefixtures("_own_ray")
def test_ranks_that_were_begun_and_not_needed_end(tmp_path: Path) -> None:
    workers = Workers([1], tmp_path, ClusterConfig())
    workers.begin()
    workers.close()
    assert not ray.is_initialized()


def test_a_mistake_in_the_data_is_reported_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "One."}\n{"txt": "Two."}\n')
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [
        str(Path(sys.executable).with_name("heed")), "run", str(ROOT / "configs" / "jobs" / "debug.toml"),
        "--runs", str(tmp_path), "--set", f'pretrain.texts=[{{source = "{tmp_path / "texts.jsonl"}"}}]',
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=environment | {"MARK": str(tmp_path)}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "texts.jsonl: line 2: field 'text' is missing" in done.stderr
    assert "Traceback" not in done.stderr
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("MARK") == str(tmp_path):
                left.append(process)
    assert not psutil.wait_procs(left, timeout=60)[1]
