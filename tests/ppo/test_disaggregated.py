"""Disaggregated learners, generators and scorers give the same bits as colocated ones.

The reward is of two objectives, so that scores have two columns, and there are two teachers.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import ray
import torch
from safetensors.torch import load_file
from torch import Tensor

from cluster.config import ClusterConfig
from cluster.connection import disconnect
from cluster.failures import WorkerError, WorkerLostError
from cluster.group import WorkerGroup
from lm.samplers import engine
from ppo import learner
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.kept_passes import Repeated
from ppo.placement import Disaggregated
from ppo.rank import InitialModels
from ppo.roles import Roles
from ppo.rollout import Rollout
from tests.rays import start_ray
from training.config import EngineConfig
from training.packing import stream_rows

pytestmark = pytest.mark.long

ENGINE = EngineConfig(precision="fp32", trackers=())
Trained = tuple[dict[str, Tensor], list[dict[str, float]]]
Groups = tuple[WorkerGroup, WorkerGroup, WorkerGroup]


def group_of(num_ranks: int) -> WorkerGroup:
    """Ranks of one thread each: matrices of 16 columns gain nothing from more."""
    return WorkerGroup(num_ranks, ClusterConfig(cpu_threads=1))


@pytest.fixture(scope="module", autouse=True)
def _room() -> Iterator[None]:
    """Lets Ray place more workers than this machine has cores."""
    start_ray(num_cpus=8)
    yield
    disconnect()


def disaggregated(
    learners: WorkerGroup,
    generators: WorkerGroup,
    scorers: WorkerGroup,
    config: PPOConfig,
    engine: EngineConfig,
    models: InitialModels,
) -> Roles:
    return Roles.on_groups(config, engine, models, [], learners=learners, generators=generators, scorers=scorers)


@pytest.fixture(scope="module")
def config(ppo_config: Callable[..., PPOConfig], teachers: tuple[Path, ...]) -> PPOConfig:
    weights, kinds = {"brief": -0.5, "kind": 2.0}, zip(teachers, ("token", "reward"), strict=True)
    return ppo_config(
        minibatch=8, micro=2, num_iterations=2, num_epochs=1, learning_rate=3e-3, reward={"objective_weights": weights},
        teachers=[{"model": str(folder), "name": folder.name, "weight": 0.1, "kind": kind} for folder, kind in kinds],
    )  # fmt: skip


@pytest.fixture(scope="module")
def models(two_objectives: InitialModels, teachers: tuple[Path, ...]) -> InitialModels:
    return replace(two_objectives, teachers=teachers)


@pytest.fixture(scope="module")
def train(models: InitialModels, prompts: list[list[int]], config: PPOConfig) -> Callable[[Roles, Path], Trained]:
    def run(roles: Roles, folder: Path) -> Trained:
        assert models.pretraining is not None
        num_rows = len(stream_rows(models.pretraining.path, models.pretraining.seq_len))
        controller = PPOController(config, roles, prompts, models.scale, num_pretraining_rows=num_rows, seed=5)
        metrics = [controller.step(0)]
        evidence = controller.evidence
        roles.learners.save(folder, 1, {}, {})
        metrics.append(controller.step(1))
        roles.learners.finish_saving()
        roles.load(folder / "step-000001")  # the generators, too, go back
        controller.kl.coef, controller.evidence = metrics[1]["kl_coef"], evidence
        assert controller.step(1) == metrics[1]
        roles.learners.export_policy(folder)
        roles.close()
        weights = {
            f"{part}/{name}": tensor
            for part in ("model", "model_ema")
            for name, tensor in load_file(folder / part / "model.safetensors").items()
        }
        return weights, metrics

    return run


@pytest.fixture(scope="module")
def colocated(
    config: PPOConfig,
    models: InitialModels,
    train: Callable[[Roles, Path], Trained],
    tmp_path_factory: pytest.TempPathFactory,
) -> Trained:
    with group_of(1) as group:
        roles = Roles.on_groups(config, ENGINE, models, [], learners=group, generators=group, scorers=group)
        return train(roles, tmp_path_factory.mktemp("colocated"))


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    """Learners, generators and scorers of one rank each, shared by tests that do not break them: they start slowly."""
    with (
        group_of(1) as learners,
        group_of(1) as generators,
        group_of(1) as scorers,
    ):
        yield learners, generators, scorers


@pytest.mark.parametrize("transport", ["object_store", "broadcast"])
def test_groups_of_one_give_the_same_bits(
    colocated: Trained,
    config: PPOConfig,
    models: InitialModels,
    train: Callable[[Roles, Path], Trained],
    groups: Groups,
    tmp_path: Path,
    transport: Literal["object_store", "broadcast"],
) -> None:
    config = config.model_copy(update={"placement": Disaggregated(weight_transport=transport)})
    weights, metrics = train(disaggregated(*groups, config, ENGINE, models), tmp_path)
    expected, expected_metrics = colocated
    assert metrics == expected_metrics
    assert all({"score", "score/kind", "score/brief"} <= line.keys() for line in metrics)
    assert all({"teacher_kl_nats/first", "teacher_kl_nats/wide"} <= line.keys() for line in metrics)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name


def merging_agrees(
    groups: Groups,
    adapted: InitialModels,
    ppo_config: Callable[..., PPOConfig],
    prompts: list[list[int]],
    transport: str,
    zero_stage: Literal[0, 3],
) -> None:
    """Checks that a generator which is sent the adapter alone gives the same bits as one that gets merged weights."""
    engine = EngineConfig(precision="bf16", zero_stage=zero_stage, trackers=())
    assert adapted.pretraining is not None
    num_rows = len(stream_rows(adapted.pretraining.path, adapted.pretraining.seq_len))

    def trained(sends: str) -> list[dict[str, float]]:
        placement = {"kind": "disaggregated", "weight_transport": transport}
        lora = {"rank": 3, "alpha": 6.0, "sends": sends}
        config = ppo_config(micro=4, learning_rate=1e-2, num_iterations=2, lora=lora, placement=placement)
        roles = disaggregated(*groups, config, engine, adapted)
        controller = PPOController(config, roles, prompts, adapted.scale, num_pretraining_rows=num_rows, seed=5)
        metrics = [controller.step(iteration) for iteration in range(2)]
        roles.close()
        return metrics

    assert trained("adapter") == trained("merged")


@pytest.mark.parametrize("transport", ["object_store", "broadcast"])
def test_generators_elsewhere_merge_the_adapter_that_they_are_sent(
    adapted: InitialModels,
    ppo_config: Callable[..., PPOConfig],
    prompts: list[list[int]],
    groups: Groups,
    transport: str,
) -> None:
    merging_agrees(groups, adapted, ppo_config, prompts, transport, 0)


@pytest.mark.nightly
def test_an_adapter_in_shards_is_sent_alone(
    adapted: InitialModels, ppo_config: Callable[..., PPOConfig], prompts: list[list[int]]
) -> None:
    with group_of(2) as learners, group_of(1) as generators, group_of(1) as scorers:
        merging_agrees((learners, generators, scorers), adapted, ppo_config, prompts, "broadcast", 3)


@pytest.mark.long
def test_groups_of_other_sizes_and_shards_agree_to_rounding(
    colocated: Trained,
    config: PPOConfig,
    models: InitialModels,
    train: Callable[[Roles, Path], Trained],
    tmp_path: Path,
) -> None:
    changes = {"placement": Disaggregated(weight_transport="broadcast"), "memory": "small"}  # scorers shard
    config = config.model_copy(update=changes)
    engine = ENGINE.model_copy(update={"zero_stage": 3})
    with (
        group_of(1) as learners,
        group_of(2) as generators,
        group_of(2) as scorers,
    ):
        roles = disaggregated(learners, generators, scorers, config, engine, models)
        weights, _ = train(roles, tmp_path)
    for name, tensor in colocated[0].items():
        torch.testing.assert_close(weights[name], tensor, atol=2e-5, rtol=1e-4, msg=name)


def _wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.01)


def _confuse() -> None:
    """Makes this process mistake every set of weights for another one."""
    engine.digests_of = lambda weights: dict.fromkeys(weights, -1)


def test_generators_take_weights_in_their_turn_and_learners_do_not_wait(
    groups: Groups, config: PPOConfig, models: InitialModels, prompts: list[list[int]], tmp_path: Path
) -> None:
    learners, _, scorers = groups
    with group_of(1) as generators:
        roles = disaggregated(learners, generators, scorers, config, ENGINE, models)
        busy = generators.ranks.actors[0].run.remote(_wait_for, (tmp_path / "sent",), {})
        first = roles.generators.start_sampling(range(len(prompts)), prompts, range(16))
        roles.sync_weights()
        second = roles.generators.start_sampling(range(len(prompts)), prompts, range(16))
        (tmp_path / "sent").touch()
        assert ray.get(busy)[0], "the learner waited for the generator"
        found = second()
        # Nothing was learned in between, so both are the same, whenever the first is fetched.
        assert torch.equal(first().tokens_BT, found.tokens_BT)
        # Missing weights are detected before any sample made with them is used.
        generators.run("confuse", _confuse)
        roles.sync_weights()
        third = roles.generators.start_sampling(range(len(prompts)), prompts, range(16))
        with pytest.raises(WorkerError, match=r"ppo\.receive: rank 0 of 1: AssertionError.*digest f{16} where"):
            third()


def _touch_after_values(path: Path) -> None:
    """Makes learners of this process write a file once they have computed values; other tests are not affected."""
    values = learner.Learner.values

    def touching(self: learner.Learner, rollout: Rollout, pass_sizes: Sequence[int], repeated: Repeated) -> Tensor:
        found = values(self, rollout, pass_sizes, repeated)
        path.touch()
        return found

    learner.Learner.values = touching  # type: ignore[method-assign]


def test_learners_and_scorers_work_on_a_rollout_at_the_same_time(
    groups: Groups, config: PPOConfig, models: InitialModels, prompts: list[list[int]], tmp_path: Path
) -> None:
    """The scorer waits until the learner's passes are done; were those started after the scores, both would wait."""
    learners, _, scorers = groups
    roles = disaggregated(*groups, config, ENGINE, models)
    controller = PPOController(config, roles, prompts, models.scale, num_pretraining_rows=9, seed=5)
    learners.run("patch", _touch_after_values, tmp_path / "values")
    busy = scorers.ranks.actors[0].run.remote(_wait_for, (tmp_path / "values",), {})
    assert controller.step(0)["kl_nats"] == 0.0
    assert ray.get(busy)[0], "the learner's passes waited for the scorer"


def kill(group: WorkerGroup) -> None:
    """At once: an actor that `ray.kill` ends may carry out a call before that."""
    os.kill(group.run("pid", os.getpid)[0], signal.SIGKILL)


@pytest.mark.nightly
def test_a_generator_lost_in_a_broadcast_is_named_though_the_learner_waits_for_it(
    groups: Groups, config: PPOConfig, models: InitialModels
) -> None:
    by_broadcast = config.model_copy(update={"placement": Disaggregated(weight_transport="broadcast")})
    _, _, scorers = groups
    with group_of(1) as learners, group_of(1) as generators:
        roles = disaggregated(learners, generators, scorers, by_broadcast, ENGINE, models)
        learners.run("confuse", _confuse)
        with pytest.raises(
            WorkerError, match=r"ppo\.receive_broadcast: rank 0 of 1: AssertionError.*learner's has f{16}"
        ):
            roles.sync_weights()
    with group_of(1) as learners, group_of(1) as generators:
        roles = disaggregated(learners, generators, scorers, by_broadcast, ENGINE, models)
        kill(generators)
        begun = time.monotonic()
        with pytest.raises(WorkerLostError):
            roles.sync_weights()
        assert time.monotonic() - begun < 20, "a learner that waits for a generator hid its loss"


def test_a_lost_generator_is_named(
    groups: Groups, config: PPOConfig, models: InitialModels, prompts: list[list[int]]
) -> None:
    learners, _, scorers = groups
    with group_of(1) as generators:
        roles = disaggregated(learners, generators, scorers, config, ENGINE, models)
        kill(generators)
        with pytest.raises(WorkerLostError, match=r"ppo\.generate: rank 0 of 1 was lost"):
            roles.generators.start_sampling(range(len(prompts)), prompts, range(len(prompts)))()


@pytest.mark.nightly
def test_a_generator_and_a_scorer_that_are_stopped_are_named(
    groups: Groups, config: PPOConfig, models: InitialModels, prompts: list[list[int]]
) -> None:
    """No rank waits for them in a collective, whose timeout would detect them."""
    soon = ClusterConfig(silence_seconds=4, cpu_threads=1)
    seeds = range(len(prompts))
    learners, _, _ = groups
    with WorkerGroup(1, soon) as generators, WorkerGroup(1, soon) as scorers:
        roles = disaggregated(learners, generators, scorers, config, ENGINE, models)
        generator = generators.run("pid", os.getpid)[0]
        rollout = roles.generators.start_sampling(range(len(prompts)), prompts, seeds)()
        os.kill(scorers.run("pid", os.getpid)[0], signal.SIGSTOP)
        with pytest.raises(WorkerLostError, match=r"^ppo\.scores: rank 0 of 1 was lost: no heartbeat for 4 s"):
            roles.scorers.start_scores(rollout)()
        sampling = roles.generators.start_sampling(range(len(prompts)), prompts, seeds)
        os.kill(generator, signal.SIGSTOP)
        with pytest.raises(WorkerLostError, match=r"^ppo\.generate: rank 0 of 1 was lost: no heartbeat for 4 s"):
            sampling()
