"""Two ranks at every ZeRO stage: bf16 with fp32 master weights learns like fp32; recomputed activations take less
memory.

This file is also the ranks' program: `python test_sharding.py FOLDER`.
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

from benchmarks.speed.process import peak_growth
from lm.config import ModelConfig
from lm.model import LanguageModel
from lm.source import RandomInit
from tests.models import full_weights
from tests.tiers import in_ci, tried
from training.config import EngineConfig, OptimizerConfig
from training.engine import Engine
from training.objectives import CausalLMObjective

pytestmark = pytest.mark.long

SMALL = ModelConfig(
    vocab_size=32,
    max_position_embeddings=24,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
)
# A block's scores of 128 x 128 tokens alone are 32 times as large as its input.
DEEP = ModelConfig(
    vocab_size=32,
    max_position_embeddings=128,
    hidden_size=32,
    num_hidden_layers=12,
    num_attention_heads=8,
    num_key_value_heads=8,
    intermediate_size=64,
)
NUM_STEPS = 12
RECOMPUTED = (0, 3)  # stages


def build(config: ModelConfig, **settings: Any) -> Engine[LanguageModel]:
    optimizer = OptimizerConfig(learning_rate=3e-3, schedule="constant")
    engine_config = EngineConfig.model_validate({"trackers": (), **settings})
    return Engine(
        RandomInit(lambda: LanguageModel(config), seed=3), optimizer, engine_config, world_size=2, micro_batch=4
    )


def step(engine: Engine[LanguageModel], objective: CausalLMObjective) -> float:
    rows = np.arange(4) + 4 * engine.rank
    engine.set_learning_rate(engine.optimizer_config.learning_rate)
    count = objective.count(np.arange(8))
    engine.accumulate([rows], lambda rows: (objective.loss(engine.model, rows, engine.device)[0] / count, {}))
    return engine.step()[0]


def stream(seq_len: int) -> CausalLMObjective:
    return CausalLMObjective(np.random.default_rng(4).integers(0, 32, (8, seq_len)).astype(np.int32))


def learn(precision: str, zero_stage: int) -> dict[str, Any]:
    """Returns the loss of every step, and how many stored weights have more digits than bf16."""
    engine = build(SMALL, precision=precision, zero_stage=zero_stage)
    losses = [step(engine, stream(13)) for _ in range(NUM_STEPS)]
    weights = torch.cat([weight.flatten() for weight in full_weights(engine).values()])
    used = next(engine.module.parameters()).dtype
    engine.close()
    return {"losses": losses, "used": str(used), "longer": float((weights != weights.bfloat16()).float().mean())}


def growth(zero_stage: int, recomputes: bool) -> int:
    """Returns the peak growth of this process, in bytes, during a step."""
    engine = build(DEEP, precision="fp32", zero_stage=zero_stage, checkpoint_activations=recomputes)
    step(engine, stream(129))  # creates what stays: gradients, optimizer states, buffers
    # On a busy machine, one sample may miss a peak.
    _, grown = peak_growth(lambda: [step(engine, stream(129)) for _ in range(3)])
    engine.close()
    return grown


def rank_program(folder: Path) -> None:
    curves, grown = {"fp32-0": learn("fp32", 0)}, {}
    # Within one process, Accelerate can switch from plain ranks to DeepSpeed, but not back.
    for stage in sorted(map(int, os.environ["TRIED"].split(","))):
        curves[f"bf16-{stage}"] = learn("bf16", stage)
        if stage in RECOMPUTED:
            grown |= {f"{stage}-{recomputes}": growth(stage, recomputes) for recomputes in (False, True)}
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps({"curves": curves, "grown": grown}))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start_two_ranks: Callable[..., None]
) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sharding")
    # Freed memory returns to the system immediately, so that the measurement shows what is held.
    start_two_ranks(__file__, folder, MALLOC_MMAP_THRESHOLD_="65536", TRIED=",".join(tried(request, "zero_stage")))
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("zero_stage", in_ci(range(4), RECOMPUTED))
def test_bf16_learns_as_fp32_does(ranks: list[dict[str, Any]], zero_stage: int) -> None:
    expected = ranks[0]["curves"]["fp32-0"]["losses"]
    assert expected[-1] < 0.9 * expected[0]
    for rank in ranks:
        found = rank["curves"][f"bf16-{zero_stage}"]
        np.testing.assert_allclose(found["losses"], expected, rtol=0.01)
        assert found["losses"] != expected
        # Autocast rounds when weights are used.
        assert found["used"] == ("torch.float32" if zero_stage == 0 else "torch.bfloat16")
        assert found["longer"] > 0.9  # the optimizer updates fp32


@pytest.mark.parametrize("zero_stage", RECOMPUTED)
def test_recomputed_activations_take_less_memory(ranks: list[dict[str, Any]], zero_stage: int) -> None:
    for rank in ranks:
        assert rank["grown"][f"{zero_stage}-True"] < 0.35 * rank["grown"][f"{zero_stage}-False"]


if __name__ == "__main__":
    rank_program(Path(sys.argv[1]))
