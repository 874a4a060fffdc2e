"""Checkpoints are written while training continues: they hold the state of their step, and no failure is lost."""

import errno
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

import training.writer as writer_module
from tests.training.checkpoints import latest_checkpoint
from training.checkpoint import SavedState, ShardRange, State, find_resumption
from training.notices import CheckpointError
from training.writer import CheckpointWriter

LimitFileSize = Callable[[int], AbstractContextManager[None]]


def start(
    rank: int = 0, num_ranks: int = 1, deadline_seconds: float = 60.0, *, sound_step: int | None = None
) -> CheckpointWriter:
    """Gathers from no other rank: these ranks start one after the other."""
    return CheckpointWriter(
        rank, num_ranks, 2, deadline_seconds, lambda cause: [cause], retry_seconds=0.4, sound_step=sound_step
    )


def part(*values: float, offset: int = 0) -> dict[str, State]:
    return {"model": {"weight/w": ShardRange(offset, torch.tensor(values))}}


def thread_of(writer: CheckpointWriter) -> threading.Thread:
    assert writer._part is not None
    assert writer._part.thread is not None
    return writer._part.thread


def read(checkpoint: Path, size: int) -> list[float]:
    target = torch.zeros(size)
    SavedState(checkpoint / "model").fill("weight/w", 0, target)
    numbers: list[float] = target.tolist()
    return numbers


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No file of a state is written until this is set."""
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
        weights.add_(10)  # in place, as optimizers update
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


def test_every_checkpoint_is_copied_into_the_same_memory(tmp_path: Path) -> None:
    def state(step: int) -> State:
        sizes = {"weight/a": 1000, "exp_avg/a": 1000, "step/a": 1, "weight/b": 37}
        return {key: ShardRange(0, torch.full((size,), float(step))) for key, size in sizes.items()}

    used = set()
    with start() as writer:
        for step in (1, 2, 3):
            models = {"policy": state(step), "value": state(-step)}
            writer.save(tmp_path, step, models)
            assert writer._part is not None
            for name, copied in writer._part.models.items():
                assert all(torch.equal(copied[key].values, held.values) for key, held in models[name].items())
                for held in copied.values():
                    storage = held.values.untyped_storage()
                    used.add((storage.data_ptr(), storage.nbytes()))
    num_bytes = 2 * 4 * (1000 + 1000 + 1 + 37)
    ((_, size),) = used
    assert num_bytes <= size < num_bytes + 8 * 64


def test_the_next_save_waits_for_the_one_before(
    tmp_path: Path, held_up: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start() as writer:
        writer.save(tmp_path, 1, part(1.0))
        writer.seconds_waited()
        assert writer._part is not None
        wait, begun = writer._part.own_part.wait, time.monotonic()

        def waits() -> bool:
            threading.Timer(0.5, held_up.set).start()  # from then on, however late a busy machine comes here
            return wait()

        monkeypatch.setattr(writer._part.own_part, "wait", waits)
        writer.save(tmp_path, 2, part(2.0))
        took = time.monotonic() - begun
        assert latest_checkpoint(tmp_path) is not None
        assert 0.45 < writer.seconds_waited() <= took
    assert [read(tmp_path / f"step-00000{step}", 1) for step in (1, 2)] == [[1.0], [2.0]]


def test_a_checkpoint_is_there_when_all_parts_are(tmp_path: Path) -> None:
    main, other = start(0, 2), start(1, 2)
    main.save(tmp_path, 4, part(1.0, 2.0), {})
    thread = thread_of(main)
    thread.join(timeout=0.3)
    assert thread.is_alive()
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


def test_a_rank_whose_part_does_not_come_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    main = start(0, 3, deadline_seconds=0.1)
    main.save(tmp_path, 4, part(1.0))
    main.wait()
    assert "timed out after 0.1 s: no part of the checkpoint of step 4 from ranks [1] of 3" in caplog.text
    assert latest_checkpoint(tmp_path) is None


def test_failed_training_waits_for_no_other_rank(tmp_path: Path) -> None:
    with pytest.raises(KeyError), start(0, 2) as main:  # noqa: PT012
        main.save(tmp_path, 4, part(1.0))
        raise KeyError
    assert not thread_of(main).is_alive()
    assert latest_checkpoint(tmp_path) is None
    with start() as again:  # files left there do not disturb anything
        again.save(tmp_path, 2, part(5.0))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


LARGE = tuple(float(number) for number in range(10_000))


def test_a_write_that_fails_is_reported_and_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, limit_file_size: LimitFileSize
) -> None:
    writer = start()
    with limit_file_size(4096):
        writer.save(tmp_path, 6, part(*LARGE))
        writer.wait()
    assert re.search(r"step-000006: File too large \(EFBIG\).*; retrying for 0\.4 s", caplog.text)
    assert re.search(r"step-000006, rank 0: File too large \(EFBIG\).*continues without this checkpoint", caplog.text)
    assert list(tmp_path.iterdir()) == []


def test_without_an_older_checkpoint_the_next_save_stops_the_run(
    tmp_path: Path, limit_file_size: LimitFileSize
) -> None:
    writer = start()
    with limit_file_size(4096):
        writer.save(tmp_path, 6, part(*LARGE))
        with pytest.raises(CheckpointError, match=r"^no checkpoint can be written: .*step-000006.*the stage again$"):
            writer.save(tmp_path, 7, part(*LARGE))


def test_with_an_older_checkpoint_training_continues_until_too_many_fail(
    tmp_path: Path, limit_file_size: LimitFileSize
) -> None:
    writer = start()
    writer.save(tmp_path, 1, part(1.0))
    with limit_file_size(4096):
        for step in (2, 3, 4):
            writer.save(tmp_path, step, part(*LARGE))
        with pytest.raises(CheckpointError, match=r"^3 checkpoints .*which resumes from step 1$") as raised:
            writer.save(tmp_path, 5, part(*LARGE))
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_checkpoint_that_succeeds_forgives_those_that_failed(tmp_path: Path, limit_file_size: LimitFileSize) -> None:
    writer = start(sound_step=1)
    for step in range(2, 9, 2):
        with limit_file_size(4096):
            writer.save(tmp_path, step, part(*LARGE))
            writer.wait()
        writer.save(tmp_path, step + 1, part(*LARGE))
        writer.wait()
    assert latest_checkpoint(tmp_path) == (tmp_path / "step-000009", 9)


def test_a_folder_that_is_away_for_a_moment_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stage = tmp_path / "sft"
    stage.mkdir()
    writer = start()
    writer.retry_seconds = 20.0
    writer.save(stage / "checkpoints", 1, part(1.0))
    writer.wait()
    stage.rename(tmp_path / "away")
    writer.save(stage / "checkpoints", 2, part(2.0))
    thread_of(writer).join(timeout=1.0)
    assert thread_of(writer).is_alive()
    (tmp_path / "away").rename(stage)  # nothing was created in its place
    writer.save(stage / "checkpoints", 3, part(3.0))
    writer.wait()
    assert "No such file or directory (ENOENT)" in caplog.text
    assert "continues without" not in caplog.text
    assert sorted(path.name for path in (stage / "checkpoints").iterdir()) == ["step-000002", "step-000003"]


def test_a_part_that_changes_on_the_disk_makes_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank reads back what another rank has written; the older checkpoint stays."""
    writer = start()
    writer.keep = 1
    writer.save(tmp_path, 1, part(1.0))
    writer.wait()
    original = writer_module.write_json

    def write(path: Path, hashes: Mapping[str, str]) -> None:
        original(path, hashes)
        if path.name.startswith("written"):
            (tmp_path / ".writing-000002" / "progress.json").write_text("other")

    monkeypatch.setattr(writer_module, "write_json", write)
    writer.save(tmp_path, 2, part(2.0))
    writer.wait()
    assert "progress.json does not read back as rank 0 wrote it" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.parametrize("kind", ["bit flipped", "truncated"])
def test_a_damaged_part_sends_training_to_the_checkpoint_before(tmp_path: Path, kind: str) -> None:
    with start() as writer:
        for step in (1, 2):
            writer.save(tmp_path, step, part(1.0, 2.0))
    path = tmp_path / "step-000002" / "model" / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content if kind == "bit flipped" else content[:-1])
    found = find_resumption(tmp_path, "sft")
    assert found.name == "step-000001"
    assert found.damaged == {"step-000002": "files changed, missing or added: model/rank-00000.safetensors"}


class Gathering:
    """Gathers every rank's value, by rank, for ranks that are threads."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier, self.given = threading.Barrier(num_ranks, timeout=30), [""] * num_ranks

    def of(self, rank: int) -> Callable[[str], list[str]]:
        def gather(value: str) -> list[str]:
            self.given[rank] = value
            self.barrier.wait()
            found = list(self.given)
            self.barrier.wait()
            return found

        return gather


def test_ranks_agree_on_what_became_of_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank's disk is full for steps 2 to 4; the other rank's part of these checkpoints is written and then
    removed."""
    original, gathering = writer_module.write_state, Gathering(2)

    def write(state: State, path: Path) -> None:
        original(state, path)
        if path.name == "rank-00001.safetensors" and path.parts[-3] > ".writing-000001":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(writer_module, "write_state", write)
    stopped: list[str] = []

    def run(rank: int) -> None:
        writer = CheckpointWriter(rank, 2, 2, 60.0, gathering.of(rank), retry_seconds=0.2)
        try:
            for step in range(1, 9):
                writer.save(tmp_path, step, part(float(rank), offset=rank))
        except CheckpointError as error:
            stopped.append(str(error))

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(60)
    assert len(stopped) == 2
    assert stopped[0] == stopped[1]
    assert re.search(r"^3 checkpoints .*step-000004, rank 1: No space left .*ENOSPC.*resumes from step 1$", stopped[0])
    assert caplog.text.count("continues without this checkpoint") == 3  # the main rank reports for both
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert read(tmp_path / "step-000001", 2) == [0.0, 1.0]
