"""`heed measure` as a user types it, on small models of random weights."""

import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from files.atomic import write_json
from heed.cli import app
from heed.commands.measure import spread
from lm.config import ModelConfig
from lm.model import LanguageModel, ScalarModel, init_weights
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from ppo.report import PPOResults
from preferences.statistics.estimates import UNKNOWN, Interval
from tests.rows import jsonl

WORDS = ["fox", "dog", "bird", "bush", "hand", "brown"]
DEBUG_JOB = Path(__file__).parents[2] / "configs" / "jobs" / "debug.toml"


@pytest.fixture(scope="module")
def run_folder(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, tokenizer: Tokenizer, tiny_config: ModelConfig
) -> Path:
    """What a run leaves that measures read."""
    folder = tmp_path_factory.mktemp("run")
    shutil.copy(DEBUG_JOB, folder / "job.toml")
    shutil.copytree(model_folder, folder / "sft" / "model")
    (folder / "ppo" / "policies").mkdir(parents=True)
    (folder / "reward").mkdir()
    for number in range(1, 4):
        policy = LanguageModel(tiny_config)
        init_weights(policy, seed=number)
        save_model(folder / "ppo" / "policies" / f"{2 * number:06d}", policy, policy.state_dict(), tokenizer)
    shutil.copytree(folder / "ppo" / "policies" / "000004", folder / "ppo" / "model")
    write_json(folder / "ppo" / "results.json", asdict(PPOResults(7, 0.05, 0.0, 1.0)))
    reward = ScalarModel(tiny_config)
    init_weights(reward, seed=5)
    save_model(folder / "reward" / "model", reward, reward.state_dict(), tokenizer)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text(jsonl({"prompt": f"Name a {word}"} for word in WORDS))
    return str(path)


def heed(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["measure", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_kl_and_tax(run_folder: Path, prompts: str, tmp_path: Path) -> None:
    policies = [run_folder / "sft" / "model", run_folder / "ppo" / "model"]
    shown = heed("kl", policies[1], policies[0], "--prompts", prompts, "--samples", 3, "--json", tmp_path / "kl.json")
    assert "--max-new-tokens 128 is reduced to" in shown  # the default is longer than these models' context
    kl = json.loads((tmp_path / "kl.json").read_text())
    assert (kl["num_prompts"], kl["num_responses"]) == (6, 18)
    assert 0 < kl["full"]["low"] < kl["full"]["mean"] < kl["full"]["high"]
    (tmp_path / "text.txt").write_text("The fox sleeps.\n\nThe dog and the bird.\n\nA bush.\n")
    (tmp_path / "shots.jsonl").write_text("".join(f'{{"prompt": "{w} is", "completion": "a {w}"}}\n' for w in WORDS))
    shown = heed(
        "tax", *policies, "--text", tmp_path / "text.txt", "--few-shot", tmp_path / "shots.jsonl", "--shots", 1,
        "--json", tmp_path / "tax.json",
    )  # fmt: skip
    tax = json.loads((tmp_path / "tax.json").read_text())
    assert tax["num_documents"] == 3
    assert tax["bits_per_byte"][str(policies[0])]["above_before"]["mean"] == 0
    assert tax["tasks"][0]["num_examples"] == 6
    assert "bits per byte" in shown


def test_mistakes_are_reported(run_folder: Path) -> None:
    model = run_folder / "sft" / "model"
    with pytest.raises(ValueError, match="named only once"):
        heed("tax", model, model)
    with pytest.raises(ValueError, match="something to measure"):
        heed("tax", model, run_folder / "ppo" / "model")


def test_what_is_unknown_and_zeros_are_shown_as_such() -> None:
    assert spread(Interval(0.731, 0.701, 0.76)) == "0.731 (0.701 to 0.760)"
    assert spread(Interval(-0.0001, -0.0002, -0.0)) == "0.000 (0.000 to 0.000)"
    assert spread(Interval(0.5, math.nan, math.nan)) == "0.500 (no interval)"
    assert spread(UNKNOWN) == "-"
