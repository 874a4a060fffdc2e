"""`research.chaos`: a job under faults of every kind ends with the bits of the job left alone."""

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from cluster.failures import WorkerLostError
from heed.jobs.recovery import run_to_end
from heed.jobs.registry import BUILT_IN
from research.chaos.campaign import (
    choose_kinds,
    run_chaos,
    shortest_seconds,
)
from research.chaos.faults import DiskFull, FolderMissing, Schedule, WorkerHangs, small_disk, why_no_disk
from research.chaos.local_cluster import why_no_network
from research.chaos.result import (
    FAILED,
    RECOVERED,
    RESTARTED,
    TOLERATED,
    ChaosResult,
    Injected,
    differing_stages,
    pulse,
    stage_of,
    summary,
)
from research.chaos.round import Driver
from tests.tiers import tried

ROOT = Path(__file__).parents[3]
DEBUG = ROOT / "configs" / "jobs" / "debug.toml"
# All stages, no longer than is needed to be hit in their middle.
SHORT = ("workers=2", "ppo.num_iterations=2", "pretrain.num_steps=16", "compare.best_of=2")
IMPOSSIBLE = {"partition": why_no_network(), "disk": why_no_disk()}
STRUCK = ("worker", "node", "driver", "hang", "partition", "disk", "folder")


@pytest.fixture(scope="module")
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChaosResult:
    """One campaign with a fault of each kind below that is possible here; the tests look at what became of each."""
    runs = tmp_path_factory.mktemp("chaos") / "runs"
    kinds = [kind for kind in tried(request, "kind") if not IMPOSSIBLE.get(kind)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        for name in ("RAY_ADDRESS", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name, raising=False)
        result = run_chaos(DEBUG, SHORT, runs, num_faults=len(kinds), seed=3, num_nodes=2, kinds=kinds)
    written = json.loads((runs / "debug-chaos.json").read_text())
    assert written["rounds"] == result.rounds
    assert len(written["faults"]) == len(result.faults)
    assert not (runs / "debug-chaos-disk").exists()
    return result


@pytest.mark.nightly  # CI has a test of each kind for itself: test_kill.py, test_hangs.py, test_two_hosts.py, ...
@pytest.mark.parametrize("kind", STRUCK)
def test_a_run_survives_a_fault_of_every_kind(kind: str, request: pytest.FixtureRequest) -> None:
    if IMPOSSIBLE.get(kind):
        pytest.skip(IMPOSSIBLE[kind])
    result: ChaosResult = request.getfixturevalue("result")
    (fault,) = [fault for fault in result.faults if fault.kind == kind]
    assert fault.outcome != FAILED, fault.message
    if kind in ("worker", "node"):
        assert 0 <= fault.noticed_seconds < 60 or fault.outcome == TOLERATED  # an idle one is missed when next needed
    if kind == "driver":
        assert fault.outcome == RESTARTED


@pytest.mark.nightly
def test_no_bit_differs_after_faults_of_every_kind(result: ChaosResult) -> None:
    assert result.differing == ()
    assert not result.has_failed


def test_a_schedule_is_a_function_of_its_seed_and_deals_kinds_and_stages_evenly() -> None:
    kinds = ("worker", "hang", "folder")
    total = 10 * len(kinds) * len(BUILT_IN.names)
    drawn = [Schedule(total, seed, kinds, BUILT_IN.names).take(total) for seed in (7, 7, 8)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert Counter(planned.kind for planned in drawn[0]) == dict.fromkeys(kinds, total // len(kinds))
    assert Counter(planned.stage for planned in drawn[0]) == dict.fromkeys(BUILT_IN.names, 30)
    assert [BUILT_IN.names.index(planned.stage) for planned in drawn[0]] == sorted(
        i for i in range(len(BUILT_IN.names)) for _ in range(30)
    )
    assert all(0 <= planned.moment < 1 for planned in drawn[0])
    schedule = Schedule(10, 7, kinds, BUILT_IN.names)
    first = schedule.take(6)
    schedule.give_back(first[4:])
    assert len(schedule) == 6
    assert sorted(map(str, schedule.take(2))) == sorted(map(str, first[4:]))


def test_a_slow_first_run_does_not_move_faults_past_the_end_of_later_ones(tmp_path: Path) -> None:
    for run, compare in (("calm", 7.5), ("disturbed", 9.0), ("quick", 1.1)):
        for stage, seconds in (("sft", 2.0), ("compare", compare)):
            folder = tmp_path / run / stage
            folder.mkdir(parents=True)
            (folder / "lineage.json").write_text(json.dumps({"seconds": seconds}))
    stages, known = ("sft", "compare"), dict[str, float]()
    for run, expected in (("calm", 7.5), ("disturbed", 7.5), ("quick", 1.1)):
        known = shortest_seconds(known, tmp_path / run, stages)
        assert known == {"sft": 2.0, "compare": expected}


def test_kinds_are_chosen_or_refused() -> None:
    everywhere = ["worker", "generator", "node", "driver", "hang"]
    assert choose_kinds([], {}) == [*everywhere, "partition", "disk", "folder", "server"]
    assert choose_kinds([], dict.fromkeys(("partition", "disk", "server"), "why")) == [*everywhere, "folder"]
    assert choose_kinds(["hang", "folder", "hang"], {}) == ["hang", "folder"]
    with pytest.raises(ValueError, match=r"'fire' is not a kind of fault; some of worker, generator, node, driver"):
        choose_kinds(["fire"], {})
    with pytest.raises(ValueError, match="disk is not possible here: mount: no"):
        choose_kinds(["disk"], {"disk": "mount: no"})


@pytest.mark.skipif(bool(IMPOSSIBLE["disk"]), reason=IMPOSSIBLE["disk"])
def test_a_full_disk_is_full_until_it_is_repaired_whatever_is_removed_meanwhile(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        own = disk.folder / "own"
        own.write_bytes(bytes(1 << 20))
        fault = DiskFull(disk, 1.0)
        fault.inject()
        with pytest.raises(OSError, match="No space left"):
            (disk.folder / "more").write_bytes(bytes(1 << 18))
        (disk.folder / "more").unlink(missing_ok=True)
        own.unlink()
        fault.keep_up()
        with pytest.raises(OSError, match="No space left"):
            own.write_bytes(bytes(1 << 20))
        fault.repair()
        own.write_bytes(bytes(1 << 20))
    assert not (tmp_path / "disk").exists()


def test_a_missing_folder_comes_back_over_what_was_made_in_its_place(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "pretrain").mkdir(parents=True)
    fault = FolderMissing(run, 1.0)
    fault.inject()
    assert not run.exists()
    run.mkdir()
    (run / "stray").touch()
    fault.repair()
    assert [path.name for path in run.iterdir()] == ["pretrain"]
    assert (tmp_path / ".run.made-meanwhile-1" / "stray").exists()
    assert fault.what == "run/ missing for 1 s; the run made it again"
    fault.repair()
    assert run.exists()


def test_a_stopped_worker_counts_as_gone_once_somebody_has_killed_it() -> None:
    with subprocess.Popen(["sleep", "60"]) as worker:
        short, for_good = WorkerHangs(worker.pid, 2.0), WorkerHangs(worker.pid, float("inf"))
        short.inject()
        _wait_for_state(worker.pid, "T")
        short.repair()
        _wait_for_state(worker.pid, "S")
        for_good.inject()
        _wait_for_state(worker.pid, "T")
        assert not for_good.is_over
        worker.kill()
        worker.wait()
        assert for_good.is_over
        for_good.repair()


def _wait_for_state(pid: int, state: str) -> None:
    end = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("script", "explained"),
    [("print('error: disk full'); raise SystemExit(2)", True), ("raise RuntimeError('surprise')", False)],
)
def test_an_end_with_one_line_is_told_from_one_with_a_traceback(tmp_path: Path, script: str, explained: bool) -> None:
    log = tmp_path / "driver.log"
    log.write_text("Traceback (most recent call last): of an earlier driver\npretrain: continues from its start\n")
    driver = Driver([sys.executable, "-c", script], {}, log)
    driver.process.wait()
    assert driver.was_explained is explained
    assert not driver.has_finished
    assert driver.num_losses == 0
    assert driver.last_line == ("error: disk full" if explained else "RuntimeError: surprise")


def test_a_loss_is_counted_by_what_the_recovery_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = [WorkerLostError("rank 1 of 2 was lost"), WorkerLostError("rank 0 of 2 was lost")]

    def work() -> None:
        if losses:
            raise losses.pop()

    run_to_end("sft", tmp_path, work, lambda: None)
    said = capsys.readouterr().err + "sft: resumes from step 3 of 5 (checkpoints/step-000003)\nsft: done in 2 s\n"
    driver = Driver([sys.executable, "-c", f"print({said!r})"], {}, tmp_path / "driver.log")
    driver.process.wait()
    assert driver.num_losses == 2
    assert driver.has_finished


def test_the_stage_at_work_is_the_one_that_is_begun_and_not_finished(tmp_path: Path) -> None:
    assert stage_of(tmp_path) == "start"
    (tmp_path / "pretrain").mkdir()
    (tmp_path / "pretrain" / "inputs.json").touch()
    assert stage_of(tmp_path) == "pretrain"
    (tmp_path / "pretrain" / "lineage.json").touch()
    assert stage_of(tmp_path) == "start"
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "inputs.json").touch()
    assert stage_of(tmp_path) == "sft"


def test_the_pulse_beats_with_every_line_of_a_log_and_whatever_is_saved(tmp_path: Path) -> None:
    beats = [pulse(tmp_path)]
    (tmp_path / "ppo" / "checkpoints" / "step-000001").mkdir(parents=True)
    beats.append(pulse(tmp_path))
    (tmp_path / "ppo" / "metrics.jsonl").write_text("{}\n")
    beats.append(pulse(tmp_path))
    (tmp_path / "ppo" / "metrics.jsonl").write_text("{}\n{}\n")
    beats.append(pulse(tmp_path))
    assert len({str(beat) for beat in beats}) == 4


def test_one_changed_byte_is_a_difference(tmp_path: Path) -> None:
    for run in ("calm", "chaos"):
        for stage in ("pretrain", "sft"):
            (tmp_path / run / stage / "model").mkdir(parents=True)
            (tmp_path / run / stage / "model" / "model.safetensors").write_bytes(b"weights")
    assert differing_stages(tmp_path / "calm", tmp_path / "chaos") == []
    (tmp_path / "chaos" / "sft" / "model" / "model.safetensors").write_bytes(b"weighty")
    assert differing_stages(tmp_path / "calm", tmp_path / "chaos") == ["sft"]
    (tmp_path / "chaos" / "pretrain" / "model" / "model.safetensors").unlink()
    assert differing_stages(tmp_path / "calm", tmp_path / "chaos") == ["pretrain", "sft"]


def test_the_summary_says_what_struck_and_what_became_of_it() -> None:
    faults = (
        Injected("worker", "a worker killed", "sft", RECOVERED, 0.4, 3.0, 3.0),
        Injected("node", "node-1 killed, back after 2 s", "ppo", RECOVERED, 3.0, 9.0, 11.0),
        Injected("node", "node-2 killed, back after 1 s", "sft", RECOVERED, 1.0, 9.0, 9.0),
        Injected("driver", "the driver killed", "ppo", RESTARTED, lost_seconds=6.0),
        Injected("hang", "a worker stopped for 2.0 s", "ppo", TOLERATED, lost_seconds=2.0),
        Injected(
            "disk", "the disk full for 9 s", "ppo", RESTARTED, lost_seconds=40.0, message="error: free space there"
        ),
    )
    result = ChaosResult(faults, 2, (), 60.0, 300.0, {"partition": "no root"}, 50.0)
    assert summary(result).splitlines() == [
        "6 faults in 2 runs: 1 worker, 2 node, 1 driver, 1 hang, 1 disk",
        "by stage: 2 sft, 4 ppo",
        "1 tolerated; 3 recovered; 2 restarted",
        "worker: 1 loss noticed after 0.4 s (median), 0.4 s at most",
        "node: 2 losses noticed after 2.0 s (median), 3.0 s at most",
        "operator restart after the disk full for 9 s in ppo: error: free space there",
        "not possible here: partition: no root",
        "60 s undisturbed, 150 s per run under faults, 5.0 min in all",
        "effective training time   faults  seconds lost  at most  with one fault per run",
        "worker                         1           3.0      3.0                     94%",
        "node                           2          10.0     11.0                     83%",
        "driver                         1           6.0      6.0                     89%",
        "hang                           1           2.0      2.0                     96%",
        "disk                           1          40.0     40.0                     56%",
        "6 faults in 2 runs: 100 s of training in 300 s, 33%",
        "every stage's results are bitwise the same",
    ]
    assert not result.has_failed
    differing = ChaosResult(faults[:1], 1, ("ppo",), 1.0, 2.0, {}, 1.0)
    assert differing.has_failed
    assert summary(differing).endswith("differing: ppo")
    failed = ChaosResult(
        (Injected("disk", "the disk full", "ppo", FAILED, message="OSError"),), 1, (), 1.0, 2.0, {}, 1.0
    )
    assert failed.has_failed
    assert "FAILED: the disk full in ppo: OSError" in summary(failed)
