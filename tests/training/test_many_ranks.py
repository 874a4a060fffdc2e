"""The arithmetic of shards on 3, 8 and 64 ranks, one rank after another in this process: together the ranks hold
every number exactly once, for weights and moments without ZeRO, for checkpoints, and for frozen models."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lm.config import ModelConfig
from lm.model import LanguageModel
from lm.source import RandomInit, load
from ppo.scorer import ALIGNMENT, ShardedModel
from training.checkpoint import STEP, WEIGHT, ParamShard, SavedState, state_of, whole_params, write_state

# Sizes that few world sizes divide: ranks get parts of unequal lengths, some of them empty.
CONFIG = ModelConfig(
    vocab_size=67, max_position_embeddings=8, hidden_size=12, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, intermediate_size=10,
)  # fmt: skip
SOURCE = RandomInit(lambda: LanguageModel(CONFIG), seed=3)
WORLDS = [3, 8, 64]


def trained() -> tuple[LanguageModel, list[ParamShard]]:
    """Returns a model after one step of AdamW, and its full parameters with their moments."""
    model = load(SOURCE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.tensor([[1, 2, 3]])).float().square().mean().backward()
    optimizer.step()
    return model, whole_params(model, [optimizer])


def shares(whole: list[ParamShard], rank: int, world: int) -> list[ParamShard]:
    return [shard.share(rank, world) for shard in whole]


def values_of(whole: list[ParamShard]) -> Iterator[tuple[str, Tensor]]:
    """Returns weights and moments, flattened, by their keys in a checkpoint."""
    for shard in whole:
        yield f"{WEIGHT}/{shard.name}", shard.storage.detach().flatten()
        for kind in ("exp_avg", "exp_avg_sq"):
            yield f"{kind}/{shard.name}", shard.optimizer_state[kind].flatten()


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_write_every_number_once_and_others_read_them(world: int, tmp_path: Path) -> None:
    _, whole = trained()
    num_bytes, total = [], sum(shard.length for shard in whole)
    for rank in range(world):
        state = state_of(shares(whole, rank, world))
        num_bytes.append(sum(part.values.nbytes for key, part in state.items() if not key.startswith(STEP)))
        if state:
            write_state(state, tmp_path / f"{rank:02d}.safetensors")
    assert sum(num_bytes) == 12 * total
    assert max(num_bytes) <= 12 * (total / world + len(whole))
    saved = SavedState(tmp_path)
    for key, expected in values_of(whole):
        read = torch.full_like(expected, torch.nan)
        saved.fill(key, 0, read)  # raises unless each number occurs exactly once
        assert torch.equal(read, expected), key
    for other in WORLDS:
        fresh = load(SOURCE)
        optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.01)
        own = whole_params(fresh, [optimizer])
        for rank in range(other):
            for shard in shares(own, rank, other):
                shard.restore(saved)
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(values_of(own), values_of(whole), strict=True))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("by_layer", [False, True])
def test_shares_of_a_frozen_model_are_its_bytes(world: int, by_layer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' parts are concatenated in order, as they are gathered."""
    monkeypatch.setenv("WORLD_SIZE", str(world))
    held: list[list[Tensor]] = []
    for rank in range(world):
        monkeypatch.setenv("RANK", str(rank))
        model = ShardedModel(SOURCE, lambda _: None, torch.device("cpu"), 1.0, by_layer=by_layer)
        held.append([bundle.share for bundle in model.bundles])
    expected = {name: tensor.detach() for name, tensor in load(SOURCE).named_parameters()}
    for parts, bundle in zip(zip(*held, strict=True), model.bundles, strict=True):
        assert len({len(part) for part in parts}) == 1
        whole, num_bytes = torch.cat(parts), 0
        for name, weight in bundle.weights.items():
            tensor = expected.pop(name)
            found = whole[weight.start : weight.start + tensor.nbytes].view(torch.float32).view(tensor.shape)
            assert torch.equal(found, tensor), name
            num_bytes += tensor.nbytes
        assert len(parts[0]) <= num_bytes / world + (len(bundle.weights) / world + 1) * ALIGNMENT
    assert not expected
