"""Machines that come back: after a loss in the start of a group, and for a job that had to go on with fewer workers."""

import os
import threading
import time
from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from cluster.connection import disconnect, living_nodes
from cluster.failures import WorkerLostError
from cluster.group import WorkerGroup
from cluster.local_cluster import LocalCluster
from heed.jobs.recovery import Workers

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
            cluster.kill_node_of(pids[1])
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


@pytest.mark.long
def test_a_machine_that_is_lost_while_the_first_group_starts_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalCluster(num_nodes=2, cpus=1) as cluster:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)

        def lose_a_node(group: WorkerGroup, _folder: Path) -> None:
            cluster.kill_node_of(group.run("start", os.getpid)[1])
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
            coming_back.start()
            assert workers().num_workers == 2
        finally:
            coming_back.cancel()
            workers.close()
            disconnect()


def cluster_cpus() -> float:
    return sum(node.get("CPU", 0.0) for node in living_nodes())
