"""Heed's loop and the bare one do the same work, in turns."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState

from benchmarks.speed.overhead import Work, take_turns, works
from lm.config import ModelConfig
from training.config import EngineConfig, OptimizerConfig
from training.metrics import read_metrics
from training.objectives import CausalLMObjective

NUM_STEPS = 4


@pytest.fixture(autouse=True)
def _own_precision() -> Iterator[None]:
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


def tiny(shape: ModelConfig, **optimizer: object) -> Work:
    rows_BT = np.random.default_rng(0).integers(0, 288, (12, 9)).astype(np.int32)
    config = OptimizerConfig.model_validate({"learning_rate": 0.01, "schedule": "cosine", **optimizer})
    return Work(shape, config, CausalLMObjective(rows_BT), 4, 0.0, EngineConfig(precision="bf16", trackers=()))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_both_loops_end_with_the_same_weights_bit_for_bit(tiny_config: ModelConfig, tmp_path: Path, kind: str) -> None:
    work = tiny(tiny_config, kind=kind, weight_decay=0.1, warmup_steps=2)
    turns, weights = take_turns(work, NUM_STEPS, time.perf_counter, tmp_path)
    bare = turns.bare.model.state_dict()
    assert all(torch.equal(weight, bare[name]) for name, weight in weights.items())
    assert turns.bare.losses == [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl")]


def test_each_step_is_timed_once(tiny_config: ModelConfig, tmp_path: Path) -> None:
    """A clock that ticks at every look: from a step's begin to the next one's there is no other look at it."""
    ticks = iter(range(1000))
    turns, _ = take_turns(tiny(tiny_config), NUM_STEPS, lambda: float(next(ticks)), tmp_path)
    assert turns.heed_seconds == [1.0] * NUM_STEPS
    assert turns.bare_seconds == [1.0] * (NUM_STEPS + 1)
    assert turns.tokens == [4 * 8] * (NUM_STEPS + 1)


def test_the_work_is_the_demos() -> None:
    found = dict(works())
    assert [work.optimizer.kind for work in found.values()] == ["muon", "adamw", "adamw"]
    assert all((work.shape.hidden_size, work.batch_size) == (160, 16) for work in found.values())
    assert [work.dropout for work in found.values()] == [0.0, 0.0, 0.05]
