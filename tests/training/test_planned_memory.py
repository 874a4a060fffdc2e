"""The memory that `heed plan` counts, against what real training steps take on a CPU.

This file is also the ranks' program: `python test_planned_memory.py FOLDER`. docs/plan.md has its figures; run with
`pytest tests/training/test_planned_memory.py -s` to see them.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.speed.peak import peak_growth
from lm.config import ModelConfig
from lm.model import LanguageModel
from lm.source import RandomInit
from planning.memory import Layout, Memory, count, forward_pass, training_memory
from training.config import EngineConfig, OptimizerConfig, Precision
from training.engine import Engine, LossAndMetrics
from training.objectives import CausalLMObjective
from training.packing import IntArray

CONFIG = ModelConfig(
    vocab_size=8192, max_position_embeddings=128, hidden_size=512, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=8, intermediate_size=2048, mlp="relu2",
)  # fmt: skip
ADAMW = OptimizerConfig(learning_rate=1e-3, schedule="constant")
ROWS, MICRO_BATCHES, STEPS = 4, 2, 3  # DDP rebuilds its buckets after the first step
TOLERANCE = 0.15
# ZeRO stage, precision, whether the backward computes blocks again.
CASES: list[tuple[Any, Precision, bool]] = [
    (0, "fp32", False), (0, "fp32", True), (0, "bf16", False),
    (1, "fp32", False), (2, "fp32", False), (3, "bf16", False),
]  # fmt: skip
MEGABYTE = 2**20


def train(
    folder: Path, config: ModelConfig, zero_stage: Any, precision: Precision, recomputes: bool, world_size: int
) -> int:
    """Bytes by which this process grew at most over building an engine, some steps and a checkpoint."""
    engine_config = EngineConfig(
        precision=precision, zero_stage=zero_stage, checkpoint_activations=recomputes, trackers=()
    )
    rows_BT = np.random.default_rng(0).integers(0, config.vocab_size, (ROWS, config.max_position_embeddings))
    objective = CausalLMObjective(rows_BT.astype(np.int32))
    source = RandomInit(lambda: LanguageModel(config), seed=0)

    def steps() -> Engine[LanguageModel]:
        engine = Engine(source, ADAMW, engine_config, world_size=world_size, micro_batch=ROWS)

        def loss(rows: IntArray) -> LossAndMetrics:
            loss_sum, metrics = objective.loss(engine.model, rows, engine.device)
            return loss_sum / 1000, metrics

        writer = engine.checkpoint_writer()
        for step in range(STEPS):
            if step == 1:  # written while the others are made
                writer.save(folder, step, {"model": engine.state()})
            engine.set_learning_rate(1e-3)
            engine.accumulate([np.arange(ROWS)] * MICRO_BATCHES, loss)
            engine.step()
        writer.wait()
        engine.barrier()
        return engine

    engine, growth = peak_growth(steps)
    engine.close()
    return growth


def rank_program(folder: Path) -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    # What libraries take when they are first used is not the model's; a model of no size to speak of pays for it.
    small = CONFIG.model_copy(
        update={"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 8, "head_dim": 2, "vocab_size": 64}
    )
    found = {}
    for case in CASES:
        train(folder, small, *case, world_size)
        found[str(case)] = train(folder, CONFIG, *case, world_size)
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def planned(zero_stage: int, precision: Precision, recomputes: bool) -> Memory:
    layout = Layout(2, zero_stage, is_bf16=precision == "bf16", is_gpu=False, recomputes=recomputes)
    tokens = CONFIG.max_position_embeddings - 1
    of = forward_pass(CONFIG, layout, ROWS, tokens)
    return training_memory(CONFIG, count(CONFIG, ADAMW), layout, of, ROWS * tokens * CONFIG.vocab_size, MICRO_BATCHES)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, start_two_ranks: Callable[..., None]) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("planned")
    # Freed memory goes back to the system at once, so that what is measured is what is held.
    start_two_ranks(__file__, folder, MALLOC_MMAP_THRESHOLD_="65536")
    return json.loads((folder / "rank-0.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_take_what_the_plan_says(two_ranks: dict[str, Any], case: tuple[Any, Precision, bool]) -> None:
    memory, measured = planned(*case), two_ranks[str(case)]
    figures = f"{memory.peak / MEGABYTE:,.0f} | {measured / MEGABYTE:,.0f} | {memory.peak / measured - 1:+.0%}"
    zero_stage, precision, recomputes = case
    print(f"\n| {zero_stage} | {precision}{', recomputed' * recomputes} | {memory.peak_phase} | {figures} |")
    assert memory.peak == pytest.approx(measured, rel=TOLERANCE)


def test_the_model_is_not_tiny() -> None:
    counts = count(CONFIG, ADAMW)
    # 8 blocks of 4 D² and 2 D M and two norms, the embedding, the last norm.
    assert counts.total == 8 * (4 * 512**2 + 2 * 512 * 2048 + 2 * 512) + 8192 * 512 + 512 == counts.trained


if __name__ == "__main__":
    rank_program(Path(sys.argv[1]))
