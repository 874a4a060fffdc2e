"""Engines whose head has padded rows, on two ranks, train and save the true vocabulary.

This file is also the ranks' program: `python test_padded_head.py FOLDER`.
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lm.layers import align_heads
from lm.model import LanguageModel
from lm.source import RandomInit
from tests.gpu.models import shape, tokens
from tests.training.conftest import StartRanks
from training.config import EngineConfig, OptimizerConfig
from training.engine import Engine
from training.objectives import CausalLMObjective

pytestmark = pytest.mark.long

GPU = torch.device("cuda")  # only its name is used
V = 500
CONFIG = shape(vocab_size=V, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, intermediate_size=48)
ZERO_STAGES = (0, 2, 3)


def take_steps(zero_stage: int, *, is_padded: bool) -> dict[str, Tensor]:
    """Returns the weights and this rank's part of a checkpoint after two steps."""
    objective = CausalLMObjective(tokens(4, 17) % V)
    config = EngineConfig.model_validate({"precision": "fp32", "zero_stage": zero_stage, "trackers": ()})
    optimizer = OptimizerConfig(learning_rate=1e-3, schedule="constant", eps=1e-3, weight_decay=0.1)
    source = RandomInit(partial(LanguageModel, CONFIG), seed=0)
    engine: Engine[LanguageModel] = Engine(source, optimizer, config, world_size=2, micro_batch=2)
    if is_padded:
        align_heads(engine.module, GPU)
    rows = np.arange(2) + 2 * engine.rank
    for _ in range(2):
        engine.accumulate([rows], lambda part: objective.loss(engine.model, part, engine.device))
        engine.step()
    weights = {name: weight.clone() for name, weight in engine.weights(torch.float32)}
    state = {key: part.values.clone() for key, part in engine.state().items()}
    engine.close()
    return weights | state


def rank_program(folder: Path) -> None:
    found = [[take_steps(stage, is_padded=is_padded) for is_padded in (False, True)] for stage in ZERO_STAGES]
    torch.save(found, folder / f"rank-{torch.distributed.get_rank()}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, start_two_ranks: StartRanks) -> list[list[list[dict[str, Tensor]]]]:
    folder = tmp_path_factory.mktemp("padded")
    start_two_ranks(__file__, folder)
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("zero_stage", ZERO_STAGES)
def test_steps_and_checkpoints_are_those_of_the_vocabulary(
    zero_stage: int, ranks: list[list[list[dict[str, Tensor]]]]
) -> None:
    for rank in ranks:
        plain, padded = rank[ZERO_STAGES.index(zero_stage)]
        assert padded.keys() == plain.keys()
        assert padded["decoder.embedding.weight"].shape == (V, 32)
        for key, value in padded.items():
            torch.testing.assert_close(value, plain[key], atol=1e-4, rtol=1e-3, msg=key)


if __name__ == "__main__":
    rank_program(Path(sys.argv[1]))
