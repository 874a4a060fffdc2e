"""Checkpoints are written behind training's back: what is saved is what was there, and no failure goes unheard."""

import json
import logging
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import training.writer as writer_module
from training.checkpoint import latest_checkpoint
from training.state import Fragment, SavedState, State
from training.writer import CheckpointError, CheckpointWriter


def start(rank: int = 0, num_ranks: int = 1, deadline_seconds: float = 60.0) -> CheckpointWriter:
    """Its barrier waits for nobody: these ranks are begun one after the other."""
    return CheckpointWriter(rank, num_ranks, 2, deadline_seconds, lambda: None)


def part(*values: float, offset: int = 0) -> dict[str, State]:
    return {"model": {"weight/w": Fragment(offset, torch.tensor(values))}}


def read(checkpoint: Path, size: int) -> list[float]:
    target = torch.zeros(size)
    SavedState(checkpoint / "model").fill("weight/w", 0, target)
    numbers: list[float] = target.tolist()
    return numbers


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No file of a state is written before this is set."""
    event, original = threading.Event(), writer_module.write_state

    def write(state: State, path: Path) -> None:
        assert event.wait(30)
        original(state, path)

    monkeypatch.setattr(writer_module, "write_state", write)
    yield event
    event.set()


def test_training_goes_on_while_what_was_there_is_written(tmp_path: Path, held_up: threading.Event) -> None:
    models = part(1.0, 2.0)
    weights = models["model"]["weight/w"].values
    with start() as writer:
        writer.save(tmp_path, 3, models, {"kl_coef": 0.5})
        weights.add_(10)  # in place, as optimizers do
        assert latest_checkpoint(tmp_path) is None
        held_up.set()
    checkpoint = tmp_path / "step-000003"
    assert latest_checkpoint(tmp_path) == (checkpoint, 3)
    assert read(checkpoint, 2) == [1.0, 2.0]
    assert json.loads((checkpoint / "progress.json").read_text()) == {"step": 3, "kl_coef": 0.5}
    assert set(json.loads((checkpoint / "manifest.json").read_text())["sha256"]) == {
        "model/rank-00000.safetensors",
        "progress.json",
    }


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, held_up: threading.Event) -> None:
    with start() as writer:
        writer.save(tmp_path, 1, part(1.0))
        threading.Timer(0.3, held_up.set).start()
        assert writer.seconds_waited() < 0.3
        writer.save(tmp_path, 2, part(2.0))
        assert latest_checkpoint(tmp_path) is not None
        assert 0.2 < writer.seconds_waited() < 10
    assert [read(tmp_path / f"step-00000{step}", 1) for step in (1, 2)] == [[1.0], [2.0]]


def test_a_checkpoint_is_there_when_all_parts_are(tmp_path: Path) -> None:
    main, other = start(0, 2), start(1, 2)
    main.save(tmp_path, 4, part(1.0, 2.0), {})
    assert main._thread is not None
    main._thread.join(timeout=0.3)
    assert main._thread.is_alive()
    assert latest_checkpoint(tmp_path) is None
    other.save(tmp_path, 4, part(3.0, offset=2), {})
    other.wait()
    main.wait()
    assert latest_checkpoint(tmp_path) == (tmp_path / "step-000004", 4)
    assert read(tmp_path / "step-000004", 3) == [1.0, 2.0, 3.0]
    assert sorted(path.name for path in (tmp_path / "step-000004" / "model").iterdir()) == [
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]


def test_a_rank_whose_part_does_not_come_is_named(tmp_path: Path) -> None:
    main = start(0, 3, deadline_seconds=0.1)
    main.save(tmp_path, 4, part(1.0))
    with pytest.raises(CheckpointError, match=r"timed out after 0\.1 s: no part of step 4 from ranks \[1, 2\] of 3"):
        main.wait()


def test_failed_training_waits_for_no_other_rank(tmp_path: Path) -> None:
    with pytest.raises(KeyError), start(0, 2) as main:  # noqa: PT012
        main.save(tmp_path, 4, part(1.0))
        raise KeyError
    assert main._thread is not None
    assert not main._thread.is_alive()
    assert latest_checkpoint(tmp_path) is None
    with start() as again:  # what was left there is in nobody's way
        again.save(tmp_path, 2, part(5.0))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_a_write_that_fails_is_heard_with_its_cause(tmp_path: Path) -> None:
    """No file may grow past 4 KiB: as on a full disk, writing begins and then fails."""
    writer = start()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        writer.save(tmp_path, 6, part(*range(10_000)))
        assert writer._thread is not None
        writer._thread.join()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for asked in (writer.check, writer.wait, lambda: writer.save(tmp_path, 7, part(1.0))):
        with pytest.raises(CheckpointError, match=r"step-000006, rank 0: .*(File too large|os error 27)"):
            asked()
    assert latest_checkpoint(tmp_path) is None


@pytest.mark.parametrize("kind", ["bit flipped", "truncated"])
def test_a_damaged_part_sends_training_to_the_checkpoint_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    with start() as writer:
        for step in (1, 2):
            writer.save(tmp_path, step, part(1.0, 2.0))
    path = tmp_path / "step-000002" / "model" / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content if kind == "bit flipped" else content[:-1])
    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(tmp_path) == (tmp_path / "step-000001", 1)
    assert "step-000002 is damaged and passed over" in caplog.text
    assert "model/rank-00000.safetensors" in caplog.text
