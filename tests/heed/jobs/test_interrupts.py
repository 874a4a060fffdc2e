"""Ctrl-C during a stage: a checkpoint first, where there is something to save; at once the second time."""

import os
import re
import signal
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from heed.jobs.recovery import saving_on_interrupt
from training.notices import StoppedError, stop_requested

DEBUG_JOB = Path(__file__).parents[3] / "configs" / "jobs" / "debug.toml"
NUM_STEPS = 400  # many, so that a busy machine does not end them before the interrupt
PRETRAIN = ("--only", "pretrain", "--workers", "2", "--set", f"pretrain.num_steps={NUM_STEPS}", "--set",
            "pretrain.save_every_steps=1000", "--set", "pretrain.evaluate_every_steps=1000")  # fmt: skip


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)  # the handler runs before the next line


def pressed(times: int, stage: Callable[[], None] = lambda: None, *, can_save: bool = True) -> int:
    """Presses Ctrl-C in a stage, which then continues with `stage`; returns how many presses it survived."""
    survived = 0
    with pytest.raises(KeyboardInterrupt), saving_on_interrupt("sft", lambda: can_save):  # noqa: PT012
        for _ in range(times):
            press()
            survived += 1
            assert stop_requested()
        stage()
    assert not stop_requested()
    return survived


def test_the_first_press_asks_and_the_second_stops(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert pressed(2) == 1
    assert signal.getsignal(signal.SIGINT) is before
    assert (
        capsys.readouterr().err
        == "sft: will save a checkpoint and stop when its current step ends; Ctrl-C again stops at once\n"
    )


def test_the_wait_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heed.jobs.recovery.SAVE_SECONDS", 0.2)
    begun = time.monotonic()
    assert pressed(1, lambda: time.sleep(30)) == 1
    assert time.monotonic() - begun < 20


def test_where_there_is_nothing_to_save_it_stops_at_once() -> None:
    assert pressed(1, can_save=False) == 0


def test_a_stage_that_ends_after_the_press_is_the_last_one() -> None:
    def saved() -> None:
        raise StoppedError("saved")

    assert pressed(1) == 1
    assert pressed(1, saved) == 1


def test_what_a_stage_raises_by_itself_is_unchanged() -> None:
    with pytest.raises(ValueError, match="a mistake"), saving_on_interrupt("sft", lambda: True):
        raise ValueError("a mistake")


@pytest.fixture(scope="module")
def interrupted(
    run_debug: Callable[..., Any], num_steps: Callable[[Path], int], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """The folder of a run that Ctrl-C has stopped in pretraining, and its output."""
    runs = tmp_path_factory.mktemp("stopped")
    command = run_debug(runs, PRETRAIN)
    while num_steps(runs / "debug" / "pretrain") < 5:
        assert command.process.poll() is None, command.output
        time.sleep(0.02)
    os.killpg(command.process.pid, signal.SIGINT)  # as a terminal does: to all of the run's processes
    assert command.wait(180) == 130, command.output
    return runs, command.output


def stopped_at(output: str) -> str:
    found = re.search(rf"stopped at step (\d+) of {NUM_STEPS} \(its newest checkpoint is step-0*(\d+)\)", output)
    assert found, output
    assert found[1] == found[2]
    return found[1]


@pytest.mark.long
def test_an_interrupted_stage_loses_no_step(interrupted: tuple[Path, str], num_steps: Callable[[Path], int]) -> None:
    runs, output = interrupted
    assert "Traceback" not in output
    assert stopped_at(output) == str(num_steps(runs / "debug" / "pretrain"))


@pytest.mark.nightly
def test_an_interrupted_stage_ends_with_the_same_bits(
    interrupted: tuple[Path, str], run_debug: Callable[..., Any], tmp_path: Path
) -> None:
    runs, output = interrupted
    resumed, whole = run_debug(runs, PRETRAIN), run_debug(tmp_path, PRETRAIN)
    assert resumed.wait() == 0, resumed.output
    assert f"pretrain: resumes from step {stopped_at(output)} of {NUM_STEPS}" in resumed.output
    assert whole.wait() == 0, whole.output
    weights = Path("debug", "pretrain", "model", "model.safetensors")
    assert (runs / weights).read_bytes() == (tmp_path / weights).read_bytes()


@pytest.mark.nightly
def test_ppo_is_interrupted_after_the_iteration_that_it_is_in(
    heed: Callable[..., Any], num_steps: Callable[[Path], int], model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text(
        "def score(prompts, responses):\n    return [len(text) for text in responses]\n"
    )
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "Where is {i}?"}}\n' for i in range(16)))
    debug = tomllib.loads(DEBUG_JOB.read_text(encoding="utf-8"))
    ppo = debug["ppo"] | {
        "init_from": str(model_folder), "prompts": {"source": str(tmp_path / "prompts.jsonl")},
        "reward": {"kind": "function", "function": f"{tmp_path / 'rewards.py'}:score"}, "num_iterations": 200,
        "save_every_iterations": 1000,
    }  # fmt: skip
    del ppo["ptx"]
    values = {"name": "alone", "engine": debug["engine"], "cluster": debug["cluster"], "ppo": ppo}
    (tmp_path / "job.toml").write_text(tomli_w.dumps(values), encoding="utf-8")
    command = heed("run", str(tmp_path / "job.toml"), "--runs", str(tmp_path / "runs"))
    stage = tmp_path / "runs" / "alone" / "ppo"
    while num_steps(stage) < 2:
        assert command.process.poll() is None, command.output
        time.sleep(0.02)
    command.process.send_signal(signal.SIGINT)
    assert command.wait(180) == 130, command.output
    assert "Traceback" not in command.output
    found = re.search(r"ppo: stopped at step (\d+) of 200 \(its newest checkpoint is step-0*(\d+)\)", command.output)
    assert found, command.output
    assert found[1] == found[2] == str(num_steps(stage))
