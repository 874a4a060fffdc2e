"""The messages when a run is stopped, resumes, or cannot resume."""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest

import heed.jobs.pipeline as pipeline_module
from heed.jobs.job_file import load_job
from heed.jobs.run import Run
from stages.lineage import Inputs, finished_with
from training.notices import RunError

DEBUG_JOB = Path(__file__).parents[3] / "configs" / "jobs" / "debug.toml"
SAVED = ("--set", "pretrain.save_every_steps=2", "--set", "pretrain.num_steps=400")


def wait_until(command: Any, is_reached: Callable[[], bool]) -> None:
    while not is_reached():
        assert command.process.poll() is None, command.output
        time.sleep(0.02)


def cut(checkpoint: Path) -> None:
    (path,) = (checkpoint / "model").iterdir()
    path.write_bytes(path.read_bytes()[:-3])


@pytest.fixture
def interrupted(run_debug: Callable[..., Any], tmp_path: Path, num_steps: Callable[[Path], int]) -> Callable[..., str]:
    """Runs the job until pretraining has done a number of steps, then presses Ctrl-C, or ends it by another signal;
    returns the output.
    """

    def run(steps: int, arguments: Sequence[str] = (), by: signal.Signals = signal.SIGINT) -> str:
        command = run_debug(tmp_path, (*SAVED, *arguments))
        stage = tmp_path / "debug" / "pretrain"
        wait_until(command, lambda: "pretrain: " in command.output and num_steps(stage) >= steps)
        command.process.send_signal(by)
        assert command.wait(180) == 130, command.output
        output: str = command.output
        return output

    return run


@pytest.mark.nightly
def test_a_run_says_where_it_stopped_and_resumes_and_what_it_passed_over(
    interrupted: Callable[..., str], run_debug: Callable[..., Any], tmp_path: Path
) -> None:
    said = interrupted(5)
    assert "pretrain: starts from step 0 of 400 (no checkpoint yet)" in said
    assert "pretrain: stopped at step " in said
    assert "; the same command continues" in said
    assert "Traceback" not in said
    checkpoints = tmp_path / "debug" / "pretrain" / "checkpoints"
    older, newest = sorted(checkpoints.glob("step-*"))[-2:]
    cut(newest)
    said = interrupted(int(newest.name[5:]) + 3, by=signal.SIGTERM)
    assert "; the same command continues" in said
    assert "SIGTERM" not in said  # Ray would print a stack trace of C++
    assert f"pretrain: checkpoint {newest.name} is damaged, so it is skipped: files changed" in said
    assert f"pretrain: resumes from step {int(older.name[5:])} of 400 (checkpoints/{older.name})" in said
    for checkpoint in checkpoints.glob("step-*"):
        cut(checkpoint)
    refused = run_debug(tmp_path, SAVED)
    assert refused.wait() == 2
    (line,) = [line for line in refused.output.splitlines() if "error:" in line]
    assert str(checkpoints) in line
    assert "every checkpoint of pretrain is damaged (step-000" in line
    assert "run again with --from pretrain" in line
    assert "Traceback" not in refused.output
    said = interrupted(3, ("--from", "pretrain"))
    assert "pretrain: starts from step 0 of 400 (no checkpoint yet)" in said
    assert "; the same command without --from continues" in said
    requeued = ("--from", "pretrain", "--submission", "slurm-7")
    said = interrupted(9, requeued)
    assert "pretrain: starts from step 0 of 400 (no checkpoint yet)" in said
    assert "; the same command continues" in said
    assert "pretrain: resumes from step " in interrupted(15, requeued)
    assert (tmp_path / "debug" / "replaced" / "pretrain-1" / "checkpoints").is_dir()


@pytest.mark.long
def test_sigterm_to_all_of_a_runs_processes_is_told_at_once(
    run_debug: Callable[..., Any], tmp_path: Path, num_steps: Callable[[Path], int]
) -> None:
    """Slurm and systemd end Ray's processes with it, whose answers the run would wait for, and kill what is left later.

    Ray may end the run's own process within a second: the line has to come first, and status.json may be too late.
    """
    command = run_debug(tmp_path, (*SAVED, "--set", "pretrain.num_steps=4000"))
    wait_until(command, lambda: num_steps(tmp_path / "debug" / "pretrain") >= 3)
    os.killpg(command.process.pid, signal.SIGTERM)
    end = time.monotonic() + 30
    while "; the same command continues" not in command.output:
        assert time.monotonic() < end, command.output
        time.sleep(0.1)
    status = tmp_path / "debug" / "status.json"
    while json.loads(status.read_text())["state"] != "stopped" and command.process.poll() is None:
        assert time.monotonic() < end, status.read_text()
        time.sleep(0.1)
    command.kill_everything()
    assert "SIGTERM" not in command.output
    assert command.wait_until_gone() == []


def test_a_stage_waits_for_its_folder_and_does_not_begin_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a worker was lost together with the file system."""
    workers: Any = SimpleNamespace(hosts={})
    job, seen = load_job(DEBUG_JOB), list[bool]()
    run = Run(job, tmp_path, None, workers).of("sft")
    folder, away = tmp_path / "sft", tmp_path / "away"

    def work(*_: Any) -> None:
        seen.append((folder / "inputs.json").is_file())
        (folder / "model").mkdir()
        (folder / "results.json").write_text("{}")

    stage, inputs = replace(job.registry["sft"], run=work), Inputs("sft", 0, {}, {}, {})
    away.mkdir()
    (away / "inputs.json").touch()
    Timer(1.0, lambda: away.rename(folder)).start()
    pipeline_module._work_in_folder(run, stage, inputs, time.monotonic(), workers)
    assert seen == [True]
    assert finished_with(folder, "model") is not None
    folder.rename(away)
    monkeypatch.setattr(pipeline_module, "FOLDER_SECONDS", 0.2)
    with pytest.raises(RunError, match=r"sft is missing; bring the folder back and run the same command again"):
        pipeline_module._work_in_folder(run, stage, inputs, time.monotonic(), workers)
    assert seen == [True]
    assert not folder.exists()
