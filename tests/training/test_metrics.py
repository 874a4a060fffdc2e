"""The metrics log across kills and resumes."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from training.metrics import MetricsLog, read_metrics, refuse_missing_trackers

LimitFileSize = Callable[[int], AbstractContextManager[None]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job").mkdir()
    return tmp_path / "job" / "sft"


def write(folder: Path, resume_step: int, steps: range, offset: float = 0.0) -> MetricsLog:
    log = MetricsLog(folder, (), resume_step=resume_step)
    for step in steps:
        log.log(step, 10, {"loss": step + offset})
    return log


def test_lines_are_on_disk_as_soon_as_they_are_logged(folder: Path) -> None:
    write(folder, 0, range(1, 4))  # never closed, as after a kill
    lines = read_metrics(folder / "metrics.jsonl")
    assert [(line["step"], line["num_steps"], line["loss"]) for line in lines] == [(1, 10, 1), (2, 10, 2), (3, 10, 3)]
    assert all(line["seconds"] >= 0 for line in lines)


def test_resuming_cuts_off_what_will_be_done_again(folder: Path) -> None:
    write(folder, 0, range(1, 6)).close()
    write(folder, 3, range(4, 7), offset=0.5).close()
    losses = {line["step"]: line["loss"] for line in read_metrics(folder / "metrics.jsonl")}
    assert losses == {1: 1, 2: 2, 3: 3, 4: 4.5, 5: 5.5, 6: 6.5}
    assert len(read_metrics(folder / "metrics.jsonl")) == 6
    write(folder, 0, range(0)).close()
    assert read_metrics(folder / "metrics.jsonl") == []


def test_a_last_line_cut_by_a_kill_is_left_out(folder: Path) -> None:
    write(folder, 0, range(1, 4)).close()
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text()[:-9])
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    write(folder, 2, range(3, 4)).close()
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]


def test_no_file_is_no_lines(folder: Path) -> None:
    assert read_metrics(folder / "metrics.jsonl") == []


def test_tensorboard_events_lie_in_the_run_directory(folder: Path) -> None:
    log = MetricsLog(folder, ("tensorboard",), resume_step=0)
    log.log(1, 2, {"loss": 3.25})
    log.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = {path.parent for path in folder.rglob("events.out.tfevents*")}
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    assert [(event.step, event.value) for event in accumulator.Scalars("loss")] == [(1, 3.25)]


def test_lines_that_cannot_be_written_wait_for_their_turn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, limit_file_size: LimitFileSize
) -> None:
    log = MetricsLog(tmp_path, (), resume_step=0)
    log.log(1, 6, {"loss": 0.5})
    with limit_file_size(log.path.stat().st_size + 20):  # a line is begun and cut off
        for step in (2, 3):
            log.log(step, 6, {"loss": 0.5})
        assert [line["step"] for line in read_metrics(log.path)] == [1]
        assert log.path.read_text().endswith("\n")
    log.log(4, 6, {"loss": 0.5})
    assert [line["step"] for line in read_metrics(log.path)] == [1, 2, 3, 4]
    assert caplog.text.count("metrics.jsonl: File too large (EFBIG). The run continues") == 1
    with limit_file_size(log.path.stat().st_size):
        for step in (5, 6):
            log.log(step, 6, {"loss": 0.5})
        log.close()
    assert "the lines of steps 5 to 6 are lost" in caplog.text


def test_a_tracker_that_fails_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = MetricsLog(tmp_path, ("tensorboard",), resume_step=0)
    log.log(1, 3, {"loss": 0.5})
    log._trackers["tensorboard"].finish()  # the following writes fail
    for step in (2, 3):
        log.log(step, 3, {"loss": 0.5})
    log.close()
    assert [line["step"] for line in read_metrics(log.path)] == [1, 2, 3]
    assert "tensorboard: ValueError: write to closed file; it may miss metrics around step 2" in caplog.text
    assert "tensorboard: logs again from step 3" in caplog.text


def test_a_tracker_that_cannot_start_ends_no_run_and_is_refused_where_the_run_is_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = MetricsLog(tmp_path, ("mlflow",), resume_step=0)
    for step in (1, 2):
        log.log(step, 2, {"loss": 0.5})
    log.close()
    assert [line["step"] for line in read_metrics(log.path)] == [1, 2]
    assert caplog.text.count("mlflow: ModuleNotFoundError") == 1
    with pytest.raises(ValueError, match=r"engine\.trackers: 'mlflow' is not installed; run `pip install mlflow`"):
        refuse_missing_trackers(("tensorboard", "mlflow"))


def test_metrics_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, (), resume_step=0)
    log.log(1, 1, {"loss": math.nan, "gradient_norm": math.inf, "learning_rate": 0.1})
    log.close()
    (line,) = read_metrics(log.path)
    assert set(line) == {"step", "num_steps", "learning_rate", "seconds"}


def test_a_folder_that_is_away_is_not_made_again(tmp_path: Path) -> None:
    """Metrics written into a second folder would be lost when the first folder comes back."""
    folder = tmp_path / "sft"
    log = MetricsLog(folder, ("tensorboard",), resume_step=0)
    log.log(1, 3, {"loss": 1.0})
    log._trackers["tensorboard"] = None  # as after a failed write
    folder.rename(tmp_path / "away")
    log.log(2, 3, {"loss": 2.0})
    assert not folder.exists()
    (tmp_path / "away").rename(folder)
    log.log(3, 3, {"loss": 3.0})
    log.close()
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3]


def test_a_run_folder_that_has_disappeared_is_not_created_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        MetricsLog(tmp_path / "job" / "sft", (), resume_step=0)
    assert not (tmp_path / "job").exists()
