"""`precision = "auto"` depends on what the computing machines are fast at, not on the driver's machine."""

import pytest

from cluster.connection import ON_CPU, disconnect, fast_precision, resolve_precision
from research.chaos.local_cluster import LocalCluster
from training.config import EngineConfig


@pytest.mark.long
def test_the_workers_machines_decide_and_not_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    here = fast_precision(False)
    other = {"bf16": "fp32", "fp32": "bf16"}[here]
    with LocalCluster(num_nodes=1, cpus=1) as cluster:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        # The driver's machine has other units than the workers' machines.
        monkeypatch.setattr("cluster.connection.cpu_multiplies_bf16", lambda: other == "bf16")
        assert fast_precision(False) == other
        try:
            found = resolve_precision(EngineConfig(), ON_CPU, 1, 120.0)
        finally:
            disconnect()
    assert found.precision == here
    assert resolve_precision(EngineConfig(precision=other), ON_CPU, 1, 120.0).precision == other
