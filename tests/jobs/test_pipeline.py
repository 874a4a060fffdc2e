"""The debug job end to end: what a run leaves, what is run again and what is not."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cluster.connection import connect, disconnect
from jobs import recovery
from jobs.job_file import load_job
from jobs.pipeline import run_job
from jobs.registry import BUILT_IN
from lm.tokenizer import Tokenizer
from lm.weights import load_language_model

ROOT = Path(__file__).parents[2]
DEBUG = ROOT / "configs" / "jobs" / "debug.toml"
Rerun = Callable[..., list[str]]


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def contents(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of the stages and of what they stand on."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.parent != folder)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def copied(finished_run: Path, tmp_path: Path) -> Path:
    """A finished run to change; nothing in a run knows where it lies."""
    shutil.copytree(finished_run, tmp_path / "debug")
    return tmp_path / "debug"


@pytest.fixture(scope="module")
def _ray_stays() -> Iterator[None]:
    """Ray is started once for all runs in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        patch.setattr(recovery, "disconnect", lambda: None)
        connect(1)
        yield
        disconnect()


@pytest.fixture
def rerun(copied: Path, overrides: tuple[str, ...], capsys: pytest.CaptureFixture[str], _ray_stays: None) -> Rerun:
    """Runs the job again, in this process; returns the stages that ran."""

    def call(*more: str, **options: str) -> list[str]:
        capsys.readouterr()
        run_job(load_job(DEBUG, [*overrides, *more]), copied.parent, **options)
        said = capsys.readouterr().err.splitlines()
        ran = [name for name in BUILT_IN.names if any(line.startswith(f"{name}: done in") for line in said)]
        skipped = [name for name in BUILT_IN.names if f"{name}: unchanged, skipped" in said]
        assert not set(ran) & set(skipped)
        if "only" not in options:
            assert {*ran, *skipped} == set(BUILT_IN.names)
        return ran

    return call


def test_every_stage_leaves_its_results(finished_run: Path) -> None:
    for stage in BUILT_IN.names:
        folder = finished_run / stage
        lineage = read(folder / "lineage.json")
        assert lineage["stage"] == stage
        assert lineage["seconds"] >= 0
        assert lineage["packages"]["torch"] == torch.__version__
        assert (folder / "config.toml").is_file()
        assert read(folder / "results.json")
    for stage, steps in (("pretrain", 20), ("sft", None), ("reward", None), ("ppo", 3)):
        lines = [json.loads(line) for line in (finished_run / stage / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(1, lines[-1]["num_steps"] + 1))
        assert steps is None or len(lines) == steps
        assert list((finished_run / stage / "tensorboard").iterdir())
    assert not list(finished_run.rglob("*.writing"))
    assert not list(finished_run.rglob(".writing-*"))
    assert not (finished_run / "replaced").exists()


def test_the_report_holds_what_others_rely_on(finished_run: Path) -> None:
    report = read(finished_run / "report.json")
    assert report["stages_missing"] == []
    heldout = report["pretrain"]["heldout_bits_per_byte"]
    # Untrained, every byte costs 8 bits or so; a few steps on simple English already pay.
    assert 0 < heldout < 8
    assert 0 < report["sft"]["heldout_loss"] < report["sft"]["heldout_loss_before"]
    assert 0 <= report["reward"]["heldout_accuracy"] <= 1
    lines = [json.loads(line) for line in (finished_run / "ppo" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["kl_nats"] == 0
    assert lines[-1]["kl_nats"] != 0
    assert isinstance(report["ppo"]["kl_nats"], float)
    win_rate = report["compare"]["pairs"]["ppo/sft"]["win_rate"]
    assert 0 <= win_rate["low"] <= win_rate["mean"] <= win_rate["high"] <= 1
    assert win_rate["num_prompts"] == 20
    mirrored = report["compare"]["pairs"]["sft/ppo"]["win_rate"]
    assert mirrored["mean"] == pytest.approx(1 - win_rate["mean"])
    gold = report["compare"]["policies"]["ppo"]["gold_score"]
    assert 0 <= gold["low"] <= gold["mean"] <= gold["high"] <= 1
    assert set(report["compare"]["policies"]) == {"pretrained", "sft", "best_of_4", "ppo"}
    assert report["compare"]["policies"]["sft"]["kl_nats"]["mean"] == 0  # it is its own reference
    assert (finished_run / "report.html").stat().st_size > 10_000


def test_lineage_traces_every_parent_to_what_it_left(finished_run: Path) -> None:
    made = (*BUILT_IN.preparations, *BUILT_IN.names)
    outputs = {stage: read(finished_run / stage / "lineage.json")["outputs"] for stage in made}
    assert len(set(outputs.values())) == len(outputs)
    for stage in BUILT_IN.names:
        for parent, found in read(finished_run / stage / "lineage.json")["parents"].items():
            assert found == outputs[parent], (stage, parent)
    data = read(finished_run / "sft" / "lineage.json")["data"]
    path = finished_run / "world" / "data" / "demonstrations.jsonl"
    assert data["world:demonstrations"] == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("model", ["pretrain/model", "sft/model", "ppo/model", "ppo/model_ema"])
def test_policies_load_in_transformers_with_the_same_logits(finished_run: Path, model: str) -> None:
    folder = finished_run / model
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    turns = [{"role": "user", "content": "Tell me about a red bird."}]
    tokens = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert tokens == Tokenizer.load(folder).encode_prompt(turns)
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits
        found = load_language_model(folder)(torch.tensor([tokens]))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_the_reward_model_loads_in_transformers(finished_run: Path) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(finished_run / "reward" / "model")
    assert model.config.num_labels == 1


def test_a_finished_run_is_left_as_it_is(rerun: Rerun, copied: Path) -> None:
    before = contents(copied)
    assert rerun() == []
    assert rerun(only="ppo") == []
    assert rerun("workers=2", "engine.keep_checkpoints=3") == []  # how the work is split changes no result
    assert contents(copied) == before


def test_an_unfinished_stage_goes_on_with_another_number_of_workers(rerun: Rerun, copied: Path) -> None:
    (copied / "reward" / "lineage.json").unlink()
    before = (copied / "reward" / "metrics.jsonl").read_text().splitlines()
    newest, last = sorted((copied / "reward" / "checkpoints").iterdir())
    shutil.rmtree(last)  # that of the last step, after which nothing would be left to do
    num_kept = int(newest.name.removeprefix("step-"))
    assert 0 < num_kept < len(before)
    assert rerun("workers=2", only="reward") == ["reward"]
    after = (copied / "reward" / "metrics.jsonl").read_text().splitlines()
    assert after[:num_kept] == before[:num_kept]
    assert len(after) == len(before)
    assert after[num_kept:] != before[num_kept:]
    assert not (copied / "replaced").exists()


def test_from_reward_runs_reward_and_all_after_it_and_gives_the_same(rerun: Rerun, copied: Path) -> None:
    before = contents(copied)
    assert rerun(first="reward") == ["reward", "ppo", "compare"]
    after = contents(copied)
    for name in ("reward/model", "ppo/model", "ppo/model_ema"):
        assert after[f"{name}/model.safetensors"] == before[f"{name}/model.safetensors"]
    for name in ("compare/results.json", "compare/responses.parquet"):
        assert after[name] == before[name]
    # The earlier results are aside, whole; what was not run again was not touched.
    for name, found in before.items():
        moved = name.startswith(("reward/", "ppo/", "compare/"))
        stage, _, rest = name.partition("/")
        assert after[f"replaced/{stage}-1/{rest}" if moved else name] == found
    assert rerun() == []


def test_a_changed_value_runs_what_depends_on_it_and_nothing_else(rerun: Rerun, copied: Path) -> None:
    before = contents(copied)
    assert rerun("compare.num_samples=1", "ppo.kl_coef=0.2") == ["ppo", "compare"]
    after = contents(copied)
    assert after["replaced/ppo-1/model/model.safetensors"] == before["ppo/model/model.safetensors"]
    assert after["ppo/model/model.safetensors"] != before["ppo/model/model.safetensors"]
    assert after["replaced/compare-1/results.json"] == before["compare/results.json"]
    assert read(copied / "report.json")["compare"]["num_samples"] == 1
    assert "kl_coef = 0.2" in (copied / "ppo" / "config.toml").read_text()
    kept = [name for name in before if not name.startswith(("ppo/", "compare/"))]
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}


def test_only_refuses_without_its_parents(rerun: Rerun, copied: Path) -> None:
    shutil.rmtree(copied / "sft")
    with pytest.raises(ValueError, match="stage reward needs sft, which is not finished in"):
        rerun(only="reward")
    # A parent whose output was changed by hand is not what its lineage says.
    path = copied / "reward" / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ValueError, match="stage compare needs sft"):
        rerun(only="compare")


def test_only_runs_one_stage(rerun: Rerun, copied: Path) -> None:
    for stage in ("ppo", "compare"):
        shutil.rmtree(copied / stage)
    assert rerun(only="collect", first="collect") == ["collect"]
    report = read(copied / "report.json")
    assert report["stages_missing"] == ["ppo", "compare"]
    assert not (copied / "ppo").exists()


@pytest.mark.usefixtures("_ray_stays")
def test_only_says_which_parents_this_job_would_make_anew(
    copied: Path, overrides: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    job = load_job(DEBUG, [*overrides, "sft.optimizer.learning_rate=0.002"])
    run_job(job, copied.parent, only="collect", first="collect")
    assert "sft: made from other settings than this job's; collect takes it as it is" in capsys.readouterr().err
    assert not (copied / "replaced" / "sft-1").exists()


def test_a_policy_answers_in_a_process_of_its_own(finished_run: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from heed.cli import main; main()", "chat", str(finished_run / "ppo" / "model"),
         "--max-new-tokens", "8"],
        cwd=ROOT, input="Tell me about a bird.\nAnd a cat?\n", capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.count("\n") >= 2
    assert done.stderr == ""
