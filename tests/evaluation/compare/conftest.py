"""Fixtures for `heed compare` and `heed judge` in this process: real models, a real endpoint, files to judge."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evaluation.verdicts import Verdict, read_verdicts
from files import retries
from heed.cli import main
from lm.config import ModelConfig
from lm.model import LanguageModel, ScalarModel, init_weights
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from reward import external

Call = Callable[..., tuple[int, str]]


@pytest.fixture
def heed_main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs `heed` with arguments; returns the exit code and all output."""
    monkeypatch.setattr(retries, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(external, "MAX_WAIT_SECONDS", 0.0)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["heed", *arguments])
        for name in [name for name in sys.modules if name.startswith("heed_file_")]:
            del sys.modules[name]  # a command reads a function's file only once, but each real command is a new process
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return int(caught.value.code or 0), said.out + said.err

    return call


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_config: ModelConfig, tokenizer: Tokenizer) -> Path:
    """Two policies and a reward model with random weights. Read only."""
    folder = tmp_path_factory.mktemp("compared")
    for seed, name in enumerate(("one", "two")):
        model = LanguageModel(tiny_config)
        init_weights(model, seed=seed)
        (folder / name).mkdir()
        save_model(folder / name / "model", model, model.state_dict(), tokenizer)
    judge = ScalarModel(tiny_config)
    init_weights(judge, seed=5)
    save_model(folder / "reward", judge, judge.state_dict(), tokenizer)
    return folder


@pytest.fixture
def place(tmp_path: Path, models: Path) -> Path:
    """A folder with prompts, outputs, a judge function, and the models."""
    prompts = [{"prompt_id": f"p{n}", "prompt": f"The fox {n}?", "category": "ab"[n % 2]} for n in range(5)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    saved = [{"prompt_id": f"p{n}", "output": f"A fox has {'x' * n} legs."} for n in range(5)]
    (tmp_path / "saved.jsonl").write_text("".join(json.dumps(row) + "\n" for row in saved))
    (tmp_path / "judges.py").write_text(
        "def length(prompts, responses):\n    return [len(text) for text in responses]\n"
        "def picky(prompts, responses):\n    return [None if 'xx' in text else len(text) for text in responses]\n"
    )
    (tmp_path / "models").symlink_to(models)
    return tmp_path


def _compare(
    place: Path, *policies: str, judges: tuple[str, ...], out: str = "out", more: tuple[str, ...] = ()
) -> list[str]:
    named = [part for judge in judges for part in ("--judge", judge)]
    given = ["--prompts", str(place / "prompts.jsonl"), "--out", str(place / out)]
    return ["compare", *policies, *given, *named, "--max-new-tokens", "6", *more]


def _settings_of(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((folder / "compare.json").read_text())
    return settings


def _by_judge(folder: Path) -> dict[str, list[Verdict]]:
    found: dict[str, list[Verdict]] = {}
    for verdict in read_verdicts(folder / "verdicts.parquet"):
        found.setdefault(verdict.judge, []).append(verdict)
    return found


@pytest.fixture(scope="session")
def compare() -> Callable[..., list[str]]:
    """Returns the arguments of `heed compare` in a `place`."""
    return _compare


@pytest.fixture(scope="session")
def settings_of() -> Callable[[Path], dict[str, Any]]:
    """Returns the contents of a folder's compare.json."""
    return _settings_of


@pytest.fixture(scope="session")
def by_judge() -> Callable[[Path], dict[str, list[Verdict]]]:
    """Returns a folder's verdicts by judge."""
    return _by_judge
