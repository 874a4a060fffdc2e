"""If one rank has no finite gradient, all ranks skip the step, at every ZeRO stage, and training continues.

This file is also the ranks' program: `python test_skipped_steps.py FOLDER`.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lm.config import ModelConfig, Precision
from lm.model import LanguageModel
from lm.source import RandomInit
from tests.models import full_weights
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.engine import Engine
from training.loop import LoopConfig, TrainingLoop
from training.metrics import read_metrics
from training.objectives import CausalLMObjective
from training.packing import IntArray

pytestmark = pytest.mark.long

CONFIG = ModelConfig(
    vocab_size=32,
    max_position_embeddings=24,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=24,
)
OPTIMIZER = OptimizerConfig(learning_rate=0.02, schedule="constant", eps=1e-4)
ROWS = np.random.default_rng(0).integers(0, 32, (12, 9)).astype(np.int32)
NUM_STEPS, BATCH, POISONED_STEP = 4, 4, 2
CASES: list[tuple[int, Precision]] = [(0, "fp32"), (1, "fp32"), (1, "bf16"), (2, "fp32"), (3, "fp32"), (3, "bf16")]


class Poisoned(CausalLMObjective):
    """The loss of the last row of one step's batch is NaN; with two ranks, only one of them sees it."""

    def __init__(self, num_ranks: int, rank: int) -> None:
        super().__init__(ROWS)
        self.num_passes, self.poison = 0, -1
        per_step = BATCH // num_ranks
        if rank == num_ranks - 1:
            self.poison = POISONED_STEP * per_step - 1

    def loss(
        self, model: LanguageModel, rows: IntArray, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        loss, extra = super().loss(model, rows, device, seed)
        is_bad = self.num_passes == self.poison
        self.num_passes += 1
        return loss * (torch.nan if is_bad else 1.0), extra


def train(folder: Path, zero_stage: int, precision: Precision, num_ranks: int, rank: int) -> dict[str, Any]:
    source = RandomInit(lambda: LanguageModel(CONFIG, dropout=0.1), seed=3)
    engine_config = EngineConfig(precision=precision, zero_stage=zero_stage, trackers=())
    engine = Engine(source, OPTIMIZER, engine_config, world_size=num_ranks, micro_batch=1)
    batch = BatchConfig(batch_size=BATCH, micro_batch_size=1)
    config = LoopConfig("test", 5, NUM_STEPS, batch, save_every_steps=9, evaluate_every_steps=9)
    TrainingLoop(engine, config, Poisoned(num_ranks, rank), CausalLMObjective(ROWS[:2]), folder).run()
    weights = {name: weight.clone() for name, weight in full_weights(engine).items()}
    engine.close()
    return weights


def rank_program(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    for zero_stage, precision in CASES:
        weights = train(folder / f"{zero_stage}-{precision}", zero_stage, precision, 2, rank)
        torch.save(weights, folder / f"{zero_stage}-{precision}-rank-{rank}.pt")
    torch.distributed.destroy_process_group()


def assert_skipped(folder: Path) -> None:
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines if "skipped" in line] == [POISONED_STEP]
    assert [line["step"] for line in lines if "loss" in line] == [s for s in (1, 2, 3, 4) if s != POISONED_STEP]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, start_two_ranks: Callable[..., None]) -> Path:
    folder = tmp_path_factory.mktemp("skipped")
    start_two_ranks(__file__, folder)
    return folder


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    folder = tmp_path_factory.mktemp("alone")
    weights = train(folder, 0, "fp32", 1, 0)
    assert_skipped(folder)
    return weights


@pytest.mark.parametrize(("zero_stage", "precision"), CASES)
def test_all_ranks_skip_what_one_cannot_compute(
    two_ranks: Path, one_rank: dict[str, Tensor], zero_stage: int, precision: Precision
) -> None:
    name = f"{zero_stage}-{precision}"
    assert_skipped(two_ranks / name)
    for rank in range(2):
        weights = torch.load(two_ranks / f"{name}-rank-{rank}.pt")
        for key, weight in one_rank.items():
            tolerance = 1e-5 if precision == "fp32" else 0.05
            torch.testing.assert_close(weights[key], weight, atol=tolerance, rtol=0, msg=f"{name}: {key}")
    log = (two_ranks / "rank-0.log").read_text()
    assert f"test: step {POISONED_STEP} is skipped: its loss is nan" in log


if __name__ == "__main__":
    rank_program(Path(sys.argv[1]))
