"""`heed chaos`: a job under kills of workers, nodes and the driver ends with the bits of the job left alone."""

import json
from pathlib import Path

import pytest

from heed.chaos import ChaosResult, Kill, differing_stages, run_chaos, stage_of, summary

ROOT = Path(__file__).parents[2]
DEBUG = ROOT / "configs" / "jobs" / "debug.toml"
# All stages, no longer than is needed to be hit in their middle.
SHORT = ("workers=2", "ppo.num_iterations=2", "pretrain.num_steps=16", "compare.best_of=2")


@pytest.fixture
def _few_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_few_processes")
def test_kills_of_every_kind_on_two_nodes_change_no_bit(tmp_path: Path) -> None:
    result = run_chaos(DEBUG, SHORT, tmp_path / "runs", num_kills=3, seed=3, num_nodes=2)
    assert len(result.kills) == 3
    assert {kill.kind for kill in result.kills} == {"worker", "node", "driver"}
    assert result.differing == ()
    noticed = [kill.noticed_seconds for kill in result.kills if kill.noticed_seconds is not None]
    assert noticed
    assert max(noticed) < 10
    assert json.loads((tmp_path / "runs" / "debug-chaos.json").read_text())["rounds"] == result.rounds


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


def test_the_summary_says_what_was_killed_and_what_differs() -> None:
    kills = (
        Kill("worker", "sft", 0.4),
        Kill("node", "ppo", 3.0),
        Kill("driver", "ppo", None),
        Kill("node", "sft", 1.0),
    )
    said = summary(ChaosResult(kills, 2, ("ppo",), 60.0, 300.0)).splitlines()
    assert said == [
        "4 kills in 2 runs: 1 worker, 2 node, 1 driver",
        "3 losses noticed after 1.0 s (median), 3.0 s at most",
        "60 s undisturbed, 150 s a run under kills",
        "differing: ppo",
    ]
    assert summary(ChaosResult(kills[:1], 1, (), 1.0, 2.0)).endswith("every stage left the same bits")
