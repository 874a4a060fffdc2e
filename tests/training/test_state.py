"""A state that was written in any ranges can be read in any other ranges."""

import itertools
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from training.state import ParamShard, SavedState, ShardRange, State, state_of, whole_tensors, write_state

SIZES = {"weight/a": 7, "exp_avg/a": 7, "weight/b.c": 12, "weight/d": 1}


def write(folder: Path, whole: dict[str, Tensor], num_ranks: int, generator: np.random.Generator) -> None:
    """Splits each tensor at random places and deals the parts to the ranks."""
    parts: list[dict[str, ShardRange]] = [{} for _ in range(num_ranks)]
    for key, tensor in whole.items():
        cuts = [0, *sorted(generator.integers(0, len(tensor) + 1, num_ranks - 1)), len(tensor)]
        for rank, (first, last) in enumerate(itertools.pairwise(cuts)):
            if first < last:
                parts[rank][key] = ShardRange(int(first), tensor[first:last])
    for rank, state in enumerate(parts):
        write_state(state, folder / f"rank-{rank:05d}.safetensors")


@pytest.mark.parametrize("seed", range(20))
def test_any_run_is_read_out_of_any_cuts(tmp_path: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    whole = {key: torch.from_numpy(generator.standard_normal(size).astype(np.float32)) for key, size in SIZES.items()}
    write(tmp_path, whole, 1 + seed % 4, generator)
    saved = SavedState(tmp_path)
    assert sorted(saved.kinds("a")) == ["exp_avg", "weight"]
    for key, tensor in whole.items():
        first = int(generator.integers(0, len(tensor)))
        last = int(generator.integers(first, len(tensor))) + 1
        target = torch.full((last - first,), torch.nan)
        saved.fill(key, first, target)
        assert torch.equal(target, tensor[first:last])


def test_shares_of_a_tensor_are_all_of_it_once() -> None:
    tensor = torch.arange(10.0).view(2, 5)
    seen: dict[int, float] = {}
    for rank in range(3):
        (shard,) = whole_tensors([("t", tensor)])
        for fragment in state_of([shard.share(rank, 3)]).values():
            for place, value in enumerate(fragment.values.tolist(), start=fragment.offset):
                assert place not in seen
                seen[place] = value
    assert seen == {place: float(place) for place in range(10)}


def test_fewer_numbers_than_ranks(tmp_path: Path) -> None:
    """A single number, such as a score's bias, and its step are written once."""
    parameter = torch.tensor([3.0])
    for rank in range(2):
        shard = ParamShard("bias", 0, parameter, 0, 1, {"step": torch.tensor(5.0)}).share(rank, 2)
        write_state(state_of([shard]), tmp_path / f"rank-{rank:05d}.safetensors")
    restored = ParamShard("bias", 0, torch.zeros(1), 0, 1, {})
    restored.restore(SavedState(tmp_path))
    assert restored.storage.item() == 3
    assert restored.optimizer_state["step"].item() == 5


def test_an_optimizer_that_made_no_step_takes_what_was_kept(tmp_path: Path) -> None:
    kept = {"step": torch.tensor(2.0), "exp_avg": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    state: State = state_of([ParamShard("w", 0, torch.eye(2), 0, 4, kept)])
    write_state(state, tmp_path / "rank-00000.safetensors")
    home, found = torch.zeros(5), defaultdict[str, Tensor]()  # a row of more numbers than this parameter has
    ParamShard("w", 1, home, 2, 3, found).restore(SavedState(tmp_path))
    assert home.tolist() == [0, 0, 0, 0, 1]
    assert found["exp_avg"].tolist() == [0, 0, 2, 3, 4]
    assert found["step"].item() == 2


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no state of a model; a checkpoint of this version of Heed was expected"):
        SavedState(tmp_path)
    write_state({"weight/a": ShardRange(2, torch.zeros(3))}, tmp_path / "rank-00000.safetensors")
    saved = SavedState(tmp_path)
    with pytest.raises(ValueError, match=r"no weights of b; those of \['a'\] were found"):
        saved.kinds("b")
    with pytest.raises(ValueError, match=r"3 numbers of weight/a from 1; 5 were expected"):
        saved.fill("weight/a", 1, torch.zeros(5))
