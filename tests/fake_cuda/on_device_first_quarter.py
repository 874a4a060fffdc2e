"""The steps of benchmarks/gpu/first_quarter on the fake device, with the code that only a GPU runs.

Run by test_fake_cuda.py. Left out: `environment` (its products are 8192 wide), compiled blocks, ZeRO, pinned memory.
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

from benchmarks.gpu.first_quarter import kernels
from benchmarks.gpu.first_quarter.context import Context, Drawn
from benchmarks.gpu.first_quarter.steps import STEPS
from lm.source import RandomInit, Rows

# Figures that a step on a GPU notes, all positive.
FIGURES = {
    "attention": ("0.5B_causal_forward_tflops", "8B_packed_forward_tflops", "1.3B_decode_two_products"),
    "sft_05b": ("packed_tokens_per_second", "packed_peak_gib", "packed_step_kernels", "plain_mfu"),
    "sft_13b": ("packed_tokens_per_second", "packed_planned_gib_zero0"),
    "checkpoint": ("gpt2_tokens_per_second", "gpt2_checkpoint_gib", "gpt2_load_seconds"),
    "generation_05b": ("kept_bandwidth_share", "recordings", "decode_kernels", "fixed_ms_per_token", "peak_gib"),
    "generation_8b": ("kept_bandwidth_share", "prompt_tflops"),
    "peers": ("train_tokens_per_second", "train_kernels", "generate_tokens_per_second"),
    "ppo_05b": ("held_gib", "planned_gib_fast_zero0"),
}


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
    monkeypatch.setattr(kernels, "profile", Profile)

    def run_step(name: str) -> dict[str, Any]:
        context = Context(name, torch.device("cuda", 0), True, tmp_path / f"{name}.json")
        STEPS[name](context)
        return dict(json.loads(context.path.read_text()))

    return run_step


@pytest.mark.parametrize("name", FIGURES)
def test_a_step_measures_a_gpu(name: str, run: Any) -> None:
    found = run(name)
    assert [key for key in found if key.endswith("_failed")] == []
    assert [key for key in FIGURES[name] if not found[key] > 0] == []


def test_only_the_devices_time_counts_as_kernels(run: Any) -> None:
    found = run("generation_8b")
    assert found["decode_kernels"] == 1
    assert found["decode_ms_by_kind"] == {"product": 1.5}
    assert found["decode_longest_ms"] == {"nvjet_tst_bf16": 1.5}
