"""If a rank never reaches a collective, the ranks that wait for it notice.

This file is also the ranks' program: `python test_deadline.py FOLDER`. Every case has its own process group, because
none survives a missed deadline.
"""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lm.config import ModelConfig
from lm.model import LanguageModel
from lm.source import RandomInit
from tests.tiers import in_ci, tried
from training.config import EngineConfig, OptimizerConfig
from training.engine import Engine
from training.objectives import CausalLMObjective

SECONDS = 10.0
CONFIG = ModelConfig(
    vocab_size=32,
    max_position_embeddings=24,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=24,
)
# DeepSpeed reduces gradients in its own process group, after every micro-batch.
ZERO_STAGES = [0, 2]


def step_alone(zero_stage: int, folder: Path) -> None:
    """Rank 0 continues to its first step; rank 1 waits until rank 0 has given up."""
    config = EngineConfig.model_validate(
        {"precision": "fp32", "zero_stage": zero_stage, "collective_timeout_seconds": SECONDS, "trackers": ()}
    )
    source = RandomInit(lambda: LanguageModel(CONFIG), seed=3)
    optimizer = OptimizerConfig(learning_rate=0.01, schedule="constant")
    engine = Engine(source, optimizer, config, world_size=2, micro_batch=1)
    engine.barrier()
    if engine.rank == 1:
        wait_for(folder / f"given-up-{zero_stage}")
        os._exit(0)  # the process group can no longer be shut down in order
    started = time.monotonic()
    objective = CausalLMObjective(np.arange(18, dtype=np.int32).reshape(2, 9))
    try:
        engine.accumulate([np.array([0])] * 2, lambda rows: objective.loss(engine.model, rows, engine.device))
    except RuntimeError as error:
        (folder / f"error-{zero_stage}").write_text(f"{time.monotonic() - started} {error}")
    os._exit(0)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)


def rank_program(folder: Path) -> None:
    rank = os.environ["RANK"]
    import deepspeed  # noqa: F401 - takes as long as the deadline

    (folder / f"ready-{rank}").touch()
    wait_for(folder / f"ready-{1 - int(rank)}")
    for zero_stage in json.loads((folder / "tried.json").read_text()):
        process = multiprocessing.get_context("fork").Process(target=step_alone, args=(zero_stage, folder))
        process.start()
        process.join()
        if rank == "0":
            (folder / f"given-up-{zero_stage}").touch()


@pytest.fixture(scope="module")
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start_two_ranks: Callable[..., None]
) -> Path:
    folder = tmp_path_factory.mktemp("deadline")
    (folder / "tried.json").write_text(json.dumps([int(stage) for stage in tried(request, "zero_stage")]))
    start_two_ranks(__file__, folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("zero_stage", in_ci(ZERO_STAGES, ZERO_STAGES[1:]))
def test_a_rank_that_hangs_is_noticed_in_time(folder: Path, zero_stage: int) -> None:
    seconds, message = (folder / f"error-{zero_stage}").read_text().split(maxsplit=1)
    # Without the setting it would be gloo's own half an hour; a busy machine takes some of the time before the wait.
    assert SECONDS - 1 < float(seconds) < 20 * SECONDS
    assert "Timed out waiting 10000ms" in message


if __name__ == "__main__":
    rank_program(Path(sys.argv[1]))
