"""Each rank's resources on its machine, with a Ray that believes in three GPUs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from cluster.config import ClusterConfig
from cluster.connection import (
    ON_CPU,
    ON_GPU,
    NoPlaceError,
    choose_bundle,
    disconnect,
    most_ranks_per_node,
    require_machine,
    require_room,
)
from cluster.group import WorkerGroup
from cluster.worker import usable_cores
from heed.jobs.job_file import load_job
from heed.jobs.pipeline import run_job
from heed.jobs.recovery import Workers
from tests.rays import start_ray

DEBUG = Path(__file__).parents[2] / "configs" / "jobs" / "debug.toml"
ON_CPUS = ClusterConfig(use_gpus=False)


@pytest.fixture(scope="module")
def three_gpus() -> Iterator[None]:
    start_ray(num_cpus=6, num_gpus=3)
    yield
    disconnect()


def visible() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.long
@pytest.mark.usefixtures("three_gpus")
def test_more_ranks_than_gpus_are_refused_unless_all_run_on_cpus() -> None:
    with pytest.raises(NoPlaceError, match=r"4 ranks, .* there are 3 GPUs; .* cluster.use_gpus = false"):
        WorkerGroup(4)
    with WorkerGroup(1, ON_CPUS) as group:
        assert group.run("look", visible) == [""], "a rank without a GPU of its own sees those of others"


@pytest.mark.usefixtures("three_gpus")
def test_each_rank_on_a_gpu_sees_its_own() -> None:
    with WorkerGroup(2) as group:
        assert len(set(group.run("look", visible)) & {"0", "1", "2"}) == 2


@pytest.mark.usefixtures("three_gpus")
def test_places_of_all_groups_are_counted_together(tmp_path: Path) -> None:
    """Two learners, a generator and a scorer need four GPUs, although each group alone would find enough."""
    with pytest.raises(NoPlaceError, match=r"4 ranks, each with a GPU of its own, and there are 3 GPUs"):
        Workers([2], tmp_path, ClusterConfig(), num_extra_ranks=2).check()
    assert require_room(4, use_gpus=False) == ON_CPU
    assert require_room(3, use_gpus=True) == ON_GPU


@pytest.mark.long
@pytest.mark.usefixtures("three_gpus")
def test_what_ranks_run_on_is_decided_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a machine is lost, the cluster may show no GPU at all; the job waits for it and takes no CPUs."""
    workers = Workers([1], tmp_path, ClusterConfig(wait_for_nodes_seconds=20))
    workers()
    workers.abandon()
    monkeypatch.setattr("cluster.group.cluster_gpus", lambda: 0.0)
    assert workers().run("look", visible) != [""]
    workers.abandon()


def test_without_a_cluster_the_machine_is_checked_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if ray.is_initialized():
        disconnect()
    cores = os.cpu_count() or 1
    apart = ["ppo.placement.kind=disaggregated", f"ppo.placement.num_generators={cores}", "ppo.rollout_batch_size=16"]
    job = load_job(DEBUG, apart)
    with pytest.raises(ValueError, match=rf"workers is {job.num_ranks}; this machine has {cores} cores"):
        run_job(job, tmp_path)
    assert not (tmp_path / "debug" / "world").exists()
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ValueError, match="2 ranks, each with a GPU of its own, and there are 1 GPUs"):
        require_machine(2, use_gpus=True)
    assert require_machine(1, use_gpus=True) == ON_GPU
    assert choose_bundle(2, 0, use_gpus=True) == ON_CPU


def test_threads_follow_affinity_and_the_containers_limit(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path) == cores  # without control groups
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path) == cores
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert usable_cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_cores(tmp_path) == 1
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("100000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == 1
    one = {min(os.sched_getaffinity(0))}  # which need not be core 0
    pinned = f"import os; os.sched_setaffinity(0, {one}); from cluster import worker; print(worker.usable_cores())"
    found = subprocess.run([sys.executable, "-c", pinned], capture_output=True, text=True, cwd=DEBUG.parents[2])
    assert found.stdout.strip() == "1", found.stderr


def test_threads_do_not_depend_on_where_ranks_are_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that is placed differently after a loss sums in the same order, so its bits are the same."""
    nodes = [{"CPU": 2.0}, {"CPU": 2.0}, {"CPU": 1.0}]
    monkeypatch.setattr("cluster.connection.living_nodes", lambda: nodes)
    assert [most_ranks_per_node(num, {"CPU": 1.0}) for num in (1, 2, 4)] == [1, 2, 2]
    monkeypatch.setattr("cluster.connection.living_nodes", lambda: [{"CPU": 128.0, "GPU": 8.0}] * 8)
    assert most_ranks_per_node(64, {"CPU": 1.0, "GPU": 1.0}) == 8
