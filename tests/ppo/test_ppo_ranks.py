"""PPO on two ranks of a real Ray group, with and without ZeRO, against one rank in this process."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import ppo.controller
from cluster.connection import disconnect
from cluster.group import WorkerGroup
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.rank import InitialModels
from ppo.roles import Roles
from training.config import BatchConfig, EngineConfig
from training.packing import stream_rows

pytestmark = pytest.mark.long

NUM_ITERATIONS = 2


@pytest.fixture(scope="module")
def group() -> Iterator[WorkerGroup]:
    with WorkerGroup(2) as workers:
        yield workers
    disconnect()


LORA = {"rank": 3, "alpha": 6}
KINDS: dict[str, dict[str, object]] = {
    "full": {}, "adapters": {"lora": LORA}, "shared body": {"lora": {**LORA, "shared_body": True}}
}  # fmt: skip


@pytest.fixture(scope="module")
def models(adapted: InitialModels) -> InitialModels:
    return adapted


@pytest.fixture(scope="module")
def config_of(ppo_config: Callable[..., PPOConfig]) -> Callable[[str], PPOConfig]:
    def build(kind: str) -> PPOConfig:
        changes = {"minibatch": 8, "micro": 2, "num_iterations": NUM_ITERATIONS, "num_epochs": 1, **KINDS[kind]}
        return ppo_config(learning_rate=3e-3, **changes)

    return build


Trained = tuple[dict[str, Tensor], list[dict[str, float]]]


@pytest.fixture(scope="module")
def train(models: InitialModels, prompts: list[list[int]]) -> Callable[[Roles, Path], Trained]:
    """Runs the iterations; returns the final policy, its average, and every iteration's metrics."""

    def run(roles: Roles, folder: Path) -> Trained:
        num_rows = len(stream_rows(models.pretraining.path, models.pretraining.seq_len))
        controller = PPOController(roles.config, roles, prompts, models.scale, num_pretraining_rows=num_rows, seed=5)
        metrics = [controller.step(iteration) for iteration in range(NUM_ITERATIONS)]
        roles.learners.export_policy(folder)
        weights = {
            f"{part}/{name}": tensor
            for part in ("model", "model_ema")
            for name, tensor in load_file(folder / part / "model.safetensors").items()
        }
        return weights, metrics

    return run


@pytest.fixture(scope="module")
def one_rank(
    config_of: Callable[[str], PPOConfig],
    models: InitialModels,
    train: Callable[[Roles, Path], Trained],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Trained]:
    @cache
    def build(kind: str) -> Trained:
        roles = Roles.in_process(config_of(kind), EngineConfig(precision="fp32", trackers=()), models)
        trained = train(roles, tmp_path_factory.mktemp("one"))
        roles.close()
        return trained

    return build


@pytest.mark.parametrize("micro", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_kept_passes_change_no_bit_on_two_ranks(
    group: WorkerGroup,
    ppo_config: Callable[..., PPOConfig],
    models: InitialModels,
    train: Callable[[Roles, Path], Trained],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    micro: int,
) -> None:
    """The second iteration keeps passes, two of each rank or its only one.

    Comes before tests with ZeRO, from which Accelerate does not go back.
    """
    changes: dict[str, object] = {"ptx": None} if micro == 4 else {}
    config = ppo_config(minibatch=8, micro=micro, num_iterations=NUM_ITERATIONS, num_epochs=1, **changes)
    found: list[Trained] = []
    for repeated_every in (16, 1):
        monkeypatch.setattr(ppo.controller, "CHECK_RATIO_EVERY", repeated_every)
        engine = EngineConfig(precision="fp32", trackers=())
        roles = Roles.on_groups(config, engine, models, [], learners=group, generators=group, scorers=group)
        (tmp_path / str(repeated_every)).mkdir()
        found.append(train(roles, tmp_path / str(repeated_every)))
        roles.close()
    (weights, metrics), (expected, expected_metrics) = found
    assert metrics == expected_metrics
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


# CI meets every kind and every stage once; test_splits.py has the updates of all weights under each.
OF_CI = [("shared body", 0), ("full", 2), ("adapters", 3)]


@pytest.mark.parametrize(
    ("kind", "zero_stage"),
    [
        pytest.param(kind, zero_stage, marks=[pytest.mark.nightly] * ((kind, zero_stage) not in OF_CI))
        for kind, zero_stage in [*((kind, zero_stage) for zero_stage in (0, 2) for kind in KINDS), ("adapters", 3)]
    ],
)
def test_two_ranks_give_the_weights_of_one(
    group: WorkerGroup,
    config_of: Callable[[str], PPOConfig],
    models: InitialModels,
    train: Callable[[Roles, Path], Trained],
    one_rank: Callable[[str], Trained],
    kind: str,
    zero_stage: int,
    tmp_path: Path,
) -> None:
    engine = EngineConfig.model_validate({"precision": "fp32", "zero_stage": zero_stage, "trackers": ()})
    config, is_shared = config_of(kind), kind == "shared body"
    roles = Roles.on_groups(config, engine, models, [], learners=group, generators=group, scorers=group)
    weights, metrics = train(roles, tmp_path)
    # Every rank writes its part of a checkpoint, and reading it restores the same weights.
    roles.learners.save(tmp_path / "checkpoints", 7, {}, {})
    roles.learners.finish_saving()
    roles.load(tmp_path / "checkpoints" / "step-000007")
    (tmp_path / "again").mkdir()
    roles.learners.export_policy(tmp_path / "again")
    roles.close()
    again = load_file(tmp_path / "again" / "model" / "model.safetensors")
    expected, expected_metrics = one_rank(kind)
    for name, tensor in expected.items():
        torch.testing.assert_close(
            weights[name], tensor, atol=2e-6, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )
    start = load_file(models.sft / "model.safetensors")
    assert all(torch.equal(tensor, weights[f"model/{name}"]) for name, tensor in again.items())
    assert max(float((again[name] - tensor).abs().max()) for name, tensor in start.items()) > 1e-3  # it learned
    for ours, theirs in zip(metrics, expected_metrics, strict=True):
        assert ours.keys() == theirs.keys()
        for name, figure in theirs.items():
            assert ours[name] == pytest.approx(figure, rel=1e-3, abs=1e-5), name
    # In a batch with other rows, the same row may be rounded otherwise.
    assert metrics[0]["kl_nats"] == pytest.approx(0.0, abs=1e-5 if is_shared else 0.0)


def test_a_batch_that_does_not_divide_among_the_ranks_is_refused(
    group: WorkerGroup, config_of: Callable[[str], PPOConfig], models: InitialModels
) -> None:
    engine = EngineConfig(precision="fp32", trackers=())
    odd = config_of("full").model_copy(update={"minibatch": BatchConfig(batch_size=2, micro_batch_size=2)})
    with pytest.raises(ValueError, match="batch_size over ranks x micro_batch_size: 2 is not a multiple of 4"):
        Roles.on_groups(odd, engine, models, [], learners=group, generators=group, scorers=group)
