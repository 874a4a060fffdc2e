"""The state of a model under training, by name and position, which any number of ranks can write and read.

A parameter's numbers are counted in flat order, and so is what the optimizer keeps for each of them. A rank writes
ranges of them, each with its offset. A reader loads only the ranges it needs, from whichever file holds them. So a
checkpoint does not depend on the number of ranks or the ZeRO stage that wrote it.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lm.progress import note_progress

WEIGHT, STEP = "weight", "step"  # kinds of saved tensors; the others are named by the optimizer


@dataclass(frozen=True)
class ShardRange:
    """Consecutive numbers of a flattened tensor, from position `offset` on."""

    offset: int
    values: Tensor  # [n]


State = Mapping[str, ShardRange]  # by "KIND/NAME"


@dataclass(frozen=True)
class ParamShard:
    """Where a rank keeps part of a parameter: its numbers from `offset` on.

    They are `length` numbers of `storage`, from `start` on. The optimizer updates `storage`, and keeps
    `optimizer_state` for all of it.
    """

    name: str
    offset: int
    storage: Tensor
    start: int
    length: int
    optimizer_state: MutableMapping[str, Any]

    def view(self, tensor: Tensor) -> Tensor:
        """This shard's numbers in a tensor of the layout of `storage`; a view [length]."""
        return tensor.detach().view(-1).narrow(0, self.start, self.length)

    def share(self, rank: int, num_ranks: int) -> "ParamShard":
        """One rank's share of a shard that is the same on all ranks."""
        first, last = (self.length * number // num_ranks for number in (rank, rank + 1))
        return ParamShard(
            self.name, self.offset + first, self.storage, self.start + first, last - first, self.optimizer_state
        )

    def ranges(self) -> Iterator[tuple[str, ShardRange]]:
        """The weights and the optimizer's state, by "KIND/NAME"; not copied."""
        yield f"{WEIGHT}/{self.name}", ShardRange(self.offset, self.view(self.storage))
        for kind, value in self.optimizer_state.items():
            if kind != STEP:
                yield f"{kind}/{self.name}", ShardRange(self.offset, self.view(value))
            elif self.offset == 0:
                yield f"{STEP}/{self.name}", ShardRange(0, value.detach().view(1))

    def restore(self, saved: "SavedState") -> None:
        """Overwrite the weights and the optimizer's state with saved ones."""
        note_progress()
        for kind in saved.kinds(self.name):
            key = f"{kind}/{self.name}"
            if kind == WEIGHT:
                saved.fill(key, self.offset, self.view(self.storage))
            elif kind == STEP:
                self.optimizer_state[STEP] = torch.zeros((), dtype=torch.float32, device=self.storage.device)
                saved.fill(key, 0, self.optimizer_state[STEP].view(1))
            else:
                if kind not in self.optimizer_state:  # before its first step, an optimizer keeps nothing
                    self.optimizer_state[kind] = torch.zeros_like(self.storage, requires_grad=False)
                saved.fill(key, self.offset, self.view(self.optimizer_state[kind]))


def whole_params(module: nn.Module, optimizers: Sequence[Any]) -> list[ParamShard]:
    """Every trained parameter, for ranks that hold whole parameters."""
    states = {p: o.state[p] for o in optimizers for group in o.param_groups for p in group["params"]}
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    return [ParamShard(name, 0, p, 0, p.numel(), states[p]) for name, p in trained]


def whole_tensors(tensors: Iterable[tuple[str, Tensor]]) -> list[ParamShard]:
    """Tensors that no optimizer updates, whole on each rank."""
    return [ParamShard(name, 0, tensor, 0, tensor.numel(), {}) for name, tensor in tensors]


def state_of(shards: Sequence[ParamShard]) -> State:
    """What these shards hold; not copied."""
    return dict(pair for shard in shards if shard.length for pair in shard.ranges())


def write_state(state: State, path: Path) -> None:
    """Write one rank's part as a safetensors file, with the offsets of its ranges in the header."""
    offsets = {key: found.offset for key, found in state.items()}
    tensors = {key: found.values for key, found in state.items()}
    save_file(tensors, path, metadata={"offsets": json.dumps(offsets)})


class SavedState:
    """What all ranks wrote of one model into a folder, read by name and position; reads only what is asked for.

    Raises:
        ValueError: the folder holds no state, or lacks what is asked for.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[str, list[tuple[Any, int, int]]] = defaultdict(list)  # (file, first number, end)
        self._kinds: dict[str, list[str]] = defaultdict(list)
        for path in sorted(folder.glob("*.safetensors")):
            file: Any = safe_open(path, "pt")
            for key, offset in json.loads(file.metadata()["offsets"]).items():
                kind, name = key.split("/", 1)
                if key not in self._places:
                    self._kinds[name].append(kind)
                self._places[key].append((file, offset, offset + file.get_slice(key).get_shape()[0]))
        if not self._places:
            raise ValueError(f"{folder}: no state of a model; a checkpoint of this version of Heed was expected")

    def kinds(self, name: str) -> Sequence[str]:
        """The kinds of tensors that were saved for a parameter; "weight" is always one of them."""
        if WEIGHT not in self._kinds.get(name, ()):
            raise ValueError(f"{self.folder}: no weights of {name}; those of {sorted(self._kinds)} were found")
        return self._kinds[name]

    def fill(self, key: str, offset: int, target: Tensor) -> None:
        """Read the numbers from `offset` on into `target` [n]."""
        end, num_read = offset + len(target), 0
        for file, first, last in self._places[key]:
            low, high = max(first, offset), min(last, end)
            if low < high:
                target[low - offset : high - offset] = file.get_slice(key)[low - first : high - first]
                num_read += high - low
        if num_read != len(target):
            raise ValueError(f"{self.folder}: {num_read} numbers of {key} from {offset}; {len(target)} were expected")
