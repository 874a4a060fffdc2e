"""A generator that is killed in the middle of a round is replaced; learners and other generators keep their state."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cluster import calls
from cluster.config import ClusterConfig
from cluster.connection import disconnect
from cluster.failures import WorkerLostError
from cluster.group import WorkerGroup
from cluster.hosts import this_host
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.rank import InitialModels, ScoreScale
from ppo.roles import Roles
from ppo.rollout import Rollout
from ppo.rounds import Exchange, Unfinished
from reward.external import NoReward
from tests.ppo.environments.test_continuous import CLASS
from tests.ppo.environments.test_runs import ASKED
from tests.rays import start_ray
from tests.tiers import in_ci
from training.config import EngineConfig

pytestmark = pytest.mark.long

ENGINE = EngineConfig(precision="fp32", trackers=())
NUM_ITERATIONS = 4
Trained = tuple[list[Rollout], list[dict[str, float]], dict[str, Tensor], Unfinished]
Fault = tuple[int, bool]  # batch in whose first round a generator dies, and whether it has written which rows ended


@pytest.fixture(scope="module")
def new_group() -> Iterator[Callable[[int], WorkerGroup]]:
    """Lets Ray place more workers than this machine has cores."""
    start_ray(num_cpus=8)
    yield lambda num_ranks: WorkerGroup(num_ranks, ClusterConfig(cpu_threads=1))
    disconnect()


def die_in_round(batch: int, has_written: bool) -> None:
    """Lets this process kill itself when it has drawn the tokens of a round."""
    union = Exchange.union

    def dying(self: Exchange, current: int, number: int, rows: Sequence[int]) -> list[int]:
        if (current, number) == (batch, 1):
            if has_written:
                self._store.compare_set(f"{self._opening} {batch} {number} {self.generator}", "", str([*rows]))
            os.kill(os.getpid(), signal.SIGKILL)
        return union(self, current, number, rows)

    Exchange.union = dying  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def train(
    new_group: Callable[[int], WorkerGroup],
    ppo_config: Callable[..., PPOConfig],
    models: InitialModels,
    prompts: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Trained]:
    """Trains with two generators, each of which has a fault, on single responses or, with the class of an environment,
    on conversations; returns what was learned from, and the policy.
    """
    placement = {"kind": "continuous", "num_generators": 2, "num_rows": 10, "round_tokens": 2}
    values = {"num_iterations": NUM_ITERATIONS, "num_epochs": 1, "ptx": None, "placement": placement}

    def run(learners: WorkerGroup, faults: Sequence[Fault], environment: str = "", seconds: float = 0.0) -> Trained:
        config, own = ppo_config(micro=2, **values), models
        if environment:
            table = {"kind": "class", "class_name": environment, "max_turns": 3, "settings": {"seconds": seconds}}
            changes = {"environment": table, "reward": {"kind": "none"}, "max_new_tokens": 30, "max_failed_share": 0.9}
            config = ppo_config(micro=2, **values, **changes)
            own = replace(models, reward=NoReward(), scale=ScoreScale(0.0, 1.0, config.score_coef))
        folder, rollouts, metrics = tmp_path_factory.mktemp("policy"), list[Rollout](), list[dict[str, float]]()
        with new_group(2) as generators:
            roles = Roles.on_groups(
                config, ENGINE, own, ASKED, learners=learners, generators=generators, scorers=learners
            )
            if faults:
                generators.run_split("plant", die_in_round, faults)
            controller = PPOController(config, roles, prompts, own.scale, num_pretraining_rows=1, seed=5)
            before = [group.run("pid", os.getpid) for group in (learners, generators)]
            for iteration in range(NUM_ITERATIONS):
                metrics.append(controller.step(iteration))
                assert controller.batch is not None
                rollouts.append(controller.batch.rollout)
            after = [group.run("pid", os.getpid) for group in (learners, generators)]
            assert after[0] == before[0], "the learner was replaced"
            assert [one != other for one, other in zip(*(pids[1] for pids in (before, after)), strict=True)] == [
                bool(faults)
            ] * 2
            left = Unfinished.from_bytes(roles.generators.unfinished())
            roles.learners.export_policy(folder)
            roles.close()
        return rollouts, metrics, load_file(folder / "model" / "model.safetensors"), left

    return run


@pytest.mark.parametrize("converses", in_ci([False, True], [True]))
def test_generators_killed_in_a_round_change_no_bit_and_learners_continue(
    new_group: Callable[[int], WorkerGroup],
    train: Callable[..., Trained],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    converses: bool,
) -> None:
    """One dies when the other has read its last round, with the first weights; then that one, with weights of the
    learner, before the other knows which of its responses have ended. Conversations have a slower environment then.
    """
    environment = f"{tmp_path}/counter.py:Counter" if converses else ""
    (tmp_path / "counter.py").write_text(CLASS)
    with new_group(1) as learners:
        calm = train(learners, [], environment)
        struck = train(learners, [(1, True), (2, False)], environment, seconds=0.02)
    for rollout, other in zip(calm[0], struck[0], strict=True):
        for name, tensor in rollout.tensors().items():
            assert name == "environment_seconds_B" or torch.equal(tensor, other.tensors()[name]), name
    for of_calm, of_struck in zip(calm[1], struck[1], strict=True):
        assert {**of_struck, "environment_seconds": 0} == {**of_calm, "environment_seconds": 0}
    assert all(not converses or float(rollout.num_turns_B.float().mean()) > 1 for rollout in calm[0])
    assert struck[2].keys() == calm[2].keys()
    assert all(torch.equal(tensor, struck[2][name]) for name, tensor in calm[2].items())
    assert struck[3] == calm[3]
    said = caplog.text + capsys.readouterr().err
    for rank in range(2):
        assert f"ppo: rank {rank} of 2 was lost: " in said
    assert said.count("A new process repeats what was under way") == 2


class Mortal:
    """Counts, and dies when it is told to."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    def start(self, count: int) -> None:
        self.count = count

    def die(self, is_meant: bool) -> None:
        if is_meant:
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        """Does nothing."""


def test_a_new_object_repeats_the_calls_since_the_last_settled_ones(new_group: Callable[[int], WorkerGroup]) -> None:
    with new_group(2) as group:
        kept = group.put_replaceable("test", Mortal)
        first = kept.start_all(Mortal.add, 100)
        assert first() == [100, 100]
        kept.settle(first)
        kept.start_from(Mortal.start, [(3,), (100,)])  # another state than the one lost, to see who starts from it
        second = kept.start_split(Mortal.add, [(10,), (20,)])
        os.kill(group.run("pid", os.getpid)[0], signal.SIGKILL)
        lost, end = group.ranks.actors[0], time.monotonic() + 120
        while group.ranks.actors[0] is lost and time.monotonic() < end:
            kept.mend()  # at once, though nobody waits for it
            time.sleep(0.01)
        third = kept.start_all(Mortal.add, 1)
        assert (first(), second(), third()) == ([100, 100], [13, 120], [14, 121])
        with pytest.raises(WorkerLostError, match=r"^test\.die: rank 0 of 2 was lost: "):  # in vain, again and again
            kept.call_split(Mortal.die, [(True,), (False,)])
        assert not group.is_open


def test_a_new_process_has_to_run_the_code_of_the_driver(
    new_group: Callable[[int], WorkerGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        calls, "this_host", lambda: replace(this_host(), versions={**this_host().versions, "heed": "old"})
    )
    with new_group(1) as group:
        kept = group.put_replaceable("test", Mortal)
        with pytest.raises(ValueError, match=r"Heed's code in .* has changed since this run began"):
            kept.call_split(Mortal.die, [(True,)])
        assert not group.is_open
