"""One rank: a step is AdamW by hand, and splitting a batch differently does not change it."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from lm.config import ModelConfig, Precision
from lm.model import LanguageModel
from lm.source import RandomInit, load
from tests.models import full_weights
from training.config import EngineConfig, OptimizerConfig
from training.engine import MAX_SKIPPED_STEPS, Engine, LossAndMetrics, _note_plain, deterministic_kernels
from training.notices import RunError
from training.objectives import PackedObjective
from training.packing import IntArray, pack

ONE_RANK = EngineConfig(precision="fp32", trackers=())
OPTIMIZER = OptimizerConfig(
    learning_rate=0.01, schedule="constant", weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6, max_grad_norm=0.7
)


def fresh(config: ModelConfig) -> RandomInit[LanguageModel]:
    return RandomInit(lambda: LanguageModel(config), seed=1)


def build(config: ModelConfig) -> LanguageModel:
    return load(fresh(config))


@pytest.fixture(scope="module")
def ragged() -> PackedObjective:
    """Rows with different numbers of counted tokens."""
    generator = np.random.default_rng(2)
    sequences = [
        (generator.integers(0, 288, length).tolist(), [t > prompt for t in range(length)])
        for length, prompt in zip([12, 11, 9, 9, 5, 4, 3, 7], [1, 9, 3, 7, 0, 2, 1, 2], strict=True)
    ]
    objective = PackedObjective(pack(sequences, 12, pad_id=0))
    counts = objective.rows.counted.sum(axis=1).tolist()
    assert len(counts) >= 4
    assert len(set(counts[:4])) > 2
    return objective


@pytest.fixture
def engine(tiny_config: ModelConfig) -> Iterator[Engine[LanguageModel]]:
    engine = Engine(fresh(tiny_config), OPTIMIZER, ONE_RANK, world_size=1, micro_batch=1)
    yield engine
    engine.close()


def shares(engine: Engine[LanguageModel], objective: PackedObjective) -> Callable[[IntArray], LossAndMetrics]:
    """The loss of some of the first four rows, divided by the token count of all four."""
    count = objective.count(np.arange(4))

    def loss(rows: IntArray) -> LossAndMetrics:
        loss_sum, metrics = objective.loss(engine.model, rows, engine.device)
        return loss_sum / count, metrics

    return loss


def accumulate(engine: Engine[LanguageModel], objective: PackedObjective, micro: int) -> None:
    engine.accumulate(np.split(np.arange(4), 4 // micro), shares(engine, objective))


def plain_loss(model: LanguageModel, objective: PackedObjective) -> Tensor:
    """The mean over the counted tokens of all four rows at once, by PyTorch's cross-entropy."""
    rows = objective.rows
    tokens, segments, counted = (torch.from_numpy(part[:4]) for part in (rows.tokens, rows.segments, rows.counted))
    logits = model(tokens, segments)[:, :-1]
    losses = cross_entropy(logits.reshape(-1, 288), tokens[:, 1:].reshape(-1), reduction="none")
    mask = counted[:, 1:].reshape(-1).float()
    return (losses * mask).sum() / mask.sum()


class AdamWByHand:
    """Equations of arXiv 1711.05101, algorithm 2, after clipping the gradient by its global norm."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self.v = [torch.zeros_like(p) for p in self.parameters]
        self.t = 0

    @torch.no_grad()
    def step(self, gradients: list[Tensor], rate: float) -> float:
        self.t += 1
        norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients))
        share = min(1.0, OPTIMIZER.max_grad_norm / norm)
        beta1, beta2 = OPTIMIZER.betas
        for p, g, m, v in zip(self.parameters, gradients, self.m, self.v, strict=True):
            g = g * share
            m.copy_(beta1 * m + (1 - beta1) * g)
            v.copy_(beta2 * v + (1 - beta2) * g * g)
            m_hat, v_hat = m / (1 - beta1**self.t), v / (1 - beta2**self.t)
            decay = OPTIMIZER.weight_decay if p.dim() > 1 else 0.0  # norms are not decayed
            p.copy_(p - rate * (m_hat / (v_hat.sqrt() + OPTIMIZER.eps) + decay * p))
        return norm


def test_steps_equal_adamw_by_hand(
    engine: Engine[LanguageModel], ragged: PackedObjective, tiny_config: ModelConfig
) -> None:
    twin = build(tiny_config)
    by_hand = AdamWByHand(twin)
    for rate in (0.01, 0.02, 0.005):
        engine.set_learning_rate(rate)
        accumulate(engine, ragged, micro=2)
        loss, norm = engine.step()
        expected = plain_loss(twin, ragged)
        expected_norm = by_hand.step(list(torch.autograd.grad(expected, by_hand.parameters)), rate)
        assert loss == pytest.approx(float(expected.detach()), abs=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
        assert norm > OPTIMIZER.max_grad_norm, "this test is about clipped gradients"
    expected_weights = twin.state_dict()
    for name, weight in full_weights(engine).items():
        # Steps are about .01, whatever the gradient's size, so a gradient near 0 shows how it was rounded.
        torch.testing.assert_close(weight, expected_weights[name], atol=2e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("num_ahead", [1, 4])
def test_passes_that_were_run_ahead_give_the_same_bits(
    engine: Engine[LanguageModel], ragged: PackedObjective, tiny_config: ModelConfig, num_ahead: int
) -> None:
    """The first of four passes, or all of them, come before `accumulate`; other passes come between."""
    twin = Engine(fresh(tiny_config), OPTIMIZER, ONE_RANK, world_size=1, micro_batch=1)
    micro_batches = np.split(np.arange(4), 4)
    for _ in range(2):
        loss = shares(engine, ragged)
        with torch.no_grad(), engine.forward_ahead():
            ahead = [loss(rows) for rows in micro_batches[:num_ahead]]
        with torch.no_grad():
            loss(micro_batches[3])
        engine.accumulate(micro_batches, lambda rows, loss=loss, kept=ahead: kept.pop(0) if kept else loss(rows))
        accumulate(twin, ragged, micro=1)
        assert engine.step() == twin.step()
    expected = full_weights(twin)
    assert all(torch.equal(weight, expected[name]) for name, weight in full_weights(engine).items())
    twin.close()


def test_only_an_engine_that_pairs_passes_freely_runs_ahead(tiny_config: ModelConfig) -> None:
    config = ONE_RANK.model_copy(update={"checkpoint_activations": True})
    recomputing = Engine(fresh(tiny_config), OPTIMIZER, config, world_size=1, micro_batch=1)
    assert not recomputing.runs_ahead
    with pytest.raises(AssertionError, match="passes cannot run ahead of their updates"), recomputing.forward_ahead():
        pass
    recomputing.close()


MUON = OPTIMIZER.model_copy(update={"kind": "muon"})


@pytest.fixture
def muon(tiny_config: ModelConfig) -> Iterator[Engine[LanguageModel]]:
    engine = Engine(fresh(tiny_config), MUON, ONE_RANK, world_size=1, micro_batch=1)
    yield engine
    engine.close()


def test_muon_moves_the_matrices_of_the_blocks_orthogonally_and_adamw_the_rest(
    muon: Engine[LanguageModel], ragged: PackedObjective, tiny_config: ModelConfig
) -> None:
    """In the first step the momentum equals the gradient, so the update is along U Vᵀ of the gradient's U S Vᵀ."""
    twin = build(tiny_config)
    by_hand = AdamWByHand(twin)
    before = {name: weight.clone() for name, weight in twin.state_dict().items()}
    gradients = torch.autograd.grad(plain_loss(twin, ragged), by_hand.parameters)
    by_hand.step(list(gradients), 0.01)
    muon.set_learning_rate(0.01)
    accumulate(muon, ragged, micro=2)
    muon.step()
    moved = full_weights(muon)
    num_matrices = 0
    for (name, after), gradient in zip(twin.named_parameters(), gradients, strict=True):
        if ".blocks." not in name or gradient.dim() != 2:
            torch.testing.assert_close(moved[name], after.detach(), atol=5e-6, rtol=1e-5, msg=name)
            continue
        num_matrices += 1
        kept = before[name] * (1 - 0.01 * MUON.weight_decay)
        direction = (kept - moved[name]) / (0.01 * 0.2 * math.sqrt(max(gradient.shape)))
        # Five Newton-Schulz steps bring the singular values close to 1, except the smallest; they do not rotate the
        # vectors.
        u, _, v = torch.linalg.svd(gradient, full_matrices=False)
        stretched = u.T @ direction @ v.T
        values = stretched.diagonal()
        assert values.max() < 1.3, name
        assert values.median() > 0.6, name
        assert (stretched - values.diag()).abs().max() < 0.15, name
    assert num_matrices == 4 * tiny_config.num_hidden_layers


def test_muon_continues_bit_for_bit(muon: Engine[LanguageModel], ragged: PackedObjective, tmp_path: Path) -> None:
    def steps(engine: Engine[LanguageModel], number: int) -> None:
        engine.set_learning_rate(0.01)
        for _ in range(number):
            accumulate(engine, ragged, micro=4)
            engine.step()

    steps(muon, 2)
    with muon.checkpoint_writer() as writer:
        writer.save(tmp_path, 2, {"model": muon.state()})
        steps(muon, 2)  # while it is being written
    expected = {name: weight.clone() for name, weight in full_weights(muon).items()}
    muon.load(tmp_path / "step-000002" / "model")
    assert not all(torch.equal(weight, expected[name]) for name, weight in full_weights(muon).items())
    steps(muon, 2)
    assert all(torch.equal(weight, expected[name]) for name, weight in full_weights(muon).items())


def test_muon_is_refused_where_matrices_are_cut_up(tiny_config: ModelConfig) -> None:
    with pytest.raises(ValueError, match=r"optimizer kind 'muon' needs whole matrices, but ZeRO 2 shards them"):
        Engine(fresh(tiny_config), MUON, EngineConfig(precision="fp32", zero_stage=2), world_size=2, micro_batch=1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_rank_needs_no_deepspeed(
    precision: Precision, ragged: PackedObjective, tiny_config: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """Its steps are those of the plain path, bit for bit, and one line says so."""
    _note_plain.cache_clear()

    def steps(zero_stage: Literal[0, 1, 2, 3]) -> list[Tensor]:
        config = EngineConfig(precision=precision, zero_stage=zero_stage, trackers=())
        engine = Engine(fresh(tiny_config), OPTIMIZER, config, world_size=1, micro_batch=4)
        assert type(engine.model) is LanguageModel
        assert engine.held_dtype == torch.float32
        engine.set_learning_rate(0.01)
        for _ in range(2):
            accumulate(engine, ragged, micro=4)
            engine.step()
        found = [weight.clone() for weight in full_weights(engine).values()]
        engine.close()
        return found

    expected = steps(0)
    assert not caplog.text
    for zero_stage in (1, 2, 3):
        assert all(map(torch.equal, steps(zero_stage), expected))
    assert caplog.text.count("engine.zero_stage 1 shards nothing on one rank, which runs without DeepSpeed") == 1
    offloaded = EngineConfig(zero_stage=1, offload=("optimizer",))
    assert offloaded.on_ranks(1) is offloaded
    assert EngineConfig(zero_stage=3).on_ranks(2).zero_stage == 3


def test_one_rank_in_bf16_is_autocast_and_nothing_else(ragged: PackedObjective, tiny_config: ModelConfig) -> None:
    """One rank has no DDP and no fp32 copy of the logits; loss and gradients are PyTorch's own, bit for bit."""
    config = EngineConfig(precision="bf16", trackers=())
    engine = Engine(fresh(tiny_config), OPTIMIZER, config, world_size=1, micro_batch=4)
    assert type(engine.model) is LanguageModel
    assert engine.model(torch.tensor([[1, 2, 3]])).dtype == torch.bfloat16
    accumulate(engine, ragged, micro=4)
    twin, rows = build(tiny_config), np.arange(4)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = ragged.loss(twin, rows, torch.device("cpu"))
    (loss / ragged.count(rows)).backward()
    for (name, parameter), theirs in zip(engine.module.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter.grad, theirs.grad), name
    assert engine.step()[0] == float(loss.detach() / ragged.count(rows))
    engine.close()


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_gradients_do_not_depend_on_the_micro_batch(
    engine: Engine[LanguageModel], ragged: PackedObjective, tiny_config: ModelConfig, micro: int
) -> None:
    twin = build(tiny_config)
    plain_loss(twin, ragged).backward()
    accumulate(engine, ragged, micro)
    for (name, parameter), theirs in zip(engine.module.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, theirs.grad, atol=1e-6, rtol=1e-5, msg=name)


def test_metrics_are_summed_over_micro_batches_without_their_graph(engine: Engine[LanguageModel]) -> None:
    def loss(number: int) -> LossAndMetrics:
        logit = engine.model(torch.tensor([[1, 2, 3]]))[0, 0, 0]
        metrics = {"logit": logit, "number": torch.tensor([number, 1])}
        return 0 * logit, metrics | ({"rare": torch.tensor(2.5)} if number == 7 else {})

    sums = engine.accumulate([4, 7, 1], loss)
    with torch.no_grad():
        logit = engine.model(torch.tensor([[1, 2, 3]]))[0, 0, 0]
    assert not sums["logit"].requires_grad
    torch.testing.assert_close(sums["logit"], 3 * logit)
    assert sums["number"].tolist() == [12, 3]  # a sum with its own count
    assert float(sums["rare"]) == 2.5
    assert set(sums) == {"logit", "number", "rare"}


def test_gradients_start_at_zero_in_every_step(engine: Engine[LanguageModel], ragged: PackedObjective) -> None:
    accumulate(engine, ragged, micro=4)
    engine.set_learning_rate(0.0)
    first = engine.step()
    accumulate(engine, ragged, micro=4)
    again = engine.step()  # a learning rate of 0 leaves the weights unchanged
    assert again == pytest.approx(first, rel=1e-6)


def state_of_all(engine: Engine[LanguageModel]) -> dict[str, Tensor]:
    return {name: fragment.values.clone() for name, fragment in engine.state().items()}


def lose_finiteness(engine: Engine[LanguageModel]) -> None:
    """√0 is finite but its derivative is not: the loss alone does not show it."""

    def loss(tokens_BT: Tensor) -> LossAndMetrics:
        hidden = engine.model(tokens_BT)
        return (hidden - hidden.detach()).square().sum().sqrt(), {}

    engine.accumulate([torch.tensor([[1, 2, 3]])], loss)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_whose_loss_is_not_finite_is_skipped(
    engine: Engine[LanguageModel], ragged: PackedObjective, bad: float
) -> None:
    """although its gradient is finite"""
    accumulate(engine, ragged, micro=2)
    engine.step()
    before = state_of_all(engine)

    def loss(offset: float) -> LossAndMetrics:
        return ragged.loss(engine.model, np.arange(2), engine.device)[0] + offset, {}

    engine.accumulate([bad, 0.0], loss)
    assert not math.isfinite(engine.step()[0])
    assert engine.has_skipped
    after = state_of_all(engine)
    assert all(torch.equal(values, before[name]) for name, values in after.items())
    accumulate(engine, ragged, micro=2)  # nothing of it remains
    _, norm = engine.step()
    assert math.isfinite(norm)
    assert not engine.has_skipped


def test_a_step_whose_gradient_is_not_finite_is_skipped(engine: Engine[LanguageModel], ragged: PackedObjective) -> None:
    accumulate(engine, ragged, micro=2)
    engine.step()
    before = state_of_all(engine)
    lose_finiteness(engine)
    loss, norm = engine.step()
    assert math.isfinite(loss)
    assert not math.isfinite(norm)
    assert engine.has_skipped
    assert all(torch.equal(values, before[name]) for name, values in state_of_all(engine).items())


def test_too_many_skipped_steps_in_a_row_end_the_run(engine: Engine[LanguageModel], ragged: PackedObjective) -> None:
    allowed = MAX_SKIPPED_STEPS
    for _ in range(allowed):
        lose_finiteness(engine)
        engine.step()
    accumulate(engine, ragged, micro=2)  # after one good step, counting starts again
    engine.step()
    for _ in range(allowed):
        lose_finiteness(engine)
        engine.step()
    lose_finiteness(engine)
    with pytest.raises(
        RunError, match=rf"{allowed + 1} steps in a row had no finite gradient .*at most {allowed} were expected"
    ):
        engine.step()


def test_a_wrong_world_size_is_noticed(tiny_config: ModelConfig) -> None:
    with pytest.raises(AssertionError, match=r"the process group has 1 ranks where 3 were started"):
        Engine(fresh(tiny_config), OPTIMIZER, ONE_RANK, world_size=3, micro_batch=1)


@pytest.mark.parametrize("num_blocks", [0, 1, 2])
@pytest.mark.parametrize("kind", [OPTIMIZER, MUON], ids=["adamw", "muon"])
def test_only_the_last_blocks_and_what_follows_them_move(
    tiny_config: ModelConfig, ragged: PackedObjective, num_blocks: int, kind: OptimizerConfig
) -> None:
    source = fresh(tiny_config.model_copy(update={"tie_word_embeddings": False}))
    before = dict(source.tensors())
    optimizer = kind.model_copy(update={"trained_layers": num_blocks})
    engine = Engine(source, optimizer, ONE_RANK, world_size=1, micro_batch=1)
    accumulate(engine, ragged, micro=2)
    engine.step()
    moved = {name for name, tensor in full_weights(engine).items() if not torch.equal(tensor, before[name])}
    engine.close()
    blocks = tuple(f"decoder.blocks.{layer}." for layer in range(2 - num_blocks, 2))
    assert moved == {name for name in before if name.startswith((*blocks, "decoder.norm.", "head."))}


def test_more_blocks_than_there_are_are_refused(tiny_config: ModelConfig) -> None:
    optimizer = OPTIMIZER.model_copy(update={"trained_layers": 3})
    with pytest.raises(ValueError, match="3 blocks are to be trained; the model has 2"):
        Engine(fresh(tiny_config), optimizer, ONE_RANK, world_size=1, micro_batch=1)


class Roundings(TorchDispatchMode):
    """Counts how often fp32 numbers of a given shape are cast to bf16."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and result.shape == self.shape:
            self.count += result.dtype == torch.bfloat16
        return result


def test_an_update_rounds_each_weight_once_and_has_the_same_gradients(
    ragged: PackedObjective, tiny_config: ModelConfig
) -> None:
    found = []
    for is_cached in (True, False):
        config = EngineConfig(precision="bf16", trackers=())
        engine = Engine(fresh(tiny_config), OPTIMIZER, config, world_size=1, micro_batch=1)
        weight = engine.module.get_parameter("decoder.blocks.0.mlp.up.weight")
        with Roundings(weight.shape) as roundings:
            if is_cached:
                accumulate(engine, ragged, micro=1)
            else:
                for row in np.arange(4):
                    shares(engine, ragged)(np.array([row]))[0].backward()  # type: ignore[no-untyped-call]
        found.append((roundings.count, [parameter.grad for parameter in engine.module.parameters()]))
        engine.close()
    (once, shared), (each, separate) = found
    assert once == tiny_config.num_hidden_layers  # each block has one weight of this shape
    assert each == 4 * once
    for ours, expected in zip(shared, separate, strict=True):
        assert ours is not None
        assert expected is not None
        assert torch.equal(ours, expected)


def test_an_operation_without_a_deterministic_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """`put_` has none on CPUs either, so no GPU is needed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    message = r"^engine\.deterministic: put_ has no deterministic GPU kernel in torch \S+; false was expected"
    with pytest.raises(ValueError, match=message), deterministic_kernels(True):
        torch.zeros(3).put_(torch.tensor([1]), torch.tensor([2.0]))
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError, match=r"^another error$"), deterministic_kernels(True):
        raise RuntimeError("another error")
