"""A mixture's routers in training: their losses and biases balance the load, the same on one rank and on two at every
way of sharding, and a run that resumes ends with the same bits.

This file is also the ranks' program: `python test_routers.py FOLDER`.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lm.config import ModelConfig, Precision
from lm.experts import Mixture
from lm.model import LanguageModel
from lm.source import RandomInit
from tests.models import full_weights
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.engine import Engine
from training.loop import LoopConfig, TrainingLoop
from training.metrics import read_metrics
from training.objectives import PackedObjective
from training.packing import pack

CONFIG = ModelConfig(
    vocab_size=32, max_position_embeddings=24, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=24, num_experts=4, num_experts_per_tok=1, moe_intermediate_size=8, norm_topk_prob=False,
    scoring_func="sigmoid", router_bias=True, shared_expert_intermediate_size=8,
)  # fmt: skip
NUM_STEPS = 4
LEARNS = {"router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.01, "router_bias_speed": 0.01}
CASES: list[tuple[int, Precision]] = [(0, "fp32"), (1, "bf16"), (3, "fp32")]


class Collapsed(RandomInit[LanguageModel]):
    """Every token's first expert is number 0: its row of the router points where all hidden states have their mean."""

    def tensors(self, rows: Any = None) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().tensors(rows):
            if name.endswith("router.weight"):
                tensor[0] += 0.5
            yield name, tensor + 0.5 if "embedding" in name else tensor


def objective(seed: int, num_sequences: int) -> PackedObjective:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(3, 13, num_sequences)
    sequences = [(generator.integers(0, 32, length).tolist(), [True] * int(length)) for length in lengths]
    return PackedObjective(pack(sequences, 14, pad_id=0))


def train(
    folder: Path,
    *,
    world_size: int = 1,
    micro_batch: int = 2,
    num_steps: int = NUM_STEPS,
    zero_stage: int = 0,
    precision: Precision = "fp32",
    **learns: float,
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Returns the final weights and the metrics of each step."""
    engine_config = EngineConfig.model_validate(
        {"precision": precision, "zero_stage": zero_stage, "trackers": (), **learns}
    )
    source = Collapsed(lambda: LanguageModel(CONFIG), seed=3)
    optimizer = OptimizerConfig(learning_rate=0.02, schedule="constant", eps=1e-4)
    engine = Engine(source, optimizer, engine_config, world_size=world_size, micro_batch=micro_batch)
    batch = BatchConfig(batch_size=4, micro_batch_size=micro_batch)
    config = LoopConfig("test", 5, num_steps, batch, save_every_steps=2, evaluate_every_steps=num_steps)
    TrainingLoop(engine, config, objective(8, 24), objective(9, 4), folder).run()
    assert all(m.choice_bias.dtype == torch.float32 for m in engine.module.modules() if isinstance(m, Mixture))
    weights = {name: weight.clone() for name, weight in full_weights(engine).items()}
    engine.close()
    return weights, read_metrics(folder / "metrics.jsonl")


@pytest.mark.parametrize(("key", "value"), [("router_aux_loss_coef", 1.0), ("router_bias_speed", 0.05)])
def test_a_collapsed_router_balances_with_a_loss_or_with_biases(tmp_path: Path, key: str, value: float) -> None:
    _, without = train(tmp_path / "without", num_steps=60, **{key: 0.0})
    _, learned = train(tmp_path / "with", num_steps=60, **{key: value})
    assert without[0]["router_max_load"] == learned[0]["router_max_load"] == 4  # all tokens
    assert without[0]["router_dead_experts"] == 6
    assert np.mean([line["router_max_load"] for line in without[50:]]) > 3.5
    assert np.mean([line["router_max_load"] for line in learned[50:]]) < 2.2
    assert not any(line["router_dead_experts"] for line in learned[50:])
    assert ("router_aux_loss" in learned[0]) == (key == "router_aux_loss_coef")


def test_a_run_that_resumes_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole, metrics = train(tmp_path, **LEARNS)
    assert whole["decoder.blocks.0.mlp.choice_bias"].abs().max() == pytest.approx(0.04)
    shutil.rmtree(tmp_path / "checkpoints" / f"step-{NUM_STEPS:06d}")
    again, _ = train(tmp_path, **LEARNS)
    assert all(torch.equal(again[name], weight) for name, weight in whole.items())
    assert len(metrics) == NUM_STEPS


def rank_program(folder: Path) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for zero_stage, precision in CASES:
        name = f"zero-{zero_stage}-{precision}"
        found = train(
            folder / name, world_size=world_size, micro_batch=1, zero_stage=zero_stage, precision=precision, **LEARNS
        )
        torch.save(found, folder / f"{name}-rank-{rank}.pt")


@pytest.mark.long
def test_two_ranks_route_and_learn_as_one(tmp_path: Path, start_two_ranks: Callable[..., None]) -> None:
    start_two_ranks(__file__, tmp_path)
    weights, metrics = train(tmp_path / "one", **LEARNS)
    for zero_stage, precision in CASES:
        parts = [torch.load(tmp_path / f"zero-{zero_stage}-{precision}-rank-{rank}.pt") for rank in (0, 1)]
        for found, found_metrics in parts:
            assert found.keys() == weights.keys()
            biases = [name for name in weights if name.endswith("choice_bias")]
            assert all(torch.equal(found[name], parts[0][0][name]) for name in biases)
            if precision == "bf16":  # other experts are chosen where scores nearly tie
                continue
            assert all(torch.equal(found[name], weights[name]) for name in biases)
            for name, weight in weights.items():
                torch.testing.assert_close(found[name], weight, atol=1e-4, rtol=1e-3, msg=name)
            for line, expected in zip(found_metrics, metrics, strict=True):
                assert line["router_max_load"] == expected["router_max_load"]
                assert line["router_dead_experts"] == expected["router_dead_experts"]
                for name in ("loss", "gradient_norm", "router_entropy", "router_aux_loss", "router_z_loss"):
                    assert line[name] == pytest.approx(expected[name], rel=1e-4), name


if __name__ == "__main__":
    rank_program(Path(sys.argv[1]))
