"""Training on a GPU: the engine's steps are the equations', twice the same, and a checkpoint continues bit for bit."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm import block as compiled
from lm.layers import trained_products
from lm.model import LanguageModel
from lm.source import RandomInit, load
from tests.gpu.models import CPU, distance, shape, tokens
from training import engine as engines
from training import optimizers
from training.config import EngineConfig, OptimizerConfig
from training.engine import Engine
from training.objectives import CausalLMObjective

OPTIMIZER = OptimizerConfig(learning_rate=1e-3, schedule="constant", weight_decay=0.1)
SOURCE = RandomInit(partial(LanguageModel, shape()), seed=0)
OBJECTIVE = CausalLMObjective(tokens(24, 65))
ROWS, MICRO_BATCH = 8, 4


def start(precision: str, **options: Any) -> Engine[LanguageModel]:
    config = EngineConfig.model_validate({"precision": precision, "trackers": [], **options})
    engine: Engine[LanguageModel] = Engine(SOURCE, OPTIMIZER, config, world_size=1, micro_batch=MICRO_BATCH)
    assert engine.device.type == "cuda"
    return engine


def take_steps(engine: Engine[LanguageModel], steps: range) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each."""
    found = []
    for step in steps:
        rows = np.arange(step * ROWS, (step + 1) * ROWS)
        engine.set_learning_rate(OPTIMIZER.learning_rate)
        count = OBJECTIVE.count(rows)
        engine.accumulate(
            np.split(rows, ROWS // MICRO_BATCH),
            lambda part: (OBJECTIVE.loss(engine.model, part, engine.device)[0] / count, {}),  # noqa: B023
        )
        found.append(engine.step())
    return found


def steps_written_out(num_steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the same steps in plain PyTorch, in fp32 on the CPU."""
    model = load(SOURCE)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.learning_rate, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    losses = []
    for step in range(num_steps):
        rows = np.arange(step * ROWS, (step + 1) * ROWS)
        loss = OBJECTIVE.loss(model, rows, CPU)[0] / OBJECTIVE.count(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("precision", "near"), [("fp32", 1e-3), ("bf16", 0.02)])
def test_steps_are_those_written_out(precision: str, near: float) -> None:
    engine = start(precision)
    found = take_steps(engine, range(3))
    losses, weights = steps_written_out(3)
    assert [loss for loss, _ in found] == pytest.approx(losses, rel=near)
    held = dict(engine.module.named_parameters())
    assert max(distance(held[name], weight) for name, weight in weights.items()) < 20 * near
    engine.close()


def test_two_runs_are_alike() -> None:
    """To rounding: attention's backward may add in any order. The forward has the same bits."""
    runs = []
    for _ in range(2):
        engine = start("bf16")
        runs.append(take_steps(engine, range(2)))
        engine.close()
    (first, _), (second, _) = runs[0][0], runs[1][0]
    assert first == second
    assert np.array(runs[0]) == pytest.approx(np.array(runs[1]), rel=1e-3)


def test_two_deterministic_runs_are_the_same(tmp_path: Path) -> None:
    """Bit for bit: losses, gradient norms and weights, also of a run that a checkpoint interrupts."""

    def weights_of(engine: Engine[LanguageModel]) -> dict[str, torch.Tensor]:
        return {name: weight.detach().cpu().clone() for name, weight in engine.module.named_parameters()}

    modes = []
    engine = start("bf16", deterministic=True)
    engine.module.register_forward_pre_hook(lambda *_: modes.append(torch.are_deterministic_algorithms_enabled()))
    first = take_steps(engine, range(2))
    with engine.checkpoint_writer() as writer:
        writer.save(tmp_path, 2, {"model": engine.state()})
    first, weights = [*first, *take_steps(engine, range(2, 3))], weights_of(engine)
    engine.close()
    assert set(modes) == {True}
    assert not torch.are_deterministic_algorithms_enabled()
    resumed = start("bf16", deterministic=True)
    second = take_steps(resumed, range(2))
    resumed.load(tmp_path / "step-000002" / "model")
    second += take_steps(resumed, range(2, 3))
    assert second == first
    assert all(torch.equal(weight, weights[name]) for name, weight in weights_of(resumed).items())
    resumed.close()


def test_a_checkpoint_has_the_same_bits(tmp_path: Path) -> None:
    """Weights, moments and steps come back from its files, and the next step's loss is the same."""
    engine = start("bf16")
    take_steps(engine, range(2))
    with engine.checkpoint_writer() as writer:
        writer.save(tmp_path, 2, {"model": engine.state()})
    held = {key: part.values.detach().cpu().clone() for key, part in engine.state().items()}
    (expected, _) = take_steps(engine, range(2, 3))[0]
    engine.close()
    resumed = start("bf16")
    resumed.load(tmp_path / "step-000002" / "model")
    found = resumed.state()
    assert found.keys() == held.keys()
    assert all(torch.equal(part.values.detach().cpu(), held[key]) for key, part in found.items())
    assert take_steps(resumed, range(2, 3))[0][0] == expected
    resumed.close()


def test_a_closed_engine_holds_nothing() -> None:
    start("bf16").close()  # what stays of the first: workspaces
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        engine = start("bf16")
        take_steps(engine, range(1))
        engine.close()
        del engine
    assert torch.cuda.memory_allocated() <= before + 2**16


def test_activation_checkpointing_gives_the_same_gradient() -> None:
    found = []
    for is_on in (False, True):
        engine = start("fp32", checkpoint_activations=is_on)
        found.append(take_steps(engine, range(1))[0])
        engine.close()
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.nightly  # in CI, tests/fake_cuda/on_device.py and tests/lm/test_compiled.py compile blocks
def test_compiled_blocks_take_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_name().startswith("Fake"):
        monkeypatch.setattr(compiled, "BACKEND", "aot_eager")  # there is no Triton for it
    found = []
    for is_on in (False, True):
        engine = start("bf16", compile_blocks=is_on)
        found.append(np.array(take_steps(engine, range(3))))
        engine.close()
    assert found[1] == pytest.approx(found[0], rel=0.03)


def test_gradients_added_in_groups_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against autocast's own casts: losses, norms and weights of three steps, in one group and in several."""
    found = []
    for weights, numbers in ((trained_products, 2**25), (trained_products, 2**15), (lambda _: [], 1)):
        monkeypatch.setattr(engines, "trained_products", weights)
        monkeypatch.setattr(optimizers, "AT_ONCE", numbers)
        engine = start("bf16", deterministic=True)
        steps = take_steps(engine, range(3))
        found.append((steps, [weight.detach().cpu().clone() for weight in engine.module.parameters()]))
        engine.close()
    for steps, held in found[:2]:
        assert steps == found[2][0]
        assert all(map(torch.equal, held, found[2][1]))
