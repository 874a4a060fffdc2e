"""PPO whose generators are teams of ranks gives what it gives with a whole policy on every rank, up to rounding."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from cluster.config import ClusterConfig
from cluster.connection import disconnect
from cluster.group import WorkerGroup
from cluster.remote import Handle, Pending
from lm.samplers.engine import max_difference
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.generator import Generator, Generators
from ppo.rank import InitialModels
from ppo.roles import Roles
from ppo.rollout import Rollout
from tests.rays import start_ray
from tests.tiers import in_ci
from training.config import EngineConfig
from training.notices import RunError

ENGINE = EngineConfig(precision="fp32", trackers=())
Trained = tuple[list[Rollout], list[dict[str, float]]]


@pytest.fixture(scope="module")
def new_group() -> Iterator[Callable[[int], WorkerGroup]]:
    """Lets Ray place more workers than this machine has cores."""
    start_ray(num_cpus=8)
    yield lambda num_ranks: WorkerGroup(num_ranks, ClusterConfig(cpu_threads=1))
    disconnect()


@pytest.fixture(scope="module")
def config_of(ppo_config: Callable[..., PPOConfig]) -> Callable[..., PPOConfig]:
    def build(tensor_parallel_size: int, **changes: object) -> PPOConfig:
        sampler = {"tensor_parallel_size": tensor_parallel_size}
        return ppo_config(
            micro=2, num_iterations=3, num_epochs=1, learning_rate=3e-3, ptx=None, sampler=sampler, **changes
        )

    return build


@pytest.fixture(scope="module")
def train(adapted: InitialModels, prompts: list[list[int]]) -> Callable[[Roles, Path], Trained]:
    """Runs the iterations, and the last one again from a checkpoint, which gives the same bits."""

    def run(roles: Roles, folder: Path) -> Trained:
        controller = PPOController(
            roles.config,
            roles,
            prompts,
            adapted.scale,
            num_pretraining_rows=1,
            seed=5,
            max_difference=max_difference("fp32", 2) / 10,
        )
        rollouts, metrics = list[Rollout](), list[dict[str, float]]()
        for iteration in range(3):
            if iteration == 2:
                evidence, stale = controller.evidence, controller.stale_rollouts(2)
                roles.learners.save(folder, 2, {}, {})
                roles.learners.finish_saving()
            metrics.append(controller.step(iteration))
            assert controller.batch is not None
            rollouts.append(controller.batch.rollout)
        roles.load(folder / "step-000002")
        controller.kl.coef, controller.evidence = metrics[2]["kl_coef"], evidence
        controller.in_flight = {ahead: _held(rollout) for ahead, rollout in stale.items()}
        assert controller.step(2) == metrics[2]
        if roles.generators.ranks.num_ranks == roles.generators.team_size:
            assert len(roles.generators.start_sampling([3], prompts[3:4], [9])()) == 1
        roles.close()
        return rollouts, metrics

    return run


def _held(rollout: Rollout) -> Pending[Rollout]:
    return lambda: rollout


def require_equal_but_for_rounding(found: Trained, expected: Trained) -> None:
    for rollout, other in zip(found[0], expected[0], strict=True):
        assert torch.equal(rollout.tokens_BT, other.tokens_BT)
        torch.testing.assert_close(rollout.behaviour_logprobs_BR, other.behaviour_logprobs_BR, atol=1e-4, rtol=1e-4)
        assert (rollout.sampled_by_BR[0, 0] == other.sampled_by_BR[0, 0]) or rollout is not found[0][0]
    for metrics, others in zip(found[1], expected[1], strict=True):
        assert metrics == pytest.approx(others, rel=1e-3, abs=1e-4)


CHANGES: dict[str, dict[str, object]] = {
    "as by default": {},
    "adapters, memory small": {"lora": {"rank": 3, "alpha": 6}, "memory": "small"},
}


@pytest.mark.long
@pytest.mark.parametrize("kind", in_ci(CHANGES, ["as by default"]))
def test_two_colocated_ranks_sample_as_one_generator(
    new_group: Callable[[int], WorkerGroup],
    config_of: Callable[..., PPOConfig],
    adapted: InitialModels,
    train: Callable[[Roles, Path], Trained],
    tmp_path: Path,
    kind: str,
) -> None:
    found = list[Trained]()
    with new_group(2) as group:
        for size in (1, 2):
            folder = tmp_path / str(size)
            folder.mkdir()
            config = config_of(size, **CHANGES[kind])
            roles = Roles.on_groups(config, ENGINE, adapted, [], learners=group, generators=group, scorers=group)
            found.append(train(roles, folder))
    require_equal_but_for_rounding(found[1], found[0])


PLACEMENTS: list[dict[str, object]] = [
    {"kind": "disaggregated", "weight_transport": "broadcast"},
    {"kind": "asynchronous", "max_staleness": 1},
]


@pytest.mark.long
@pytest.mark.parametrize("placement", in_ci(PLACEMENTS, PLACEMENTS[1:]), ids=lambda placement: str(placement["kind"]))
def test_two_teams_of_generators_on_ranks_of_their_own(
    new_group: Callable[[int], WorkerGroup],
    config_of: Callable[..., PPOConfig],
    adapted: InitialModels,
    train: Callable[[Roles, Path], Trained],
    tmp_path: Path,
    placement: dict[str, object],
) -> None:
    found = list[Trained]()
    with new_group(1) as learners, new_group(4) as generators:
        for size, num_generators in ((1, 4), (2, 4)):
            folder = tmp_path / str(size)
            folder.mkdir()
            config = config_of(size, placement={**placement, "num_generators": num_generators})
            roles = Roles.on_groups(
                config, ENGINE, adapted, [], learners=learners, generators=generators, scorers=learners
            )
            found.append(train(roles, folder))
    require_equal_but_for_rounding(found[1], found[0])


@pytest.mark.long
@pytest.mark.parametrize(("num_generators", "team"), [(4, 2), pytest.param(2, 1, marks=pytest.mark.nightly)])
def test_continuous_generators_draw_what_one_would(
    new_group: Callable[[int], WorkerGroup],
    config_of: Callable[..., PPOConfig],
    adapted: InitialModels,
    prompts: list[list[int]],
    num_generators: int,
    team: int,
) -> None:
    """Two teams of two, and two alone: which rows a generator has changes no token."""
    found = list[Trained]()
    with new_group(1) as learners:
        for num_ranks, team_size in ((1, 1), (num_generators, team)):
            placement = {"kind": "continuous", "num_generators": num_ranks, "num_rows": 10, "round_tokens": 2}
            config = config_of(team_size, placement=placement)
            with new_group(num_ranks) as generators:
                roles = Roles.on_groups(
                    config, ENGINE, adapted, [], learners=learners, generators=generators, scorers=learners
                )
                controller = PPOController(config, roles, prompts, adapted.scale, num_pretraining_rows=1, seed=5)
                rollouts, metrics = list[Rollout](), list[dict[str, float]]()
                for iteration in range(3):
                    metrics.append(controller.step(iteration))
                    assert controller.batch is not None
                    rollouts.append(controller.batch.rollout)
                roles.close()
            found.append((rollouts, metrics))
    require_equal_but_for_rounding(found[1], found[0])


class _Ranks:
    """Stands in for the ranks: each returns what it is asked for, with its rank in the last place if `differ`."""

    num_ranks = 4

    def __init__(self, hosts: Sequence[str], *, differ: bool = False) -> None:
        self.hosts, self.differ = hosts, differ

    def settle(self, _calls: object) -> None:
        """Repeats nothing."""

    def call_all(self, _method: object) -> list[str]:
        return [*self.hosts]

    def start_split(self, _method: object, args_of_rank: Sequence[Any]) -> Pending[list[Rollout]]:
        assert len(args_of_rank) == self.num_ranks
        return lambda: [
            Rollout.of(
                rows, prompts, [[rank if self.differ else seed] for seed in seeds], [True] * len(rows),
                [[-1.0]] * len(rows), max_new_tokens=2, pad_id=0,
            )
            for rank, (rows, prompts, seeds, *_) in enumerate(args_of_rank)
        ]  # fmt: skip


def generators_on(hosts: Sequence[str], *, differ: bool = False) -> Generators:
    ranks: Handle[Generator] = _Ranks(hosts, differ=differ)  # type: ignore[assignment]
    return Generators(ranks, 2)


def test_a_team_gets_one_share_and_its_ranks_must_agree() -> None:
    prompts = [[5], [6], [7], [8]]
    found = generators_on(["a", "a", "b", "b"]).start_sampling(range(4), prompts, [10, 11, 12, 13])()
    assert found.token_lists() == (prompts, [[10], [11], [12], [13]])
    assert found.prompt_rows_B.tolist() == [0, 1, 2, 3]
    with pytest.raises(
        RunError, match="ppo: generator rank 1 sampled other tokens, or with other weights, than rank 0"
    ):
        generators_on(["a"] * 4, differ=True).start_sampling(range(4), prompts, [10, 11, 12, 13])()


def test_a_team_on_two_machines_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    generators_on(["a", "a", "b", "b"])
    assert not caplog.text
    generators_on(["a", "a", "b", "c"])
    assert "ppo: ranks 2 to 3 compute one policy together, but are on b and c" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_generators": 3}, "placement.num_generators over sampler.tensor_parallel_size: 3 is not a multiple of 2"),
        ({"num_generators": 10}, "rollout_batch_size over placement.num_generators over sampler.tensor_parallel_size"),
    ],
)
def test_generators_that_do_not_form_teams_are_refused(
    config_of: Callable[..., PPOConfig], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        config_of(2, placement={"kind": "disaggregated", **changes})
    # 16 responses divide among 4 teams of 4 ranks, but not among 6.
    assert config_of(4, placement={"kind": "disaggregated", "num_generators": 16}).placement.num_generators == 16
