"""A job that had to continue with fewer workers uses a machine that has come back, between two stages."""

import os
import time
from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from cluster.connection import disconnect
from cluster.failures import WorkerLostError
from cluster.local import LocalCluster
from jobs.recovery import Workers

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
