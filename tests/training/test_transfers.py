"""What ZeRO-3 sends between ranks to load a model and to gather its weights, in calls and bytes, over gloo.

This file is also the ranks' program: `python test_transfers.py FOLDER`.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lm.config import ModelConfig
from lm.model import LanguageModel
from lm.source import RandomInit, load
from training import distributed
from training.config import EngineConfig, OptimizerConfig
from training.engine import Engine

# Odd sizes: with three ranks, shards are padded.
CONFIG = ModelConfig(
    vocab_size=65, max_position_embeddings=8, hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=1, intermediate_size=31,
)  # fmt: skip
NUM_RANKS = 3
COLLECTIVES = ("scatter", "gather", "all_gather_into_tensor", "broadcast", "all_gather")


@contextmanager
def counted() -> Iterator[dict[str, list[int]]]:
    """Notes the bytes of a rank's own tensor in each collective."""
    found: dict[str, list[int]] = {}
    own = {name: getattr(dist, name) for name in COLLECTIVES}

    def noting(name: str) -> Callable[..., Any]:
        place = 1 if name.startswith("all_gather") else 0

        def call(*arguments: Any, **options: Any) -> Any:
            found.setdefault(name, []).append((*arguments, *options.values())[place].nbytes)
            return own[name](*arguments, **options)

        return call

    try:
        for name in COLLECTIVES:
            setattr(dist, name, noting(name))
        yield found
    finally:
        for name, function in own.items():
            setattr(dist, name, function)


def rank_program(folder: Path) -> None:
    source, optimizer = RandomInit(lambda: LanguageModel(CONFIG), seed=3), OptimizerConfig(learning_rate=0.01)
    config = EngineConfig.model_validate({"precision": "bf16", "zero_stage": 3, "trackers": ()})
    expected = {name: tensor.bfloat16() for name, tensor in load(source).named_parameters()}
    building, build = dict[str, list[int]](), distributed.build_sharded

    def watched(*arguments: Any) -> Any:
        with counted() as found:
            model = build(*arguments)
        building.update(found)
        return model

    from training import engine as engines

    engines.build_sharded = watched  # type: ignore[assignment]
    engine = Engine(source, optimizer, config, world_size=NUM_RANKS, micro_batch=1)
    gathered = []
    for num_bytes, alone in ((distributed.BUCKET_BYTES, True), (distributed.BUCKET_BYTES, False), (5000, True)):
        distributed.BUCKET_BYTES = num_bytes
        with counted() as calls:
            weights = {name: tensor.clone() for name, tensor in engine.weights(torch.bfloat16, on_main_alone=alone)}
        assert weights.keys() == (expected.keys() if engine.is_main or not alone else set())
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())
        gathered.append(calls)
    engine.close()
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps({"building": building, "gathered": gathered}))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, start_two_ranks: Callable[..., None]) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("transfers")
    start_two_ranks(__file__, folder, NUM_RANKS)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def shard_bytes() -> list[int]:
    return [2 * -(-parameter.numel() // NUM_RANKS) for parameter in LanguageModel(CONFIG).parameters()]


def test_each_rank_is_sent_its_shards_of_a_model_and_nothing_else(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["building"] == {"scatter": shard_bytes()}


def test_weights_are_gathered_in_buckets(ranks: list[dict[str, Any]]) -> None:
    """Where they were gathered one parameter at a time."""
    for rank in ranks:
        on_main, everywhere, in_parts = rank["gathered"]
        assert on_main == {"gather": [sum(shard_bytes())]}
        assert everywhere == {"all_gather_into_tensor": [sum(shard_bytes())]}
        assert list(in_parts) == ["gather"]
        assert 1 < len(in_parts["gather"]) < len(shard_bytes())
        assert sum(in_parts["gather"]) == sum(shard_bytes())


if __name__ == "__main__":
    rank_program(Path(sys.argv[1]))
