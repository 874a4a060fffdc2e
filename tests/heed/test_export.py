"""`heed export gguf`, and commands that take the file it writes in the place of a model directory."""

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from files.hashes import file_hash
from heed.cli import main
from heed.jobs.job_file import load_job
from heed.jobs.models import _fetch, hub_models
from heed.jobs.run import Run, inputs_of
from lm.hub import model_directory, on_this_machine
from lm.model import ScalarModel
from lm.source import RandomInit, load
from lm.tokenizer import Tokenizer
from lm.weights import read_config, save_model
from tests.models import load_language_model
from tests.rows import jsonl

ROOT = Path(__file__).parents[2]
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """Runs `heed` with arguments: its exit code, standard output and standard error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments: str | Path, typed: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["heed", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr()
        return int(caught.value.code or 0), said.out, said.err

    return run


@pytest.fixture
def exported(call: Call, model_folder: Path, tmp_path: Path) -> Path:
    """The tiny model as a GGUF file, from the folder of a stage."""
    (tmp_path / "ppo").mkdir()
    (tmp_path / "ppo" / "model").symlink_to(model_folder)
    path = tmp_path / "out" / "policy.gguf"
    code, said, errors = call("export", "gguf", tmp_path / "ppo", path, "--type", "f32")
    assert code == 0, errors
    assert said == f"{path}: {tmp_path / 'ppo'} in f32\n"
    return path


def test_a_gguf_file_that_is_exported_again_is_named(call: Call, exported: Path, tmp_path: Path) -> None:
    code, said, errors = call("export", "gguf", exported, tmp_path / "again.gguf")
    assert (code, said) == (0, f"{tmp_path / 'again.gguf'}: {exported} in f16\n"), errors


def test_commands_take_the_file_as_a_model(call: Call, exported: Path, model_folder: Path, tmp_path: Path) -> None:
    options = ("--max-new-tokens", "6", "--temperature", "0")
    assert call("chat", exported, *options, typed="Where is the fox?\n") == call(
        "chat", model_folder, *options, typed="Where is the fox?\n"
    )
    assert call("inspect", exported) == call("inspect", model_folder)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(jsonl({"prompt": f"{n} and", "completion": f" {n}"} for n in range(4)))
    of_file, of_folder = (call("few-shot", model, rows, "--shots", "1") for model in (exported, model_folder))
    assert of_file == of_folder
    assert "exact match" in of_file[1]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Where is the fox?"}\n{"prompt": "Who sleeps?"}\n')
    kl = ("measure", "kl", exported, model_folder, "--prompts", prompts, "--max-new-tokens", "4")
    code, said, errors = call(*kl)
    assert (code, errors) == (0, ""), errors
    assert "0.000" in said  # the same weights


def test_policies_of_a_comparison_may_be_files(call: Call, exported: Path, model_folder: Path, tmp_path: Path) -> None:
    prompts, judge = tmp_path / "prompts.jsonl", tmp_path / "judge.py"
    prompts.write_text('{"prompt": "Where is the fox?"}\n{"prompt": "Who sleeps?"}\n')
    judge.write_text("def score(prompts, responses):\n    return [len(response) for response in responses]\n")
    out = tmp_path / "comparison"
    code, _, errors = call(
        "compare", exported, f"folder={model_folder}", "--prompts", prompts, "--out", out,
        "--judge", f"{judge}:score", "--max-new-tokens", "4",
    )  # fmt: skip
    assert code == 0, errors
    assert file_hash(exported) in "".join(path.read_text() for path in out.rglob("*.json"))


def test_a_job_starts_from_the_file_and_records_its_hash(call: Call, exported: Path, tmp_path: Path) -> None:
    text = (ROOT / "configs" / "jobs" / "debug.toml").read_text()
    start, end = text.index("[model]"), text.index("[pretrain]")
    (tmp_path / "job.toml").write_text(text[:start] + text[end:])
    options = [f"pretrain.init_from={exported}", "sft.seq_len=96", "ppo.max_new_tokens=4", "collect.max_new_tokens=4"]
    job = load_job(tmp_path / "job.toml", options)
    assert job.model == read_config(model_directory(str(exported)), "language")[0]
    workers: Any = None  # not called in this test
    run = Run(job, tmp_path / "run", None, workers)
    (stage,) = [stage for stage in job.stages if stage.name == "pretrain"]
    data = {name: sha for name, sha in inputs_of(run, stage).data.items() if name == str(exported)}
    assert data == {str(exported): file_hash(exported)}
    code, said, errors = call("plan", tmp_path / "job.toml", *(part for value in options for part in ("--set", value)))
    assert code == 0, errors
    assert "pretrain" in said


def test_another_machine_makes_its_own_folder(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver names the file to each machine of the cluster, whose ranks are then given the driver's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "driver"))
    job = load_job(ROOT / "configs" / "jobs" / "debug.toml", [f"reward.init_from={exported}"])
    models, folder = hub_models(job), model_directory(str(exported))
    assert models == (exported,)
    (tmp_path / "driver").rename(tmp_path / "elsewhere")  # another machine's disk
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "worker"))
    _fetch(models)
    assert on_this_machine(folder) == tmp_path / "worker" / folder.relative_to(tmp_path / "driver")
    assert (on_this_machine(folder) / "config.json").is_file()
    exported.unlink()
    with pytest.raises(ValueError, match=rf"^{os.uname().nodename}: .*policy\.gguf: no such file"):
        _fetch(models)


def test_a_round_trip_keeps_weights_and_tokens(exported: Path, model_folder: Path) -> None:
    folder = model_directory(str(exported))
    expected = load_language_model(model_folder).state_dict()
    assert all(torch.equal(t, expected[name]) for name, t in load_language_model(folder).state_dict().items())
    ours, again = Tokenizer.load(model_folder), Tokenizer.load(folder)
    turns = [{"role": "user", "content": "Where is <|end|> the fox?"}, {"role": "assistant", "content": "山高"}]
    assert again.encode_conversations([turns]) == ours.encode_conversations([turns])
    assert again == ours  # so that a KL between a file and a folder is defined


def test_mistakes_are_named(call: Call, exported: Path, model_folder: Path, tmp_path: Path) -> None:
    code, _, errors = call("export", "gguf", model_folder, exported)
    assert (code, f"{exported} exists already" in errors.replace("\n", "")) == (2, True)
    code, _, errors = call("export", "gguf", model_folder, tmp_path / "model.bin")
    assert (code, "a name that ends in .gguf was expected" in errors.replace("\n", " ")) == (2, True)
    config = read_config(model_folder, "language")[0]
    scorer = load(RandomInit(lambda: ScalarModel(config), 1))
    save_model(tmp_path / "reward", scorer, dict(scorer.state_dict()), Tokenizer.load(model_folder))
    code, _, errors = call("export", "gguf", tmp_path / "reward", tmp_path / "reward.gguf")
    assert code == 2
    assert "ForCausalLM'] was expected" in errors.replace("\n", " ")
    assert not (tmp_path / "reward.gguf").exists()
