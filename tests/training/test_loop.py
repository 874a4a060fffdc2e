"""The training loop: a killed run resumes and ends with the weights of an uninterrupted run, bit for bit."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from lm.config import ModelConfig
from lm.model import LanguageModel
from lm.source import RandomInit, load
from tests.models import full_weights
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.engine import Engine
from training.loop import LoopConfig, TrainingLoop
from training.metrics import read_metrics
from training.notices import CheckpointError, StoppedError, request_stop, withdraw_stop
from training.objectives import CausalLMObjective
from training.packing import IntArray
from training.writer import CheckpointWriter

OPTIMIZER = OptimizerConfig(learning_rate=0.01, schedule="cosine", warmup_steps=2, weight_decay=0.1)
NUM_STEPS, SAVE_EVERY = 6, 3


@pytest.fixture
def _no_request_is_left() -> Iterator[None]:
    yield
    withdraw_stop()


class KilledError(Exception):
    pass


class Mortal(CausalLMObjective):
    """Dies at its n-th forward pass; before some passes something else happens."""

    def __init__(self, rows: np.ndarray, passes: int, events: Mapping[int, Callable[[], object]]) -> None:
        super().__init__(rows)
        self.passes, self.events, self.num_done = passes, events, 0

    def loss(
        self, model: LanguageModel, rows: IntArray, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        if self.passes == 0:
            raise KilledError
        self.passes -= 1
        self.events.get(self.num_done, lambda: None)()
        self.num_done += 1
        return super().loss(model, rows, device, seed)


class Impatient(Engine[LanguageModel]):
    """Retries a failed write only briefly."""

    def checkpoint_writer(self) -> CheckpointWriter:
        writer = super().checkpoint_writer()
        writer.retry_seconds = 0.3
        return writer


def make(
    folder: Path,
    config: ModelConfig,
    *,
    passes: int = -1,
    keep: int = 1,
    save_every: int = SAVE_EVERY,
    events: Mapping[int, Callable[[], object]] = MappingProxyType({}),
    trackers: tuple[Literal["tensorboard"], ...] = (),
) -> tuple[Engine[LanguageModel], TrainingLoop[LanguageModel]]:
    """Two micro-batches per step, with dropout."""
    source = RandomInit(lambda: LanguageModel(config, dropout=0.3), seed=4)
    engine_config = EngineConfig(precision="fp32", trackers=trackers, keep_checkpoints=keep)
    engine = Impatient(source, OPTIMIZER, engine_config, world_size=1, micro_batch=2)
    rows = np.random.default_rng(0).integers(0, 288, (10, 9)).astype(np.int32)
    loop_config = LoopConfig("test", 17, NUM_STEPS, BatchConfig(batch_size=4, micro_batch_size=2), save_every, 2)
    training, heldout = Mortal(rows[:7], passes, events), CausalLMObjective(rows[7:])
    return engine, TrainingLoop(engine, loop_config, training, heldout, folder)


def run(folder: Path, config: ModelConfig, **options: Any) -> dict[str, Tensor]:
    """Trains to the end, with the arguments of `make`; returns the weights."""
    engine, loop = make(folder, config, **options)
    try:
        loop.run()
        return {name: weight.clone() for name, weight in full_weights(engine).items()}
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


@pytest.mark.usefixtures("_no_request_is_left")
def test_a_run_that_is_asked_to_stop_saves_the_step_it_is_in(
    tmp_path: Path,
    tiny_config: ModelConfig,
    untouched: tuple[dict[str, Tensor], dict[int, tuple[float, float, float]]],
) -> None:
    with pytest.raises(StoppedError, match="test: stopped at step 4 of 6"):
        run(tmp_path, tiny_config, save_every=100, events={6: request_stop})  # in the fourth step, of two passes each
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000004"]
    assert max(losses(tmp_path)) == 4
    withdraw_stop()
    weights = run(tmp_path, tiny_config, save_every=100)
    assert all(torch.equal(weight, untouched[0][name]) for name, weight in weights.items())
    assert losses(tmp_path) == untouched[1]


@pytest.mark.parametrize("passes", [1, 6, 9, 11])  # in step 0, between steps, and within a step
def test_a_killed_run_resumes_bit_for_bit(
    tmp_path: Path,
    tiny_config: ModelConfig,
    untouched: tuple[dict[str, Tensor], dict[int, tuple[float, float, float]]],
    passes: int,
) -> None:
    with pytest.raises(KilledError):
        run(tmp_path, tiny_config, passes=passes)
    torch.manual_seed(passes)  # a new process has another random state
    weights = run(tmp_path, tiny_config)
    assert all(torch.equal(weight, untouched[0][name]) for name, weight in weights.items())
    assert losses(tmp_path) == untouched[1]


def damage_file(checkpoint: Path, damage: str) -> None:
    path = checkpoint / "model" / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "bit flipped":
        content[-3] ^= 4
    path.write_bytes(content[: -3 if damage == "truncated" else None])


@pytest.mark.parametrize("damage", ["bit flipped", "truncated"])
def test_a_damaged_checkpoint_costs_time_and_nothing_else(
    tmp_path: Path,
    tiny_config: ModelConfig,
    untouched: tuple[dict[str, Tensor], dict[int, tuple[float, float, float]]],
    damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run(tmp_path, tiny_config, keep=2)
    assert "test: starts from step 0 of 6 (no checkpoint yet)" in caplog.text
    damage_file(tmp_path / "checkpoints" / "step-000006", damage)
    weights = run(tmp_path, tiny_config, keep=2)
    assert all(torch.equal(weight, untouched[0][name]) for name, weight in weights.items())
    assert losses(tmp_path) == untouched[1]
    assert (
        "test: checkpoint step-000006 is damaged, so it is skipped: files changed, missing or added:"
        " model/rank-00000.safetensors" in caplog.text
    )
    assert "test: resumes from step 3 of 6 (checkpoints/step-000003)" in caplog.text


def test_messages_name_the_stage_of_a_later_round(
    tmp_path: Path, tiny_config: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path / "test_2", tiny_config)
    assert "test_2: starts from step 0 of 6 (no checkpoint yet)" in caplog.text


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_from_step_0(
    tmp_path: Path, tiny_config: ModelConfig
) -> None:
    run(tmp_path, tiny_config, keep=2)
    for step in (3, 6):
        damage_file(tmp_path / "checkpoints" / f"step-{step:06d}", "truncated")
    with pytest.raises(ValueError, match=r"every checkpoint of test is damaged .*--from test"):
        run(tmp_path, tiny_config, keep=2)
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]  # nothing was truncated


def test_a_finished_run_is_measured_again_and_not_trained(
    tmp_path: Path,
    tiny_config: ModelConfig,
    untouched: tuple[dict[str, Tensor], dict[int, tuple[float, float, float]]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As after a loss in what a stage does after its training."""
    run(tmp_path, tiny_config)
    engine, loop = make(tmp_path, tiny_config, passes=0)
    heldout = loop.run()
    assert "test: resumes from step 6 of 6" in caplog.text
    assert all(torch.equal(weight, untouched[0][name]) for name, weight in full_weights(engine).items())
    assert heldout["loss"] == read_metrics(tmp_path / "metrics.jsonl")[-1]["heldout_loss"]
    engine.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 2 MiB."""
    mount = shutil.which("mount")
    folder = tmp_path / "disk"
    folder.mkdir()
    if mount is None or os.geteuid() != 0:
        pytest.skip("only root mounts file systems")
    done = subprocess.run([mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path) -> None:
    ballast = (disk / "ballast").open("wb", buffering=0)
    with ballast, pytest.raises(OSError, match="No space left"):  # noqa: PT012
        while True:
            ballast.write(bytes(4096))


def fill_between_checkpoints(disk: Path) -> None:
    """Fills the disk while no checkpoint is written: an older one that was removed afterwards would make room again."""
    end = time.monotonic() + 30
    while len(found := list(disk.glob("sft/checkpoints/*"))) != 1 or not found[0].name.startswith("step-"):
        assert time.monotonic() < end, found
        time.sleep(0.01)
    fill(disk)


Event = Callable[[], object]


@pytest.mark.parametrize("trackers", [(), ("tensorboard",)], ids=["alone", "tensorboard"])
def test_a_disk_that_is_full_for_a_while_changes_no_bit(
    small_disk: Path,
    tiny_config: ModelConfig,
    untouched: tuple[dict[str, Tensor], dict[int, tuple[float, float, float]]],
    caplog: pytest.LogCaptureFixture,
    trackers: tuple[Literal["tensorboard"], ...],
) -> None:
    folder = small_disk / "sft"
    events: dict[int, Event] = {4: lambda: fill_between_checkpoints(small_disk), 8: (small_disk / "ballast").unlink}
    weights = run(folder, tiny_config, events=events, save_every=1, trackers=trackers)
    assert all(torch.equal(weight, untouched[0][name]) for name, weight in weights.items())
    assert losses(folder) == untouched[1]
    assert "No space left on device (ENOSPC)" in caplog.text
    assert "continues without this checkpoint" in caplog.text
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000006"]


def test_a_disk_that_stays_full_stops_the_run_and_costs_no_bit(
    small_disk: Path,
    tiny_config: ModelConfig,
    untouched: tuple[dict[str, Tensor], dict[int, tuple[float, float, float]]],
) -> None:
    folder = small_disk / "sft"
    with pytest.raises(
        CheckpointError, match=r"step-00000.*ENOSPC.*free space there and run the same command"
    ) as raised:
        run(folder, tiny_config, events={2: lambda: fill(small_disk)}, save_every=1)
    assert "\n" not in str(raised.value)
    (small_disk / "ballast").unlink()
    weights = run(folder, tiny_config, save_every=1)
    assert all(torch.equal(weight, untouched[0][name]) for name, weight in weights.items())
    assert losses(folder) == untouched[1]


def test_a_folder_that_is_moved_away_and_back_changes_no_bit(
    tmp_path: Path,
    tiny_config: ModelConfig,
    untouched: tuple[dict[str, Tensor], dict[int, tuple[float, float, float]]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, away = tmp_path / "sft", tmp_path / "away"
    events: dict[int, Event] = {4: lambda: folder.rename(away), 8: lambda: away.rename(folder)}
    weights = run(folder, tiny_config, events=events, save_every=1)
    assert all(torch.equal(weight, untouched[0][name]) for name, weight in weights.items())
    assert losses(folder) == untouched[1]
    assert "No such file or directory (ENOENT)" in caplog.text
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000006"]


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
    source = RandomInit(lambda: LanguageModel(tiny_config, dropout=0.3), seed=4)
    rows = np.random.default_rng(1).integers(0, 288, (5, 9)).astype(np.int32)
    tokens = torch.from_numpy(rows.astype(np.int64))
    with torch.no_grad():
        logprobs = torch.log_softmax(load(source).eval()(tokens[:, :-1]).double(), dim=-1)
    expected = -float(logprobs.gather(-1, tokens[:, 1:, None]).mean())
    engine = Engine(source, OPTIMIZER, EngineConfig(precision="fp32", trackers=()), world_size=1, micro_batch=2)
    for micro in (1, 2, 4):
        loop_config = LoopConfig("test", 17, 1, BatchConfig(batch_size=4, micro_batch_size=micro), 1, 1)
        loop = TrainingLoop(engine, loop_config, CausalLMObjective(rows), CausalLMObjective(rows), tmp_path)
        assert loop.evaluate()["loss"] == pytest.approx(expected, abs=1e-5)
    engine.close()
