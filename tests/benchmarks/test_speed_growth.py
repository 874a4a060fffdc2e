"""Exponents: of laws known by construction, and of real work at tiny sizes."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate.state import AcceleratorState

from benchmarks.speed import growth
from benchmarks.speed.growth import SWEEPS, Point, fit, size_of, sweep


@pytest.fixture(autouse=True)
def _own_precision() -> Iterator[None]:
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


def test_a_power_law_is_found() -> None:
    sizes = [1, 3, 10, 50]
    found = fit(sizes, [0.2 * size**1.5 for size in sizes])
    assert [found[name] for name in ("exponent", "lower", "upper")] == pytest.approx([1.5] * 3, abs=1e-6)
    assert found["scale"] == pytest.approx(0.2)
    with pytest.raises(ValueError, match="2 points; at least 3"):
        fit([1, 2], [1, 2])


def test_the_interval_covers_a_noisy_law_as_often_as_it_says() -> None:
    rng, sizes = np.random.default_rng(0), np.array([1, 2, 4, 8, 16, 32])
    found = [fit(sizes, sizes**0.8 * np.exp(rng.normal(0, 0.1, 6))) for _ in range(1000)]
    covered = np.mean([law["lower"] <= 0.8 <= law["upper"] for law in found])
    assert 0.93 <= covered <= 0.97


def test_sizes_span_a_million_to_three_hundred_million() -> None:
    sizes = [size_of("parameters", point) for point in SWEEPS["training step"]["parameters"]]
    assert 1e6 < sizes[0] < 1.5e6
    assert 2.9e8 < sizes[-1] < 3.3e8
    for axes in SWEEPS.values():
        assert {axis for axis, points in axes.items() if len({size_of(axis, point) for point in points}) < 6} == set()


@pytest.mark.parametrize("work", list(SWEEPS))
def test_real_work_is_swept_and_drawn(work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [Point(32, 1, batch, 8) for batch in (1, 4, 16)]
    swept = sweep(work, "rows", points, 2, time.perf_counter)
    assert swept["sizes"] == [1, 4, 16]
    assert [len(runs) for runs in swept["seconds"]] == [2, 2, 2]
    assert all(second > 0 for runs in swept["seconds"] for second in runs)
    monkeypatch.setattr(growth, "PLOT", tmp_path / "growth.svg")
    machine = {"cpu": "a CPU", "cores": 2, "amx_bf16": True, "python": "3.11", "torch": "2.13.0"}
    found: dict[str, Any] = {"machine": machine, "threads": 2, "seconds": "seconds", "rounds": 2}
    text = growth.markdown(found | {"works": {work: {"rows": swept}}})
    assert f"| {work} | rows | 1, 16 |" in text
    assert "<svg" in growth.PLOT.read_text()
