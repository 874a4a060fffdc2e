"""ZeRO-3 on two nodes of two ranks each: every node keeps a second copy of the weights (hpZ). The ranks are gloo ranks
of one machine, which give it two names.

This file is also the ranks' program: `python test_node_shards.py FOLDER`.
"""

import os
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lm.config import ModelConfig
from lm.model import LanguageModel
from lm.source import RandomInit
from tests.models import full_weights
from training.config import EngineConfig, OptimizerConfig, ranks_sharing_weights
from training.distributed import _ranks_sharing_weights
from training.engine import Engine
from training.internals import node_group, write_back, zero3_shard

CONFIG = ModelConfig(
    vocab_size=129, max_position_embeddings=8, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, intermediate_size=127,
)  # fmt: skip
GIB = 2**30


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node", "weight_gib", "expected"),
    [
        (64, 8, 131, 8),  # 70B: 16.4 of 79 GiB
        (1024, 8, 326, 1),  # 175B: 40.7 GiB
        (8, 8, 15, 1),  # one node gathers over NVLink as it is
        (12, 8, 15, 1),  # nodes that the ranks do not fill
        (4, 1, 15, 1),
        (6, 0, 15, 1),
    ],
)
def test_nodes_keep_a_second_copy_if_there_are_several_and_it_fits(
    num_ranks: int, ranks_per_node: int, weight_gib: int, expected: int
) -> None:
    limit = EngineConfig(zero_stage=3).node_weights_limit(79 * GIB)
    assert ranks_sharing_weights(weight_gib * GIB, num_ranks, ranks_per_node, limit) == expected


def test_nodes_keep_no_second_copy_if_the_user_says_so() -> None:
    limit = EngineConfig(zero_stage=3, node_weights=False).node_weights_limit(79 * GIB)
    assert ranks_sharing_weights(15 * GIB, 64, 8, limit) == 1


@pytest.mark.parametrize(("hosts", "expected"), [("aabb", 2), ("aaab", 1), ("abab", 1), ("aaaa", 1), ("abcd", 1)])
def test_ranks_share_a_copy_if_each_node_has_as_many_one_after_another(
    hosts: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(found: list[tuple[str, int]], own: tuple[str, int]) -> None:
        found[:] = [(host, own[1]) for host in hosts]

    monkeypatch.setattr("training.distributed.dist.all_gather_object", gather)
    config = EngineConfig(zero_stage=3)
    assert _ranks_sharing_weights(config, 1000, len(hosts), torch.device("cpu")) == expected
    off = config.model_copy(update={"node_weights": False})
    assert _ranks_sharing_weights(off, 1000, len(hosts), torch.device("cpu")) == 1


def test_the_least_memory_of_a_machine_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """If each rank looked at its own memory, some would make the groups of a copy and the others would not."""

    def gather(found: list[tuple[str, int]], own: tuple[str, int]) -> None:
        found[:] = [("a", own[1]), ("a", own[1]), ("b", 1000), ("b", 1000)]

    monkeypatch.setattr("training.distributed.dist.all_gather_object", gather)
    assert _ranks_sharing_weights(EngineConfig(zero_stage=3), 1000, 4, torch.device("cpu")) == 1


def start_engine(hosts: str, seed: int, trained_layers: int | None = None) -> Engine[LanguageModel]:
    config = EngineConfig.model_validate({"precision": "bf16", "zero_stage": 3, "trackers": ()})
    optimizer = OptimizerConfig(learning_rate=0.01, schedule="constant", trained_layers=trained_layers)
    name = hosts[int(os.environ["RANK"])]
    with mock.patch.object(socket, "gethostname", return_value=name):
        return Engine(
            RandomInit(lambda: LanguageModel(CONFIG), seed=seed), optimizer, config, world_size=4, micro_batch=1
        )


def step(engine: Engine[LanguageModel]) -> float:
    """Two micro-batches: the second pass, and both backward passes, gather from the node's copy."""
    rows = [torch.tensor([[1, 2, 3 + engine.rank]]), torch.tensor([[4, 5, 6 + engine.rank]])]
    engine.accumulate(rows, lambda row: (engine.model(row).float().square().mean(), {}))
    return engine.step()[0]


def second_copies(engine: Engine[LanguageModel]) -> list[Tensor]:
    found = (vars(parameter)["ds_secondary_tensor"] for parameter in engine.module.parameters())
    return [tensor for tensor in found if tensor is not None]


def trained(engine: Engine[LanguageModel]) -> list[Any]:
    """Losses of steps, before and after a checkpoint is loaded, and the weights."""
    losses = [step(engine), step(engine)]
    state = {key: part.values.clone() for key, part in engine.state().items()}
    whole = {name: tensor.clone() for name, tensor in full_weights(engine).items()}
    losses.append(step(engine))
    for shard in engine.shards():  # as a checkpoint is loaded, while the node's copy has later weights
        shard.view(shard.storage).copy_(state[f"weight/{shard.name}"])
    with torch.no_grad():
        engine.model(torch.tensor([[1, 2, 3]]))  # makes the node's copy
    write_back(engine.model.optimizer, 3)
    with torch.no_grad():
        losses.append(float(engine.model(torch.tensor([[1, 2, 3]])).float().square().mean()))
    for name, tensor in engine.weights(torch.bfloat16):
        assert torch.equal(tensor, whole[name].bfloat16()), name
    for parameter in engine.module.parameters():
        assert len(zero3_shard(parameter)) == -(-vars(parameter)["ds_numel"] // 4)
    return [losses, whole]


def run_rank() -> None:
    """The same steps with and without second copies, as PPO's two engines in one process, and with frozen layers."""
    alone = start_engine("aaaa", seed=3)
    expected = trained(alone)
    assert not second_copies(alone)
    alone.close()
    engine, other = start_engine("aabb", seed=3), start_engine("aabb", seed=4, trained_layers=1)
    assert torch.distributed.get_process_group_ranks(node_group()) == [
        2 * (engine.rank // 2),
        2 * (engine.rank // 2) + 1,
    ]
    found = trained(engine)
    assert found[0] == expected[0]
    assert all(torch.equal(tensor, expected[1][name]) for name, tensor in found[1].items())
    whole = {name: tensor.clone() for name, tensor in other.weights(torch.float32)}
    assert step(other) > step(other)
    for name, tensor in other.weights(torch.float32):
        is_frozen = not other.module.get_parameter(name).requires_grad
        assert torch.equal(tensor, whole[name]) == is_frozen, name
    with torch.no_grad():
        other.model(torch.tensor([[1, 2, 3]]))
    assert {len(copy) for copy in second_copies(other)} >= {-(-129 * 64 // 2)}  # half of the embedding on each rank
    other.close()
    engine.close()


@pytest.mark.long
def test_steps_are_the_same_with_a_copy_of_the_weights_on_each_node(start_two_ranks: Any, tmp_path: Path) -> None:
    start_two_ranks(__file__, tmp_path, 4)


if __name__ == "__main__":
    run_rank()
