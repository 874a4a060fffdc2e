"""A run's texts are tokenized once, by the driver, before any rank has a place; ranks train without the texts."""

import json
import shutil
from pathlib import Path

import pytest

from heed.jobs.job_file import load_job
from heed.jobs.pipeline import _prepare_stages, _prepare_world, check_data
from heed.jobs.recovery import Workers
from heed.jobs.run import Run
from lm.tokenizer import Tokenizer
from pretrain.stage import STAGE, tokenize, train
from stages.data import TOKENS
from training.config import EngineConfig
from training.engine import StageContext
from training.tokens import read_array

DEBUG = Path(__file__).parents[2] / "configs" / "jobs" / "debug.toml"


def prepared(folder: Path, *overrides: str) -> Run:
    """A run up to its preflight; its workers are not to be started."""
    job = load_job(DEBUG, ["pretrain.num_steps=2", *overrides])
    run = Run(job, folder, job.open_world(), Workers((1,), folder, job.cluster))
    _prepare_world(run)
    _prepare_stages(run)
    return run


def names(folder: Path) -> set[str]:
    return {path.name.rpartition("-")[0] for path in (folder / TOKENS).iterdir()}


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run after its preflight, for tests that leave it as it is."""
    run = prepared(tmp_path_factory.mktemp("run"))
    check_data(run)
    return run


def test_ranks_train_without_the_texts(checked: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(checked.folder, folder)
    assert names(folder) == {"pretrain-heldout", "pretrain-texts", "sft-demonstrations", "sft-heldout"}
    run = prepared(folder).of(STAGE.name)
    config = run.resolve(run.job.section(STAGE))  # type: ignore[type-var]
    assert config is not None
    data = tokenize(run, config)
    shutil.rmtree(folder / "world")
    context = StageContext(run.folder, 3, 1, EngineConfig(precision="fp32", trackers=()))
    run.folder.mkdir()
    train(context, config, run.model, folder / "tokenizer" / "data", data)
    results = json.loads((run.folder / "results.json").read_text())
    assert 0 < results["train_tokens"] <= len(read_array(data.training, "tokens"))


def test_texts_are_tokenized_once(checked: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.stat().st_mtime_ns for path in (checked.folder / TOKENS).rglob("*")}

    def again(*_: object) -> None:
        raise AssertionError("these texts have their tokens")

    monkeypatch.setattr(Tokenizer, "encode_plain", again)
    monkeypatch.setattr(Tokenizer, "encode_conversations", again)
    check_data(checked)
    assert {path: path.stat().st_mtime_ns for path in (checked.folder / TOKENS).rglob("*")} == before


def test_other_settings_replace_the_tokens_that_depend_on_them(checked: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(checked.folder, folder)
    before = {path.name for path in (folder / TOKENS).iterdir()}
    check_data(prepared(folder, "sft.chat_template=continuation"))
    after = {path.name for path in (folder / TOKENS).iterdir()}
    assert names(folder) == names(checked.folder)
    assert {name for name in before & after if name.startswith("pretrain-")} == {
        name for name in before if name.startswith("pretrain-")
    }
    assert not any(name.startswith("sft-") for name in before & after)


def test_a_mistake_in_later_data_shows_before_the_pretraining_texts_are_tokenized(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "Why?"}\n')
    run = prepared(tmp_path / "run", f"sft.demonstrations=[{{ source = '{bad}' }}]")
    with pytest.raises(ValueError, match=r"bad\.jsonl: line 1"):
        check_data(run)
    assert "pretrain-texts" not in names(run.folder)
