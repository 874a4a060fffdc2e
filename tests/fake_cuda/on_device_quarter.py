"""The steps of benchmarks/gpu/quarter on the fake device, with the code that only a GPU runs.

Run by test_fake_cuda.py. Left out: `environment` (its products are 8192 wide), compiled models, ZeRO, pinned memory.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._autograd import DeviceType

from benchmarks.gpu.quarter import profiles, training_steps
from benchmarks.gpu.quarter.context import QWEN, Context, Drawn
from benchmarks.gpu.quarter.steps import RUN
from lm.source import RandomInit, Rows

# Figures that a step on a GPU notes, all positive.
FIGURES = {
    "rows": ("rows128_bandwidth_share", "rows512_recordings", "rows256_decode_kernels", "rows512_peak_gib"),
    "mixtures": (
        "training_tokens_per_second", "training_step_kernels", "sampling_ms_per_token", "sinks_training_step_kernels",
        "sinks_sampling_ms_per_token",
    ),
    "continuous": ("tokens_per_second", "updates", "equal_share"),
    "draws": ("tested_held_gib", "tested_scoring_kernels", "untested_scoring_kernels"),
    "kept_steps": ("kept_planned_gib_fast_zero0", "recorded_held_gib"),
    "recorded": ("recorded_packed_tokens_per_second", "recorded_packed_step_kernels", "recorded_packed_peak_gib"),
}  # fmt: skip


class Profile:
    """A profiler that finds a product of 1.5 ms, and its launch on the CPU. PyTorch's needs CUDA's library."""

    def __init__(self, **_: object) -> None: ...

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: object) -> None: ...

    def events(self) -> list[Any]:
        found = (("nvjet_tst_bf16", DeviceType.CUDA, 1500.0), ("cudaLaunchKernel", DeviceType.CPU, 9.0))
        return [
            SimpleNamespace(name=name, device_type=kind, time_range=SimpleNamespace(elapsed_us=lambda us=us: us))
            for name, kind, us in found
        ]


def _drawn_on_a_cpu(self: Drawn[Any], rows: Rows | None = None) -> Iterator[tuple[str, Tensor]]:
    return RandomInit(self.build, self.seed).tensors(rows)  # the fake device has no generator of random numbers


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a step and returns its figures."""
    monkeypatch.setattr(Drawn, "tensors", _drawn_on_a_cpu)
    monkeypatch.setattr(profiles, "profile", Profile)

    def run_step(name: str) -> dict[str, Any]:
        context = Context(name, torch.device("cuda", 0), True, tmp_path / f"{name}.json")
        if name == "recorded":  # a part of `sft_05b`, whose others compile
            sizes = training_steps.sizes_of(context, QWEN, 16, 4)
            training_steps.train(context, sizes, "recorded_packed_", record_micro_batches=True)
        else:
            RUN[name](context)
        return dict(json.loads(context.path.read_text()))

    return run_step


@pytest.mark.parametrize("name", FIGURES)
def test_a_step_measures_a_gpu(name: str, run: Any) -> None:
    found = run(name)
    assert [key for key in found if key.endswith("_failed")] == []
    assert [key for key in FIGURES[name] if not found[key] > 0] == []


def test_only_the_devices_time_counts_as_kernels(run: Any) -> None:
    found = run("rows")
    assert found["rows128_decode_kernels"] == 1
    assert found["rows128_decode_ms_by_kind"] == {"product": 1.5}
    assert found["rows128_decode_longest_ms"] == {"nvjet_tst_bf16": 1.5}
