"""Recorded micro-batches against those that run one by one. On a CPU a recording is the step itself, on fixed buffers;
tests/fake_cuda replays recordings.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lm.config import ModelConfig
from lm.lora import LoRAConfig, WithAdapters
from lm.model import LanguageModel
from lm.source import ModelSource, RandomInit
from tests.models import full_weights
from training import recording
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.engine import Engine
from training.loop import LoopConfig, TrainingLoop
from training.metrics import read_metrics
from training.objectives import CausalLMObjective, PackedObjective
from training.packing import pack

OPTIMIZER = OptimizerConfig(learning_rate=0.01, weight_decay=0.1)
GENERATOR = np.random.default_rng(0)
WHOLE = CausalLMObjective(GENERATOR.integers(0, 288, (10, 17)).astype(np.int32))
LENGTHS = (3, 4, 5, 7, 8, 9, 11, 12, 13, 14, 15, 16)
PACKED = PackedObjective(
    pack([(GENERATOR.integers(0, 288, n).tolist(), [t > n // 3 for t in range(n)]) for n in LENGTHS], 17, 0)
)


def trained(
    folder: Path, objective: Any, config: ModelConfig, *, records: bool, lora: LoRAConfig | None = None, **options: Any
) -> tuple[dict[str, Tensor], list[float], int]:
    """Weights, losses and the number of recordings of four steps with dropout, of two micro-batches each."""
    source: ModelSource[LanguageModel] = RandomInit(lambda: LanguageModel(config, dropout=0.2), seed=4)
    source = source if lora is None else WithAdapters(source, lora, 1)
    engine_config = EngineConfig.model_validate({"trackers": (), "record_micro_batches": records, **options})
    engine = Engine(source, OPTIMIZER, engine_config, world_size=1, micro_batch=2)
    loop_config = LoopConfig("test", 17, 4, BatchConfig(batch_size=4, micro_batch_size=2), 4, 2)
    TrainingLoop(engine, loop_config, objective, WHOLE, folder).run()
    weights = {name: weight.clone() for name, weight in full_weights(engine).items()}
    num_recordings = engine._recorded.num_recordings if engine._recorded else 0
    engine.close()
    return weights, [line["loss"] for line in read_metrics(folder / "metrics.jsonl")], num_recordings


@pytest.mark.parametrize(
    "options",
    [{"precision": "fp32"}, {"precision": "bf16", "checkpoint_activations": True}, {"lora": LoRAConfig(rank=4)}],
    ids=str,
)
def test_rows_of_one_length_give_the_same_bits(
    options: Mapping[str, Any], tmp_path: Path, tiny_config: ModelConfig
) -> None:
    """Seeds of dropout and denominators are read from buffers, and gradients add up in memory that stays."""
    expected, losses, _ = trained(tmp_path / "plain", WHOLE, tiny_config, records=False, **options)
    found, recorded_losses, num_recordings = trained(tmp_path / "recorded", WHOLE, tiny_config, records=True, **options)
    assert num_recordings == 1
    assert recorded_losses == losses
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("most", [64, 1])
def test_packed_rows_give_the_same_numbers(
    most: int, tmp_path: Path, tiny_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention within sequences rounds otherwise here. Of more shapes than may be recorded, some are not."""
    monkeypatch.setattr(recording, "MAX_RECORDINGS", most)
    _, losses, _ = trained(tmp_path / "plain", PACKED, tiny_config, records=False, precision="fp32")
    _, found, num_recordings = trained(tmp_path / "recorded", PACKED, tiny_config, records=True, precision="fp32")
    assert 1 <= num_recordings <= min(most, 4)
    assert found == pytest.approx(losses, rel=1e-4)


def test_padding_adds_nothing(tiny_config: ModelConfig) -> None:
    """The loss and gradients with buckets of counted tokens and of sequences, against those without padding."""
    model = LanguageModel(tiny_config)
    inputs = dict(PACKED.inputs(np.arange(3), seed=0))
    num_counted = int(inputs["weights_C"].sum())
    assert num_counted == PACKED.count(np.arange(3)) < len(inputs["weights_C"])
    results = []
    for number in (len(inputs["weights_C"]), num_counted):
        own = {name: value[:number] if name.endswith("_C") else value for name, value in inputs.items()}
        loss, _ = PACKED.loss_of(model, own)
        results.append([loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])])
    expected, _ = PACKED.loss(model, np.arange(3), torch.device("cpu"))
    results.append([expected.detach(), *torch.autograd.grad(expected, [*model.parameters()])])
    for padded, exact, plain in zip(*results, strict=True):
        torch.testing.assert_close(padded, exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(padded, plain, rtol=1e-4, atol=1e-4)


def test_sequences_are_padded_by_empty_ones() -> None:
    """So many starts that few recordings serve all batches, the last of them at the end of the rows."""
    starts = PACKED.inputs(np.arange(4), seed=0)["starts"]
    num_sequences = len(starts) - 1
    assert num_sequences & (num_sequences - 1) == 0
    assert starts.tolist() == sorted(starts.tolist())
    assert starts[-1] == 4 * 16
    assert (starts.diff() == 0).any()


def test_a_loss_that_is_not_finite_skips_the_step(tiny_config: ModelConfig) -> None:
    """The recorded step multiplies gradients by 1 or NaN, whichever micro-batch had the loss."""
    source = RandomInit(lambda: LanguageModel(tiny_config), seed=4)
    engine = Engine(
        source, OPTIMIZER, EngineConfig(trackers=(), record_micro_batches=True), world_size=1, micro_batch=2
    )
    before = {name: weight.clone() for name, weight in full_weights(engine).items()}

    def loss(inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss_sum, metrics = WHOLE.loss_of(engine.model, inputs)
        return loss_sum * inputs["factor"], metrics

    def step(*factors: float) -> bool:
        inputs = [{**WHOLE.inputs(np.arange(2), 0), "factor": torch.tensor(factor)} for factor in factors]
        engine.accumulate_recorded(inputs, loss)
        engine.step()
        return engine.has_skipped

    assert step(float("nan"), 1.0)
    assert step(1.0, float("inf"))
    assert all(torch.equal(weight, before[name]) for name, weight in full_weights(engine).items())
    assert not step(1.0, 1.0)
    assert any(not torch.equal(weight, before[name]) for name, weight in full_weights(engine).items())
    engine.close()


def test_what_cannot_be_recorded_is_refused(tiny_config: ModelConfig) -> None:
    with pytest.raises(ValueError, match="record_micro_batches with offload of 'optimizer'"):
        EngineConfig(record_micro_batches=True, zero_stage=1, offload=("optimizer",))
    with pytest.raises(ValueError, match=r"record_micro_batches with 2 ranks.*one rank was expected"):
        EngineConfig(record_micro_batches=True).on_ranks(2)
    experts = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    source = RandomInit(lambda: LanguageModel(tiny_config.model_copy(update=experts)), seed=4)
    with pytest.raises(ValueError, match="a mixture of experts cannot be recorded"):
        Engine(source, OPTIMIZER, EngineConfig(record_micro_batches=True), world_size=1, micro_batch=2)
