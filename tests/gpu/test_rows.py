"""Every kind of row of `python -m benchmarks.gpu` runs, at tiny sizes: all that PPO does, and the ceilings."""

import json

import pytest
import torch

from benchmarks.gpu import ceiling
from benchmarks.gpu.device import describe
from benchmarks.gpu.measure import TINY_COPIED_BYTES, measure
from benchmarks.gpu.rows import TINY_ROWS, Row
from tests.tiers import in_ci

CUDA = torch.device("cuda")


@pytest.mark.parametrize("row", in_ci(TINY_ROWS, TINY_ROWS[:-1]), ids=lambda row: row.kind)
def test_a_row_is_measured(row: Row) -> None:
    torch.cuda.reset_peak_memory_stats()
    found = measure(row, CUDA)
    assert found["peak_bytes"] > 0
    assert all(value >= 0 for name, value in found.items() if not name.endswith("decoding_seconds"))
    json.dumps(found)


def test_ceilings_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling, "SHORTEST_SECONDS", 0.001)
    rates = ceiling.rates(TINY_ROWS, CUDA, TINY_COPIED_BYTES)
    assert min(rates.values()) > 0
    assert describe(CUDA)["device"] == torch.cuda.get_device_name()
