"""After training, two gloo ranks share the scoring, and find what one rank does.

This file is also the ranks' program: `python test_scores_on_all_ranks.py FOLDER`.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from lm.model import Transformer
from reward.config import RewardConfig
from tests.models import load_scalar_model
from tests.rows import jsonl
from tests.token_files import train_reward
from training.config import EngineConfig
from training.engine import StageContext

pytestmark = pytest.mark.long

ZERO_STAGES = (0, 3)  # in this order: Accelerate goes to DeepSpeed but not back
SEED = 3


def config_for(folder: Path) -> RewardConfig:
    """Two steps, then 280 responses to score: more exclamation marks are better."""
    responses = ["Far", "Far!!", "Far!", "Out on the hill!!!"]
    rankings = [
        {
            "task_id": f"t{i}",
            "prompt": [{"role": "user", "content": f"Where is dog {i}?"}],
            "responses": responses[: 3 + i % 2],
            "ranks": [4, 2, 3, 1][: 3 + i % 2] if i % 2 else [3, 1, 2],
            "labeler": "ann",
        }
        for i in range(80)
    ]
    demonstrations = [{"prompt": f"Where is fox {i}?", "completion": "In the bush."} for i in range(9)]
    for name, rows in (("rankings", rankings), ("demonstrations", demonstrations)):
        (folder / f"{name}.jsonl").write_text(jsonl(rows))
    return RewardConfig.model_validate(
        {
            "rankings": {"source": str(folder / "rankings.jsonl")},
            "demonstrations": [{"source": str(folder / "demonstrations.jsonl")}],
            "heldout_share": 0.6,
            "num_epochs": 0.5,
            "batch": {"batch_size": 8, "micro_batch_size": 4},
            "optimizer": {"learning_rate": 0.01, "schedule": "constant", "eps": 1e-4},
        }
    )


def train_and_count(folder: Path, start: Path, zero_stage: int, num_ranks: int) -> int:
    """Train; returns how many tokens this rank read without gradients."""
    count = 0

    def note(module: torch.nn.Module, args: tuple[Any, ...], _: object) -> None:
        nonlocal count
        if isinstance(module, Transformer) and not module.training:
            count += args[0].numel()

    folder.mkdir(parents=True, exist_ok=True)
    rank = os.environ.get("RANK", "0")
    (folder / f"data-{rank}").mkdir()
    hook = register_module_forward_hook(note)  # not a mock: every module's own forward runs
    engine = EngineConfig(precision="fp32", zero_stage=zero_stage, trackers=())  # type: ignore[arg-type]
    train_reward(StageContext(folder / "run", SEED, num_ranks, engine), config_for(folder / f"data-{rank}"), start)
    hook.remove()
    return count


def rank_program(folder: Path) -> None:
    for zero_stage in ZERO_STAGES:
        run = folder / f"zero-{zero_stage}"
        count = train_and_count(run, folder / "start", zero_stage, 2)
        (run / f"count-{os.environ['RANK']}").write_text(str(count))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("one_rank")
    train_and_count(folder, model_folder, 0, 1)
    return folder / "run"


@pytest.fixture(scope="module")
def two_ranks(
    tmp_path_factory: pytest.TempPathFactory, start_two_ranks: Callable[..., None], model_folder: Path
) -> Path:
    folder = tmp_path_factory.mktemp("two_ranks")
    shutil.copytree(model_folder, folder / "start")
    start_two_ranks(__file__, folder)
    return folder


@pytest.mark.parametrize("zero_stage", ZERO_STAGES)
def test_each_rank_scores_its_share(two_ranks: Path, zero_stage: int) -> None:
    counts = [int((two_ranks / f"zero-{zero_stage}" / f"count-{rank}").read_text()) for rank in range(2)]
    assert min(counts) > 0.8 * max(counts), f"tokens read without gradients by rank: {counts}"


@pytest.mark.parametrize("zero_stage", ZERO_STAGES)
def test_two_ranks_find_what_one_finds(two_ranks: Path, one_rank: Path, zero_stage: int) -> None:
    run = two_ranks / f"zero-{zero_stage}" / "run"
    found, expected = (json.loads((folder / "heldout_scores.json").read_text()) for folder in (run, one_rank))
    assert found.keys() == expected.keys()
    for task_id, scores in expected.items():
        assert found[task_id] == pytest.approx(scores, abs=2e-4), task_id
    results, alone = (json.loads((folder / "results.json").read_text()) for folder in (run, one_rank))
    assert results["score_shift"] == pytest.approx(alone["score_shift"], abs=2e-4)
    assert float(load_scalar_model(run / "model").bias) == pytest.approx(results["score_shift"], abs=1e-6)
    assert results["heldout_accuracy"]["mean"] == pytest.approx(alone["heldout_accuracy"]["mean"], abs=0.02)


if __name__ == "__main__":
    rank_program(Path(sys.argv[1]))
