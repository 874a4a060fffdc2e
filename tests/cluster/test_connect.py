"""Errors that are raised before Ray is started."""

import os

import pytest
import ray

from cluster.connection import connect
from cluster.group import WorkerGroup


def test_more_workers_than_cores_are_refused_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cores = os.cpu_count() or 1
    for refused in (connect, WorkerGroup):
        with pytest.raises(ValueError, match=rf"^workers is {cores + 3}; this machine has {cores} cores"):
            refused(cores + 3)
    assert not ray.is_initialized()
