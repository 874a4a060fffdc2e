"""Under ZeRO-3 one rank reads a directory's weights one tensor at a time into the shards: no rank holds them all.

This file is also the ranks' program: `python test_sharded_loading.py FOLDER`.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.speed.process import peak_growth
from lm.config import ModelConfig
from lm.model import LanguageModel
from lm.source import RandomInit, load
from lm.tensor_files import Checkpoint
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder, save_model
from tests.models import full_weights
from training.config import EngineConfig, OptimizerConfig
from training.engine import Engine

pytestmark = pytest.mark.long

CONFIG = ModelConfig(
    vocab_size=512,
    max_position_embeddings=16,
    hidden_size=512,
    num_hidden_layers=16,
    num_attention_heads=8,
    num_key_value_heads=8,
    intermediate_size=1024,
    mlp="relu2",
)
MEGABYTE = 2**20


def rank_program(folder: Path) -> None:
    rank, source = int(os.environ["RANK"]), ModelFolder(folder / "model", LanguageModel)
    optimizer = OptimizerConfig(learning_rate=0.01, schedule="constant")
    config = EngineConfig(precision="fp32", zero_stage=3, trackers=())
    # DeepSpeed takes memory on first use; a tiny model absorbs that.
    small = CONFIG.model_copy(update={"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 8, "head_dim": 2})
    Engine(RandomInit(lambda: LanguageModel(small), 0), optimizer, config, world_size=2, micro_batch=1).close()
    from training import engine as engines

    sharded, loading, num_read, read = None, engines.build_sharded, 0, Checkpoint.tensor

    def counted(checkpoint: Checkpoint, name: str) -> torch.Tensor:
        nonlocal num_read
        tensor = read(checkpoint, name)
        num_read += tensor.nbytes
        return tensor

    def watched(*arguments: Any) -> Any:
        nonlocal sharded
        Checkpoint.tensor = counted  # type: ignore[method-assign]
        model, sharded = peak_growth(lambda: loading(*arguments))
        Checkpoint.tensor = read  # type: ignore[method-assign]
        return model

    engines.build_sharded = watched  # type: ignore[assignment]
    engine = Engine(source, optimizer, config, world_size=2, micro_batch=1)
    weights = full_weights(engine)
    engine.close()
    model, whole = peak_growth(lambda: load(source))
    same = all(torch.equal(weights[name], tensor) for name, tensor in model.named_parameters())
    found = {"sharded": sharded, "whole": whole, "same": same, "num_read": num_read}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def figures(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, start_two_ranks: Callable[..., None]
) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sharded")
    model = load(RandomInit(lambda: LanguageModel(CONFIG), seed=1))
    save_model(folder / "model", model, model.state_dict(), tokenizer, max_file_bytes=40_000_000)
    # Freed memory returns to the system immediately, so that the measurement shows what is held.
    start_two_ranks(__file__, folder, MALLOC_MMAP_THRESHOLD_="65536")
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_a_rank_holds_its_shards_and_one_tensor(figures: list[dict[str, Any]]) -> None:
    tensors = [tensor.numel() * 4 for _, tensor in RandomInit(lambda: LanguageModel(CONFIG), 1).tensors()]
    whole = sum(tensors)
    assert whole > 120 * MEGABYTE
    for rank in figures:
        assert rank["whole"] > 0.95 * whole  # so that the measurement notices a full copy
        assert rank["sharded"] < whole / 2 + 4 * max(tensors) < 0.6 * whole


def test_rank_0_alone_reads_the_files(figures: list[dict[str, Any]]) -> None:
    whole = sum(tensor.nbytes for _, tensor in RandomInit(lambda: LanguageModel(CONFIG), 1).tensors())
    assert [rank["num_read"] for rank in figures] == [whole, 0]


def test_the_shards_hold_the_files_weights(figures: list[dict[str, Any]]) -> None:
    assert [rank["same"] for rank in figures] == [True, True]


if __name__ == "__main__":
    rank_program(Path(sys.argv[1]))
