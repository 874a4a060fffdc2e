"""Machines that come back: after a loss in the start of a group, and for a job that had to go on with fewer workers."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from cluster.connection import disconnect, living_nodes
from cluster.failures import WorkerLostError
from cluster.group import WorkerGroup
from heed.jobs.recovery import Workers
from research.chaos.local_cluster import LocalCluster
from training.notices import speaking_through

ROOT = Path(__file__).parents[3]
CONFIG = ClusterConfig(wait_for_nodes_seconds=2)


@pytest.mark.long
def test_a_machine_that_comes_back_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    with LocalCluster(num_nodes=2, cpus=1) as cluster:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        workers = Workers([2, 1], tmp_path, CONFIG)
        try:
            pids = workers().run("sft", os.getpid)
            assert len(pids) == 2
            cluster.kill_node(cluster.node_of(pids[1]))
            with pytest.raises(WorkerLostError, match=r"^sft: rank 1 of 2 was lost"):
                workers().run("sft", time.sleep, 60)
            workers.abandon()
            assert workers().num_workers == 1
            workers.take_back()  # nothing has come back yet
            assert workers().num_workers == 1
            cluster.fill()
            end = time.monotonic() + 90  # a machine under load may take longer than the config's wait to start workers
            while workers().num_workers < 2:
                assert time.monotonic() < end, "the machine that came back is not used"
                workers.take_back()
        finally:
            workers.close()
            disconnect()


@pytest.mark.nightly
def test_a_machine_that_is_lost_while_the_first_group_starts_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalCluster(num_nodes=2, cpus=1) as cluster:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)

        def lose_a_node(group: WorkerGroup, _folder: Path) -> None:
            cluster.kill_node(cluster.node_of(group.run("start", os.getpid)[1]))
            group.run("start", time.sleep, 60)

        workers = Workers([2], tmp_path, ClusterConfig(wait_for_nodes_seconds=90))
        coming_back = threading.Timer(3, cluster.fill)
        try:
            with monkeypatch.context() as lossy:
                lossy.setattr("heed.jobs.recovery.inspect_hosts", lose_a_node)
                with pytest.raises(WorkerLostError, match=r"^start: rank . of 2 was lost"):
                    workers()
            workers.abandon()
            end = time.monotonic() + 60  # until Ray knows: the cluster is then too small for the group
            while cluster_cpus() > 1:
                assert time.monotonic() < end, "Ray does not miss the node"
                time.sleep(0.1)
            notices: list[str] = []
            coming_back.start()
            with speaking_through(notices.append):
                assert workers().num_workers == 2
            lost = r"the cluster's 1 machine has room for 1; lost: \S+ \(127\.0\.0\.[23]\) since \d\d:\d\d:\d\d"
            assert re.fullmatch(rf"waiting up to \d+ s for places of 2 workers with 1 CPU each: {lost}", notices[0])
        finally:
            coming_back.cancel()
            workers.close()
            disconnect()


OTHER_JOB = """
import sys
from cluster.config import ClusterConfig
from cluster.group import WorkerGroup
from training.notices import speak_through
speak_through(lambda notice: print(notice, flush=True))
with WorkerGroup(1, ClusterConfig(wait_for_nodes_seconds=300)):
    print("placed", flush=True)
"""


@pytest.mark.nightly
def test_a_job_that_recovers_keeps_its_places_from_a_job_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank is killed, another is stopped, and a machine is lost and comes back."""
    log = tmp_path / "other.log"
    config = ClusterConfig(wait_for_nodes_seconds=60, silence_seconds=5, start_seconds=60)
    with LocalCluster(num_nodes=2, cpus=1) as cluster, log.open("w") as output:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        workers = Workers([2], tmp_path, config)
        try:
            pids = workers().run("sft", os.getpid)
            other = subprocess.Popen([sys.executable, "-c", OTHER_JOB], cwd=ROOT, stdout=output, stderr=output)
            while "other jobs hold the rest" not in log.read_text():
                assert other.poll() is None, log.read_text()
                time.sleep(0.05)
            for strike in (kill, stop, lambda worker: cluster.kill_node(cluster.node_of(worker))):
                strike(pids[1])
                with pytest.raises(WorkerLostError, match=r"^sft: rank 1 of 2 was lost"):
                    workers().run("sft", time.sleep, 60)
                workers.abandon()
                cluster.fill()
                pids = workers().run("sft", os.getpid)
                assert "placed" not in log.read_text().split(), strike
            workers.close()
            assert other.wait(timeout=60) == 0
            assert log.read_text().split()[-1] == "placed"
        finally:
            workers.close()
            disconnect()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def cluster_cpus() -> float:
    return sum(node.get("CPU", 0.0) for node in living_nodes())
