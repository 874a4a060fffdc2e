"""A run whose workers are killed or stopped in every stage continues by itself and ends with the files of an
uninterrupted run."""

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ClusterConfig
from cluster.connection import disconnect
from cluster.failures import WorkerLostError
from files.records import read_record
from heed.jobs import recovery
from heed.jobs.recovery import MAX_LOSSES_IN_PLACE, Workers, prepare_kernels, run_to_end
from heed.jobs.report import StatusFile
from lm.native import kernels
from stages.progress import STATUS, RunStatus
from training.notices import RunError, speaking_through, waits_for


def worker_of(pids: list[int]) -> int | None:
    """Returns the process of the rank among a run's processes."""
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::_Worker"):
                return pid
        except OSError:  # it ended during the check
            continue
    return None


NumSteps = Callable[[Path], int]

MOMENTS: dict[str, Callable[[Path, NumSteps], bool]] = {
    "pretrain, two steps after a checkpoint": lambda folder, steps: (
        steps(folder / "pretrain") >= 7 and (folder / "pretrain" / "checkpoints" / "step-000005").exists()
    ),
    "sft": lambda folder, steps: steps(folder / "sft") >= 4,
    "collect": lambda folder, _: (folder / "collect" / "samples").exists(),
    "reward": lambda folder, steps: steps(folder / "reward") >= 3,
    "ppo": lambda folder, steps: steps(folder / "ppo") >= 1,
    "compare": lambda folder, _: (folder / "compare" / "samples").exists(),
}

# No rank waits in a collective for one that samples, so the only sign of a stopped one is its silence.
STOPPED, SILENCE_SECONDS = "collect", 8


@pytest.mark.nightly
def test_a_worker_killed_or_stopped_in_every_stage_changes_no_file(
    run_debug: Callable[..., Any],
    processes: Callable[[str], list[int]],
    hashes: Callable[[Path], dict[str, str]],
    num_steps: NumSteps,
    tmp_path: Path,
    request: Any,
) -> None:
    folder = tmp_path / "debug"
    command = run_debug(tmp_path, ["--set", f"cluster.silence_seconds={SILENCE_SECONDS}"])
    for moment, is_reached in MOMENTS.items():
        while not is_reached(folder, num_steps):
            assert command.process.poll() is None, f"ended before {moment}:\n{command.output}"
            time.sleep(0.005)
        worker = worker_of(processes(command.mark))
        assert worker is not None, moment
        os.kill(worker, signal.SIGSTOP if moment == STOPPED else signal.SIGKILL)
        killed, limit = time.monotonic(), 30 + SILENCE_SECONDS * (moment == STOPPED)
        while command.output.count("was lost") <= list(MOMENTS).index(moment):
            assert time.monotonic() - killed < limit, f"{moment}: not noticed in {limit} s"
            time.sleep(0.05)
    assert command.wait() == 0, command.output
    untouched = request.getfixturevalue("finished_run")
    assert hashes(folder) == hashes(untouched)
    said = command.output
    assert "pretrain: rank 0 of 1 was lost" in said
    assert re.search(r"pretrain: continues from checkpoints/step-\d{6}", said), said  # on a busy machine a later one
    stopped = rf"collect: sft(\.sample|\.close)?: rank 0 of 1 was lost: no heartbeat for {SILENCE_SECONDS} s"
    assert re.search(stopped, said), said
    for stage in ("pretrain", "sft", "reward", "ppo"):
        steps = [json.loads(line)["step"] for line in (folder / stage / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(1, len(steps) + 1)), stage
    assert not (folder / "replaced").exists()
    assert not (folder / "compare" / "samples").exists()
    assert command.wait_until_gone() == [], "the stopped process is left"


class Dying:
    """Loses workers a number of times, with or without having saved something first."""

    def __init__(self, folder: Path, losses: int, saves: bool) -> None:
        self.folder, self.losses, self.saves, self.calls = folder, losses, saves, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls > self.losses:
            return
        if self.saves:
            (self.folder / "checkpoints" / f"step-{self.calls:06d}").mkdir(parents=True)
        raise WorkerLostError("sft: rank 1 of 2 was lost: killed")


@pytest.mark.long
def test_a_group_whose_folder_is_away_as_it_starts_gives_its_places_back(tmp_path: Path) -> None:
    cores = os.cpu_count() or 1
    folder = tmp_path / "run"
    workers = Workers((cores,), folder, ClusterConfig(wait_for_nodes_seconds=20))
    try:
        with pytest.raises(FileNotFoundError):
            workers()
        folder.mkdir()
        assert workers().num_workers == cores
    finally:
        workers.abandon()
        disconnect()


def test_losses_without_progress_end_the_run(tmp_path: Path) -> None:
    work = Dying(tmp_path, losses=9, saves=False)
    with pytest.raises(
        WorkerLostError, match=r"rank 1 of 2 was lost(.|\n)*sft lost workers 5 times in a row from its start"
    ):
        run_to_end("sft", tmp_path, work, list)
    assert work.calls == MAX_LOSSES_IN_PLACE


def test_losses_with_progress_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = Dying(tmp_path, losses=9, saves=True)
    (tmp_path / "samples" / "scale").mkdir(parents=True)
    (tmp_path / "samples" / "scale" / "00000.jsonl").touch()  # which are read, but are not where it resumes from
    run_to_end("sft", tmp_path, work, list)
    assert work.calls == 10
    assert "sft: continues from checkpoints/step-000009\n" in capsys.readouterr().err
    quiet = Dying(tmp_path, losses=2, saves=False)
    with StatusFile(tmp_path, dict) as status:
        run_to_end("sft", tmp_path, quiet, list, status.restarted)
    assert quiet.calls == 3
    found = read_record(tmp_path / STATUS, RunStatus)
    assert [one.why for one in found.restarts] == ["sft: rank 1 of 2 was lost: killed"] * 2
    with pytest.raises(RunError), StatusFile(tmp_path, dict):
        raise RunError("the disk is full")
    found = read_record(tmp_path / STATUS, RunStatus)
    assert (found.state, found.message, found.restarts) == ("failed", "the disk is full", ())


def test_a_run_on_gpus_does_not_go_on_without_them_unasked(tmp_path: Path) -> None:
    with StatusFile(tmp_path, dict) as status:
        status.works_on("GPU", is_meant=False)
    with (
        pytest.raises(ValueError, match="this run was on GPUs, and there are none now; start their machines again"),
        StatusFile(tmp_path, dict) as status,
    ):
        status.works_on("CPU", is_meant=False)
    with StatusFile(tmp_path, dict) as status:
        status.works_on("CPU", is_meant=True)
    with StatusFile(tmp_path, dict) as status:
        status.works_on("CPU", is_meant=False)  # the run is on CPUs now


def test_fewer_workers_leave_places_for_the_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four workers alone would fit on a machine with room for six ranks, but not with the generators."""
    config = ClusterConfig(wait_for_nodes_seconds=0)
    workers, placed = Workers([4, 2], tmp_path, config, num_extra_ranks=3), list[int]()
    workers._bundle, workers._awaits_nodes = {"CPU": 1.0}, True  # as after a loss
    monkeypatch.setattr(recovery, "has_room", lambda num_ranks, _bundle: num_ranks <= 6)
    monkeypatch.setattr(workers, "_started", lambda _name, size, _config: placed.append(size))
    workers._placed()
    assert placed == [2]


def test_other_errors_are_not_tried_again(tmp_path: Path) -> None:
    calls = []

    def fail() -> None:
        calls.append(1)
        raise ValueError("sft.seq_len")

    with pytest.raises(ValueError, match=r"sft.seq_len"):
        run_to_end("sft", tmp_path, fail, list)
    assert len(calls) == 1


class OneRank:
    """A group whose only rank is this process. Keeps what the run waits for in each call, by the call's name."""

    def __init__(self) -> None:
        self.waited_for = dict[str, str]()

    def run(self, name: str, function: Callable[[], str]) -> list[str]:
        self.waited_for[name] = waits_for()
        return [function()]


def test_compiling_kernels_is_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that writes no library, on a host without kernels; then nothing is left to compile."""
    compiler, host, said, group = tmp_path / "compiler", socket.gethostname(), list[str](), OneRank()
    compiler.write_text('#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && echo made > "$2"; shift; done\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "library", kernels.library.__wrapped__)  # not the one that this process has loaded
    with speaking_through(said.append):
        prepare_kernels(group)  # type: ignore[arg-type]
        assert group.waited_for == {"kernels": "", "compiling kernels": f"compiling kernels on {host}"}
        assert said[0] == f"compiling kernels on {host}, once for each kind of CPU"
        assert said[1].startswith(f"{host}: lm/native was not compiled, so work on a CPU is slower")
        prepare_kernels(group)  # type: ignore[arg-type]
    assert group.waited_for["compiling kernels"] == ""
    assert said[2:] == said[1:2]
