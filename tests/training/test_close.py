"""A closed engine releases its memory, because one worker runs all stages, and each stage's engines.

This file is also the ranks' program: `python test_close.py FOLDER`.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.config import ModelConfig
from lm.model import LanguageModel, count_parameters
from lm.source import RandomInit, on_meta
from tests.training.rank_process import settled
from training.config import EngineConfig, OptimizerConfig
from training.engine import Engine

pytestmark = pytest.mark.long

CONFIG = ModelConfig(
    vocab_size=64, max_position_embeddings=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, intermediate_size=64,
)  # fmt: skip
NUM_RANKS, NUM_ENGINES = 2, 3


def live_bytes() -> int:
    """Returns the bytes of all tensors that Python can reach."""
    gc.collect()
    sizes = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter) and found.device.type == "cpu":
            storage = found.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def start_engine(zero_stage: int) -> Engine[LanguageModel]:
    """Returns an engine after two steps, when the optimizer's states exist."""
    config = EngineConfig.model_validate({"precision": "bf16", "zero_stage": zero_stage, "trackers": ()})
    optimizer = OptimizerConfig(learning_rate=0.01, schedule="constant")
    source = RandomInit(lambda: LanguageModel(CONFIG), seed=3)
    engine = Engine(source, optimizer, config, world_size=NUM_RANKS, micro_batch=1)
    for _ in range(2):  # ZeRO-3 records the first pass and follows the record from then on
        engine.accumulate([torch.tensor([[1, 2, 3]])], lambda row: (engine.model(row).float().square().mean(), {}))
        engine.step()
    return engine


def rank_program(folder: Path) -> None:
    num_parameters = count_parameters([on_meta(lambda: LanguageModel(CONFIG))])
    found: dict[int, list[float]] = {}
    for zero_stage in range(4):
        start_engine(zero_stage).close()  # memory that libraries allocate on first use does not belong to the engine
        base = settled(live_bytes)
        other = start_engine(zero_stage)
        open_bytes = (settled(live_bytes) - base) / num_parameters
        for _ in range(NUM_ENGINES):
            start_engine(zero_stage).close()
        with torch.no_grad():  # an evaluation; closing other engines did not affect this one
            assert bool(torch.isfinite(other.model(torch.tensor([[1, 2, 3]]))).all())
        one_open = (settled(live_bytes) - base) / num_parameters
        other.close()
        found[zero_stage] = [open_bytes, one_open, (settled(live_bytes) - base) / num_parameters]
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, start_two_ranks: Callable[..., None]) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("close")
    start_two_ranks(__file__, folder)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("zero_stage", range(4))
def test_closed_engines_leave_no_tensors(ranks: list[dict[str, Any]], zero_stage: int) -> None:
    for rank in ranks:
        open_bytes, one_open, left = rank[str(zero_stage)]  # bytes per parameter
        assert open_bytes > 6  # to show that the measurement notices an engine that is open
        assert one_open < open_bytes + 1
        assert left < 1


if __name__ == "__main__":
    rank_program(Path(sys.argv[1]))
