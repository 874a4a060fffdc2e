"""The bound of `heed plan` against the tensors of real training steps on CPU ranks.

This file is also the ranks' program: `python test_planned_memory.py FOLDER`. docs/plan.md has its figures; run `pytest
tests/training/test_planned_memory.py -s` to see them.
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

from benchmarks.live_bytes import LiveBytes, environment
from heed.jobs.memory import Layout, Memory, count, forward_pass, training_memory
from lm.config import ModelConfig, Precision
from lm.model import LanguageModel
from lm.source import RandomInit
from tests.tiers import in_ci, tried
from tests.training.rank_process import settled
from training.config import EngineConfig, OptimizerConfig
from training.engine import Engine, LossAndMetrics
from training.objectives import CausalLMObjective
from training.packing import IntArray

pytestmark = pytest.mark.long

CONFIG = ModelConfig(
    vocab_size=2048, max_position_embeddings=128, hidden_size=256, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=8, intermediate_size=1024, mlp="relu2",
)  # fmt: skip
ADAMW = OptimizerConfig(learning_rate=1e-3, schedule="constant")
ROWS, MICRO_BATCHES, STEPS = 4, 2, 3  # DDP rebuilds its buckets after the first step
AT_LEAST, AT_MOST = 0.97, 1.15  # of what is measured
# ZeRO stage, precision, and whether the backward pass recomputes blocks.
CASES: list[tuple[Any, Precision, bool]] = [
    (0, "fp32", True), (0, "bf16", False), (1, "fp32", False), (2, "fp32", False), (3, "bf16", False),
]  # fmt: skip
OF_CI = [CASES[0], CASES[4]]
MEGABYTE = 2**20


def train(
    folder: Path, config: ModelConfig, zero_stage: Any, precision: Precision, recomputes: bool, world_size: int
) -> dict[str, int]:
    """Returns the bytes of tensors between steps and at the peak of steps, after a checkpoint was written."""
    engine_config = EngineConfig(
        precision=precision, zero_stage=zero_stage, checkpoint_activations=recomputes, trackers=()
    )
    rows_BT = np.random.default_rng(0).integers(0, config.vocab_size, (ROWS, config.max_position_embeddings))
    objective = CausalLMObjective(rows_BT.astype(np.int32))
    source, live = RandomInit(lambda: LanguageModel(config), seed=0), LiveBytes()
    before = live.now
    engine = Engine(source, ADAMW, engine_config, world_size=world_size, micro_batch=ROWS)

    def loss(rows: IntArray) -> LossAndMetrics:
        loss_sum, metrics = objective.loss(engine.model, rows, engine.device)
        return loss_sum / 1000, metrics

    writer = engine.checkpoint_writer()
    for step in range(STEPS):
        with live.phase("step"):
            engine.set_learning_rate(1e-3)
            engine.accumulate([np.arange(ROWS)] * MICRO_BATCHES, loss)
            engine.step()
        if step == 0:
            writer.save(folder, step, {"model": engine.state()})
            writer.wait()
    engine.barrier()
    held, peak = settled(lambda: live.now) - before, live.phases["step"].peak - before
    engine.close()
    return {"held": held, "peak": peak}


def rank_program(folder: Path) -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    cases = [case for case in CASES if str(case) in json.loads(os.environ["TRIED"])]
    found = {str(case): train(folder / str(case[0]), CONFIG, *case, world_size) for case in cases}
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def planned(zero_stage: int, precision: Precision, recomputes: bool) -> Memory:
    layout = Layout(2, zero_stage, is_bf16=precision == "bf16", is_gpu=False, recomputes=recomputes)
    tokens = CONFIG.max_position_embeddings - 1
    of = forward_pass(layout, ROWS, tokens)
    return training_memory(count(CONFIG, ADAMW), layout, of, ROWS * tokens * CONFIG.vocab_size, MICRO_BATCHES)


@pytest.fixture(scope="module")
def two_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start_two_ranks: Callable[..., None]
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("planned")
    start_two_ranks(__file__, folder, TRIED=json.dumps(tried(request, "case")), **environment(folder))
    return json.loads((folder / "rank-0.json").read_text())


@pytest.mark.parametrize("case", in_ci(CASES, OF_CI), ids=str)
def test_two_ranks_take_no_more_than_the_plan_says(
    two_ranks: dict[str, Any], case: tuple[Any, Precision, bool]
) -> None:
    memory, measured = planned(*case), two_ranks[str(case)]
    zero_stage, precision, recomputes = case
    cells = [f"| {zero_stage} | {precision}{', recomputed' * recomputes} | {memory.peak_phase}"]
    for planned_bytes, name in ((sum(memory.held.values()), "held"), (memory.peak, "peak")):
        found = measured[name]
        cells.append(f"{planned_bytes / MEGABYTE:,.1f} | {found / MEGABYTE:,.1f} | {planned_bytes / found - 1:+.1%}")
    print("\n" + " | ".join(cells) + " |")
    assert AT_LEAST <= sum(memory.held.values()) / measured["held"] <= AT_MOST
    assert AT_LEAST <= memory.peak / measured["peak"] <= AT_MOST


def test_the_model_is_not_tiny() -> None:
    counts = count(CONFIG, ADAMW)
    # 4 blocks of 4 D² and 2 D M with two norms, the embedding, and the last norm.
    assert counts.total == 4 * (4 * 256**2 + 2 * 256 * 1024 + 2 * 256) + 2048 * 256 + 256 == counts.trained


if __name__ == "__main__":
    rank_program(Path(sys.argv[1]))
