"""The debug job end to end: what a run leaves, what runs again, and what does not."""

import hashlib
import io
import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from evaluation.compare.folder import RESPONSES, VERDICTS
from evaluation.verdicts import read_responses, read_verdicts
from heed.cli import main
from heed.jobs.job_file import load_job
from heed.jobs.pipeline import run_job
from heed.jobs.registry import BUILT_IN
from lm.tokenizer import Tokenizer
from preferences.records import Answer, ShownTask
from preferences.scripted import answer_all
from preferences.store import LabelStore
from tests.models import load_language_model

ROOT = Path(__file__).parents[3]
DEBUG = ROOT / "configs" / "jobs" / "debug.toml"
STAGES = load_job(DEBUG).stage_names
Rerun = Callable[..., list[str]]


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def contents(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of every file of the stages and of their inputs."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.parent != folder)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def copied(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of a finished run, to change; nothing in a run depends on its location."""
    shutil.copytree(finished_run, tmp_path / "debug")
    return tmp_path / "debug"


@pytest.fixture
def rerun(
    copied: Path,
    overrides: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    one_ray: None,  # noqa: ARG001
) -> Rerun:
    """Runs the job again in this process; returns the stages that ran."""

    def call(*more: str, **options: str) -> list[str]:
        capsys.readouterr()
        run_job(load_job(DEBUG, [*overrides, *more]), copied.parent, **options)
        said = capsys.readouterr().err.splitlines()
        ran = [name for name in STAGES if any(line.startswith(f"{name}: done in") for line in said)]
        skips = (line.removesuffix(": unchanged, skipped") for line in said if line.endswith(": unchanged, skipped"))
        skipped = [name for line in skips for name in line.split(", ")]
        assert not set(ran) & set(skipped)
        if "only" not in options:
            assert {*ran, *skipped} == set(STAGES)
        return ran

    return call


def test_every_stage_leaves_its_results(finished_run: Path) -> None:
    for stage in STAGES:
        folder = finished_run / stage
        lineage = read(folder / "lineage.json")
        assert lineage["stage"] == stage
        assert lineage["seconds"] >= 0
        assert lineage["packages"]["torch"] == torch.__version__
        assert (folder / "config.toml").is_file()
        assert read(folder / "results.json")
    for stage, steps in (("pretrain", 20), ("sft", None), ("reward", None), ("dpo", None), ("ppo", 3)):
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
    # Untrained, every byte costs about 8 bits; a few steps on simple English already help.
    assert 0 < heldout < 8
    assert 0 < report["sft"]["heldout_loss"] < report["sft"]["heldout_loss_before"]
    assert 0 <= report["reward"]["heldout_accuracy"]["mean"] <= 1
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
    assert set(report["compare"]["policies"]) == {"pretrained", "sft", "best_of_4", "dpo", "ppo"}
    assert read(finished_run / "dpo" / "results.json")["heldout_comparisons"] > 0
    first = json.loads((finished_run / "dpo" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert report["compare"]["policies"]["sft"]["kl_nats"]["mean"] == 0  # it is its own reference
    assert (finished_run / "report.html").stat().st_size > 10_000


def test_lineage_traces_every_parent_to_what_it_left(finished_run: Path) -> None:
    made = (*BUILT_IN.preparations, *STAGES)
    outputs = {stage: read(finished_run / stage / "lineage.json")["outputs"] for stage in made}
    assert len(set(outputs.values())) == len(outputs)
    for stage in STAGES:
        for parent, found in read(finished_run / stage / "lineage.json")["parents"].items():
            assert found == outputs[parent], (stage, parent)
    data = read(finished_run / "sft" / "lineage.json")["data"]
    path = finished_run / "world" / "data" / "demonstrations.jsonl"
    assert data["world:demonstrations"] == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("model", ["pretrain/model", "sft/model", "dpo/model", "ppo/model", "ppo/model_ema"])
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
    assert rerun("workers=2", "engine.keep_checkpoints=3") == []  # the split of the work changes no result
    assert contents(copied) == before


@pytest.mark.nightly
def test_an_unfinished_stage_goes_on_with_another_number_of_workers(rerun: Rerun, copied: Path) -> None:
    (copied / "reward" / "lineage.json").unlink()
    before = (copied / "reward" / "metrics.jsonl").read_text().splitlines()
    newest, last = sorted((copied / "reward" / "checkpoints").iterdir())
    shutil.rmtree(last)  # the checkpoint of the last step, after which nothing would be left to do
    num_kept = int(newest.name.removeprefix("step-"))
    assert 0 < num_kept < len(before)
    assert rerun("workers=2", only="reward") == ["reward"]
    after = (copied / "reward" / "metrics.jsonl").read_text().splitlines()
    assert after[:num_kept] == before[:num_kept]
    assert len(after) == len(before)
    assert after[num_kept:] != before[num_kept:]
    assert not (copied / "replaced").exists()


@pytest.mark.nightly
def test_from_reward_runs_reward_and_all_after_it_and_gives_the_same(rerun: Rerun, copied: Path) -> None:
    before = contents(copied)
    assert rerun(first="reward") == ["reward", "dpo", "ppo", "compare"]
    after = contents(copied)
    for name in ("reward/model", "dpo/model", "ppo/model", "ppo/model_ema"):
        assert after[f"{name}/model.safetensors"] == before[f"{name}/model.safetensors"]
    for name in ("compare/results.json", "compare/responses.parquet"):
        assert after[name] == before[name]
    # The earlier results are kept aside, complete; what did not run again is unchanged.
    for name, found in before.items():
        moved = name.startswith(("reward/", "dpo/", "ppo/", "compare/"))
        stage, _, rest = name.partition("/")
        assert after[f"replaced/{stage}-1/{rest}" if moved else name] == found
    assert rerun() == []


def test_a_changed_value_runs_what_depends_on_it_and_nothing_else(rerun: Rerun, copied: Path) -> None:
    before = contents(copied)
    assert rerun("compare.num_samples=1", "ppo.kl.coef=0.2") == ["ppo", "compare"]
    after = contents(copied)
    assert after["replaced/ppo-1/model/model.safetensors"] == before["ppo/model/model.safetensors"]
    assert after["ppo/model/model.safetensors"] != before["ppo/model/model.safetensors"]
    assert after["replaced/compare-1/results.json"] == before["compare/results.json"]
    assert read(copied / "report.json")["compare"]["num_samples"] == 1
    assert "[ppo.kl]\ncoef = 0.2" in (copied / "ppo" / "config.toml").read_text()
    kept = [name for name in before if not name.startswith(("ppo/", "compare/"))]
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}


def test_only_refuses_without_its_parents(rerun: Rerun, copied: Path) -> None:
    shutil.rmtree(copied / "sft")
    with pytest.raises(ValueError, match="stage reward needs sft, which is not finished in"):
        rerun(only="reward")
    # A parent whose output was changed by hand no longer matches its lineage.
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


@pytest.mark.usefixtures("one_ray")
def test_only_says_which_parents_would_run_again(
    copied: Path, overrides: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    job = load_job(DEBUG, [*overrides, "sft.optimizer.learning_rate=0.002"])
    run_job(job, copied.parent, only="collect", first="collect")
    assert "sft: its settings differ from this job's; collect uses it anyway (--only)" in capsys.readouterr().err
    assert not (copied / "replaced" / "sft-1").exists()


def test_a_policy_answers(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process; tests/heed/test_chat.py starts one."""
    arguments = ["heed", "chat", str(finished_run / "ppo" / "model"), "--max-new-tokens", "8"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Tell me about a bird.\nAnd a cat?\n"))
    with pytest.raises(SystemExit, match="0"):
        main()
    said = capsys.readouterr()
    assert said.out.count("\n") >= 2
    assert said.err == ""


class Longest:
    """Prefers the longer response."""

    name = "ann"

    def judge(self, shown: ShownTask) -> Answer:
        lengths = sorted({len(text) for text in shown.responses}, reverse=True)
        return Answer(tuple(lengths.index(len(text)) + 1 for text in shown.responses), 5)


@pytest.mark.long
@pytest.mark.usefixtures("one_ray")
def test_a_run_waits_for_the_people_who_judge(
    copied: Path, overrides: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "labels.sqlite"

    def said() -> str:
        run_job(load_job(DEBUG, [*overrides, f"compare.judge_people={store}"]), copied.parent)
        return capsys.readouterr().err

    waiting = said()
    assert re.search(rf"compare waits for people: (\d+) of \1 tasks of batch 'debug' in {store} have fewer", waiting)
    assert read(copied / "status.json")["state"] == "waiting"
    assert not (copied / "compare" / "lineage.json").exists()
    samples = {path: path.stat().st_mtime_ns for path in (copied / "compare" / "samples").rglob("*") if path.is_file()}
    with LabelStore(store) as opened:
        answer_all(opened, [Longest()], batch="debug", client="test", instructions_version="1")
    assert samples
    assert all(path.stat().st_mtime_ns == written for path, written in samples.items())

    assert "compare: done in" in said()
    results = read(copied / "compare" / "results.json")
    about = f"people, 1 per task, by the labels in {store}"
    judge = {"name": "people", "kind": "people", "description": about, "is_reward": False, "relation": ""}
    assert results["judge"] == judge
    responses = {
        (row.policy, row.prompt_id, row.index): row.text for row in read_responses(copied / "compare" / RESPONSES)
    }
    verdicts = read_verdicts(copied / "compare" / VERDICTS)
    for row in verdicts:
        a, b = (len(responses[policy, row.prompt_id, index]) for policy, index in
                ((row.policy_a, row.index_a), (row.policy_b, row.index_b)))  # fmt: skip
        assert row.preference_a == (0.5 if a == b else float(a > b))
    of_ppo = [row.preference_a if row.policy_a == "ppo" else 1 - row.preference_a for row in verdicts
              if {row.policy_a, row.policy_b} == {"ppo", "sft"}]  # fmt: skip
    assert len(of_ppo) == results["num_prompts"] * results["num_samples"]
    # The win rate weighs both display orders the same; the counts are of all verdicts.
    counted = results["pairs"]["ppo/sft"]["verdicts"]
    assert [counted[name] for name in ("wins", "ties", "losses")] == [of_ppo.count(x) for x in (1.0, 0.5, 0.0)]
    assert results["policies"]["ppo"]["gold_score"]["mean"] is None  # nobody was asked to rate
    page = (copied / "report.html").read_text(encoding="utf-8")
    assert "people, 1 per task" in page
    assert "nan" not in re.sub(r"<[^>]*>", " ", page).lower().split()
    assert "compare: unchanged, skipped" in said()
