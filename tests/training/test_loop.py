"""The training loop: a killed run resumes and ends with the weights of the run nobody touched, bit for bit."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lm.config import ModelConfig
from lm.model import LanguageModel
from lm.source import Fresh, materialise
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.engine import Engine
from training.loop import LoopConfig, TrainingLoop
from training.metrics import read_metrics
from training.objectives import StreamObjective
from training.packing import IntArray

OPTIMIZER = OptimizerConfig(learning_rate=0.01, schedule="cosine", warmup_steps=2, weight_decay=0.1)
NUM_STEPS, SAVE_EVERY = 6, 3


class KilledError(Exception):
    pass


class Mortal(StreamObjective):
    """Dies at its n-th forward pass."""

    def __init__(self, rows: np.ndarray, passes: int) -> None:
        super().__init__(rows)
        self.passes = passes

    def loss(self, model: LanguageModel, rows: IntArray, device: torch.device) -> tuple[Tensor, Mapping[str, Tensor]]:
        if self.passes == 0:
            raise KilledError
        self.passes -= 1
        return super().loss(model, rows, device)


def run(folder: Path, config: ModelConfig, *, passes: int = -1, keep: int = 1) -> dict[str, Tensor]:
    """Two micro-batches a step, dropout on."""
    source = Fresh(lambda: LanguageModel(config, dropout=0.3), seed=4)
    engine_config = EngineConfig(precision="fp32", trackers=(), keep_checkpoints=keep)
    engine = Engine(source, OPTIMIZER, engine_config, world_size=1, micro_batch=2)
    rows = np.random.default_rng(0).integers(0, 288, (10, 9)).astype(np.int32)
    loop_config = LoopConfig("test", 17, NUM_STEPS, BatchConfig(batch_size=4, micro_batch_size=2), SAVE_EVERY, 2)
    loop = TrainingLoop(engine, loop_config, Mortal(rows[:7], passes), StreamObjective(rows[7:]), folder)
    try:
        loop.run()
        return {name: weight.clone() for name, weight in engine.full_weights().items()}
    finally:
        engine.close()


def losses(folder: Path) -> dict[int, tuple[float, float, float]]:
    lines = read_metrics(folder / "metrics.jsonl")
    return {line["step"]: (line["loss"], line["gradient_norm"], line["learning_rate"]) for line in lines}


@pytest.fixture(scope="module")
def untouched(
    tmp_path_factory: pytest.TempPathFactory, tiny_config: ModelConfig
) -> tuple[dict[str, Tensor], dict[int, tuple[float, float, float]]]:
    folder = tmp_path_factory.mktemp("untouched")
    return run(folder, tiny_config), losses(folder)


@pytest.mark.parametrize("passes", [1, 6, 9, 11])  # in step 0, between steps, and in the midst of a step
def test_a_killed_run_resumes_bit_for_bit(
    tmp_path: Path,
    tiny_config: ModelConfig,
    untouched: tuple[dict[str, Tensor], dict[int, tuple[float, float, float]]],
    passes: int,
) -> None:
    with pytest.raises(KilledError):
        run(tmp_path, tiny_config, passes=passes)
    torch.manual_seed(passes)  # a new process is in another state of chance
    weights = run(tmp_path, tiny_config)
    assert all(torch.equal(weight, untouched[0][name]) for name, weight in weights.items())
    assert losses(tmp_path) == untouched[1]


@pytest.mark.parametrize("damage", ["bit flipped", "truncated"])
def test_a_damaged_checkpoint_costs_time_and_nothing_else(
    tmp_path: Path,
    tiny_config: ModelConfig,
    untouched: tuple[dict[str, Tensor], dict[int, tuple[float, float, float]]],
    damage: str,
) -> None:
    with pytest.raises(KilledError):
        run(tmp_path, tiny_config, passes=9)
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    path = checkpoint / "model" / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "bit flipped":
        content[-3] ^= 4
    path.write_bytes(content[: -3 if damage == "truncated" else None])
    weights = run(tmp_path, tiny_config, keep=2)
    assert all(torch.equal(weight, untouched[0][name]) for name, weight in weights.items())


def test_the_log_holds_every_step_and_the_schedule(
    untouched: tuple[dict[str, Tensor], dict[int, tuple[float, float, float]]],
) -> None:
    lines = untouched[1]
    assert list(lines) == [1, 2, 3, 4, 5, 6]
    # Warm-up of 2 steps, then cosine over the other 4: (1 + cos(0, π/4, π/2, 3π/4)) / 2.
    expected = [0.005, 0.01, 0.01, 0.00853553, 0.005, 0.00146447]
    assert [line[2] for line in lines.values()] == pytest.approx(expected, rel=1e-5)


def test_heldout_loss_is_the_mean_over_all_rows_whatever_the_micro_batch(
    tmp_path: Path, tiny_config: ModelConfig
) -> None:
    source = Fresh(lambda: LanguageModel(tiny_config, dropout=0.3), seed=4)
    rows = np.random.default_rng(1).integers(0, 288, (5, 9)).astype(np.int32)
    tokens = torch.from_numpy(rows.astype(np.int64))
    with torch.no_grad():
        logprobs = torch.log_softmax(materialise(source).eval()(tokens[:, :-1]).double(), dim=-1)
    expected = -float(logprobs.gather(-1, tokens[:, 1:, None]).mean())
    engine = Engine(source, OPTIMIZER, EngineConfig(precision="fp32", trackers=()), world_size=1, micro_batch=2)
    for micro in (1, 2, 4):
        loop_config = LoopConfig("test", 17, 1, BatchConfig(batch_size=4, micro_batch_size=micro), 1, 1)
        loop = TrainingLoop(engine, loop_config, StreamObjective(rows), StreamObjective(rows), tmp_path)
        assert loop.evaluate()["loss"] == pytest.approx(expected, abs=1e-5)
    engine.close()
