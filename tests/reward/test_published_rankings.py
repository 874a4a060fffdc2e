"""The reward stage on published data: a real file where there is one, and the config's key for its format."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from lm.config import ModelConfig
from lm.model import LanguageModel, init_weights
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from reward.config import RankingsConfig, RewardConfig
from reward.prepared import WARNINGS, read_judgments, read_rankings, warnings_about
from tests.models import load_scalar_model
from tests.rows import jsonl
from tests.token_files import train_reward
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.data import DataConfig
from training.engine import StageContext
from training.metrics import read_metrics

REAL = Path(__file__).parents[3] / "shared" / "data" / "hh-rlhf" / "harmless-base" / "test.jsonl.gz"
NUM_ROWS = 90  # the first odd row is among them


def model_for(rankings: RankingsConfig, folder: Path, tiny_config: ModelConfig) -> Path:
    """A tiny model whose vocabulary and context fit the data."""
    texts = [text for r in read_rankings(rankings) for text in (*r.responses, *(turn.content for turn in r.prompt))]
    tokenizer = Tokenizer.train(texts, 1000, "chat")
    model = LanguageModel(tiny_config.model_copy(update={"max_position_embeddings": 2048, "vocab_size": 1024}))
    init_weights(model, seed=7)
    save_model(folder, model, model.state_dict(), tokenizer)
    return folder


def test_a_reward_model_trains_on_real_dialogues(tmp_path: Path, tiny_config: ModelConfig) -> None:
    if not REAL.is_file():
        pytest.skip(f"the real data ({REAL}) is not on this machine")
    rankings = RankingsConfig(source=str(REAL), format="hh", max_rows=NUM_ROWS)
    start = model_for(rankings, tmp_path / "start", tiny_config)
    demonstrations = tmp_path / "demonstrations.jsonl"
    demonstrations.write_text(json.dumps({"prompt": "Why?", "completion": "So."}) + "\n")
    config = RewardConfig(
        rankings=rankings,
        demonstrations=(DataConfig(source=str(demonstrations)),),
        heldout_share=0.1,
        num_epochs=0.2,
        batch=BatchConfig(batch_size=8, micro_batch_size=4),
        optimizer=OptimizerConfig(learning_rate=0.003, schedule="constant"),
        save_every_steps=100,
        evaluate_every_steps=100,
    )
    train_reward(StageContext(tmp_path / "run", 3, 1, EngineConfig(precision="fp32", trackers=())), config, start)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    # Rows 1 to 90 without row 87, whose better reply is empty.
    assert results["train_comparisons"] + results["heldout_comparisons"] == NUM_ROWS - 1
    (warning,) = json.loads((tmp_path / "run" / WARNINGS).read_text())
    assert (warning["kind"], warning["where"]) == ("empty reply", f"{REAL}: line 87")
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == round(0.2 * results["train_comparisons"] / 8)
    assert load_scalar_model(tmp_path / "run" / "model").config.max_position_embeddings == 2048


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValidationError, match="format 'hhh': one of heed, rankings, argilla, label-studio, openai"):
        RankingsConfig(source="a.jsonl", format="hhh")
    with pytest.raises(ValidationError, match="format 'prompts': one of"):
        RankingsConfig(source="a.jsonl", format="prompts")


def test_rows_of_one_labeler_that_repeat_count_once(tmp_path: Path) -> None:
    row = {"prompt": "Why?", "chosen": "So.", "rejected": "No."}
    path = tmp_path / "a.jsonl"
    path.write_text(jsonl(row for _ in range(3)))
    data = RankingsConfig(source=str(path), format="trl")
    assert len(read_rankings(data)) == 1
    assert read_judgments(data).report.counts() == {"row seen twice": 2}
    path.write_text("")
    with pytest.raises(ValueError, match=r"a\.jsonl: no rankings; at least one was expected"):
        read_rankings(data)


def test_rows_that_were_skipped_are_listed_with_the_odd_ones(tmp_path: Path) -> None:
    row = {"prompt": "Why?", "chosen": "So.", "rejected": "No."}
    path = tmp_path / "a.jsonl"
    contradicting = {"task_id": "t", "prompt": [{"role": "user", "content": "q"}], "ranks": [1, 2], "labeler": "ann"}
    for rows, kinds in (
        ([row, {"prompt": "Why?"}, row], ["invalid", "row seen twice"]),
        ([contradicting | {"responses": ["a", text]} for text in ("b", "c", "b")], ["invalid", "row seen twice"]),
    ):
        path.write_text(jsonl(rows))
        found = read_judgments(RankingsConfig(source=str(path), on_invalid="skip"))
        listed = warnings_about(found)
        assert [warning["kind"] for warning in listed] == kinds
        assert listed[0]["found"].startswith(f"{path}: line 2: ")
        assert len(found.rankings) == 1
        with pytest.raises(ValueError, match=r"a\.jsonl: line 2: "):
            read_judgments(RankingsConfig(source=str(path)))
