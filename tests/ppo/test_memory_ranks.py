"""`ppo.memory` on two ranks of a real Ray group: the same bits and checkpoints in every mode, and a change of mode."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.connection import disconnect
from cluster.group import WorkerGroup
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.rank import InitialModels
from ppo.roles import Roles
from training.config import EngineConfig
from training.packing import stream_rows

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def group() -> Iterator[WorkerGroup]:
    with WorkerGroup(2) as workers:
        yield workers
    disconnect()


def _hashes(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(
    ("zero_stage", "modes"),
    [
        pytest.param(2, {"fast": "", "small": "fast"}, marks=pytest.mark.nightly),
        (3, {"fast": "", "balanced": "", "small": "balanced"}),
    ],
)
def test_every_mode_gives_the_same_bits_and_checkpoints_and_resumes_another(
    group: WorkerGroup,
    models: InitialModels,
    prompts: list[list[int]],
    ppo_config: Callable[..., PPOConfig],
    tmp_path: Path,
    zero_stage: int,
    modes: dict[str, str],
) -> None:
    """`modes` says from which other mode's checkpoint the second iteration starts."""
    engine = EngineConfig.model_validate({"precision": "bf16", "zero_stage": zero_stage, "trackers": ()})
    assert models.pretraining is not None
    num_rows = len(stream_rows(models.pretraining.path, models.pretraining.seq_len))
    metrics, checkpoints, exported = {}, {}, {}
    sizes = {"minibatch": 8, "micro": 4, "rollout_batch_size": 8, "num_iterations": 2, "num_epochs": 1}
    for memory, resumed_from in modes.items():
        config = ppo_config(**sizes, memory=memory)
        roles = Roles.on_groups(config, engine, models, [], learners=group, generators=group, scorers=group)
        controller = PPOController(config, roles, prompts, models.scale, num_pretraining_rows=num_rows, seed=5)
        folder = tmp_path / memory
        found = [controller.step(0)]
        roles.learners.save(folder, 1, {}, {})
        roles.learners.finish_saving()
        if resumed_from:
            roles.load(tmp_path / resumed_from / "step-000001")
        found.append(controller.step(1))
        roles.learners.save(folder, 2, {}, {})
        roles.learners.finish_saving()
        (folder / "out").mkdir()
        roles.learners.export_policy(folder / "out")
        roles.close()
        metrics[memory], checkpoints[memory] = found, [_hashes(folder / f"step-00000{n}") for n in (1, 2)]
        exported[memory] = _hashes(folder / "out")
    for memory in modes:
        assert metrics[memory] == metrics["fast"]
        assert checkpoints[memory] == checkpoints["fast"]
        assert exported[memory] == exported["fast"]
    assert len(checkpoints["fast"][1]) > 4
