"""`precision = "auto"` depends on what the computing machines are fast at, not on the driver's machine."""

import pytest

from cluster.connection import ON_CPU, connect, disconnect, fast_precision, resolve_precision
from training.config import EngineConfig


def test_the_workers_machines_decide_and_not_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    here = fast_precision(False)
    other = {"bf16": "fp32", "fp32": "bf16"}[here]
    connect(1)
    try:
        monkeypatch.setenv("RAY_ADDRESS", "auto")
        # The driver's machine has other units than the workers' machines.
        monkeypatch.setattr("cluster.connection.cpu_multiplies_bf16", lambda: other == "bf16")
        assert fast_precision(False) == other
        found = resolve_precision(EngineConfig(), ON_CPU, 1, 120.0)
    finally:
        disconnect()
    assert found.precision == here
    assert resolve_precision(EngineConfig(precision=other), ON_CPU, 1, 120.0).precision == other
