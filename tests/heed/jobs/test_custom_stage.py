"""The stage of CONTRIBUTING.md, "Adding a stage": a file outside the tree, named by a job, is a stage like any
other."""

import json
import os
import re
import signal
import sys
import time
import tomllib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from heed.cli import main
from heed.jobs.job_file import load_job
from heed.jobs.plan import Setting, make_plan
from heed.jobs.registry import BUILT_IN
from heed.jobs.report import write_run_report
from heed.jobs.run import Run, inputs_of
from heed.jobs.submission import Shipment
from heed.jobs.times import GPUS
from training.metrics import read_metrics

ROOT = Path(__file__).parents[3]
DEBUG = ROOT / "configs" / "jobs" / "debug.toml"
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Adding a stage")[1]
CODE, SECTION = (re.search(rf"```{kind}\n(.*?)```", GUIDE, re.DOTALL)[1] for kind in ("python", "toml"))


def job_file(folder: Path, code: str = CODE, **changes: Any) -> Path:
    """The debug job's pretraining and the guide's stage, whose code is in the same folder."""
    folder.mkdir(exist_ok=True)
    (folder / "midtrain.py").write_text(code, encoding="utf-8")
    debug, added = tomllib.loads(DEBUG.read_text(encoding="utf-8")), tomllib.loads(SECTION)
    shared = ("name", "seed", "workers", "world", "engine", "model", "pretrain")
    kept = {key: debug[key] for key in shared if key in debug}
    values = {**kept, **added, "custom_stages": [f"{folder / 'midtrain.py'}:STAGE"]}
    values["midtrain"] |= changes
    (folder / "job.toml").write_text(tomli_w.dumps(values), encoding="utf-8")
    return folder / "job.toml"


def test_it_takes_under_sixty_lines() -> None:
    assert len([line for line in CODE.splitlines() if line.strip()]) < 60


def wait_for_steps(command: Any, run: Path, steps: int) -> None:
    end = time.monotonic() + 240
    while len(read_metrics(run / "midtrain" / "metrics.jsonl")) < steps:
        assert command.process.poll() is None, command.output
        assert time.monotonic() < end, command.output
        time.sleep(0.02)


@pytest.mark.long
@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_it_runs_and_is_recorded_and_shown(heed: Callable[..., Any], tmp_path: Path, is_killed: bool) -> None:
    path = job_file(tmp_path, num_steps=60 if is_killed else 8, save_every_steps=4)
    arguments = ("run", str(path), "--runs", str(tmp_path / "runs"))
    run = tmp_path / "runs" / "debug"
    if is_killed:
        killed = heed(*arguments)
        wait_for_steps(killed, run, 5)
        killed.kill_everything()
        for process in killed.wait_until_gone():
            os.kill(process, signal.SIGKILL)
    command = heed(*arguments)
    assert command.wait() == 0, command.output
    if is_killed:
        assert "pretrain: unchanged, skipped" in command.output
        assert re.search(r"midtrain: resumes from step \d+ of 60", command.output), command.output
    steps = [line["step"] for line in read_metrics(run / "midtrain" / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) == (60 if is_killed else 8)

    lineage = json.loads((run / "midtrain" / "lineage.json").read_text())
    pretrained = json.loads((run / "pretrain" / "lineage.json").read_text())
    assert lineage["parents"] == {"pretrain": pretrained["outputs"]}
    assert lineage["data"]["stage midtrain"] == sha256((tmp_path / "midtrain.py").read_bytes()).hexdigest()
    page, report = (run / "report.html").read_text(), json.loads((run / "report.json").read_text())
    assert "Midtrain" in page
    assert report["midtrain"]["num_rows"] == json.loads((run / "midtrain" / "results.json").read_text())["num_rows"]
    assert report["stages"]["midtrain"] == {"status": "finished"}
    (tmp_path / "midtrain.py").unlink()  # a run outlives the code of its stages
    assert write_run_report(run)["midtrain"] == report["midtrain"]


def test_it_runs_right_after_its_parents(tmp_path: Path) -> None:
    job = load_job(job_file(tmp_path))
    assert job.registry.names == ("pretrain", "midtrain", *BUILT_IN.names[1:])
    assert job.stage_names == ("pretrain", "midtrain")
    assert job.parents("midtrain") == ("pretrain",)


def test_its_code_is_an_input(tmp_path: Path) -> None:
    job = load_job(job_file(tmp_path))
    run = Run(job, tmp_path / "runs", None, lambda: pytest.fail("no workers are needed"))
    before = inputs_of(run, job.stage("midtrain")).fingerprint
    (tmp_path / "midtrain.py").write_text(CODE + "# changed\n")
    assert inputs_of(run, job.stage("midtrain")).fingerprint != before


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs `heed` with arguments in this process; returns its exit code and all that it printed."""

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["heed", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr()
        return int(caught.value.code or 0), said.out + said.err

    return call


def test_it_is_planned(called: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    code, output = called("plan", str(job_file(tmp_path)))
    assert code == 0, output
    midtrain = output.split("\nmidtrain, in rows\n")[1]
    assert re.search(r"tokens\s+per\s+step\s+640", midtrain)
    assert re.search(r"peak +[1-9][\d.]* MiB\n", midtrain)


def test_a_stage_without_a_plan_is_left_out_of_the_sums(tmp_path: Path) -> None:
    job = load_job(job_file(tmp_path, CODE.replace(", plan=plan", "")))
    pretrain, midtrain = make_plan(job, Setting(GPUS["h100"], 0.4, 1000)).stages
    assert midtrain.assumptions == ("this stage gives no estimate; its memory and time are not counted",)
    assert (midtrain.seconds, midtrain.peak) == (0, 0)
    assert pretrain.seconds > 0


def test_its_rows_are_read_before_anything_is_trained(called: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "one"}\n{"body": "two"}\n')
    path = job_file(tmp_path, texts={"source": str(tmp_path / "texts.jsonl")})
    code, output = called("run", str(path), "--runs", str(tmp_path / "runs"))
    assert code == 2, output
    assert re.search(r"texts.jsonl: line 2: field 'text' is missing", output), output
    assert not (tmp_path / "runs" / "debug" / "pretrain").exists()


@pytest.mark.parametrize(
    ("code", "changes", "message"),
    [
        (CODE, {"num_stepz": 3}, r"`num_stepz`: unknown key in \[midtrain\]; did you mean `num_steps`\?"),
        (CODE, {"num_steps": 0}, r"midtrain\.num_steps: at least 1 was expected, not 0"),
        (CODE, {"batch": {"batch_size": 4, "micro_batch_size": 3}}, r"midtrain\.batch: batch_size over micro_batch"),
        (CODE.replace('"midtrain"', '"sft"'), {}, r"custom_stages: stage .*: the name 'sft' is taken"),
        (
            CODE.replace("STAGE = ", "OTHER = "),
            {},
            r"midtrain\.py has no stages\.contract\.Stage named 'STAGE'",
        ),
        (CODE.replace('Parent("pretrain"', 'Parent("pretrian"'), {}, r"parent is 'pretrian'; one of pretr"),
        ("import nowhere_at_all", {}, r"custom_stages: stage: importing .*midtrain\.py raised ModuleNotFoundError"),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, code: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_job(job_file(tmp_path, code, **changes))


def test_its_file_is_shipped_with_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = job_file(tmp_path)
    path.write_text(path.read_text().replace(f"{tmp_path}/midtrain.py", "midtrain.py"))
    monkeypatch.chdir(tmp_path)
    with Shipment.of(path, (), load_job(path)).packed() as folder:
        assert (folder / "midtrain.py").read_text() == CODE
