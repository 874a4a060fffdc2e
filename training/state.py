"""The state of a model under training, by name and place: what ranks write and any other number of ranks can read.

A parameter's numbers are counted through in one row, as is what the optimizer keeps for each of them. A rank writes
runs of them, each with the place where it begins; who reads takes what it needs out of all ranks' files. So neither the
number of ranks nor the ZeRO stage has to be the one that wrote.
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

WEIGHT, STEP = "weight", "step"  # kinds of what is kept of a parameter; the others have the optimizer's own names


@dataclass(frozen=True)
class Fragment:
    """A run of numbers that begins `offset` numbers into its tensor."""

    offset: int
    values: Tensor  # [n]


State = Mapping[str, Fragment]  # by "KIND/NAME"


@dataclass(frozen=True)
class Slot:
    """Where a rank holds a run of a parameter: `length` numbers from `start` in `home`, which the optimizer moves and
    keeps `kept` for. In the parameter they begin at `offset`.
    """

    name: str
    offset: int
    home: Tensor
    start: int
    length: int
    kept: MutableMapping[str, Any]

    def run(self, tensor: Tensor) -> Tensor:
        """This slot's numbers of a tensor that lies as `home` does; a view."""
        return tensor.detach().view(-1).narrow(0, self.start, self.length)

    def share(self, rank: int, num_ranks: int) -> "Slot":
        """One rank's share, where all hold the same."""
        first, last = (self.length * number // num_ranks for number in (rank, rank + 1))
        return Slot(self.name, self.offset + first, self.home, self.start + first, last - first, self.kept)

    def fragments(self) -> Iterator[tuple[str, Fragment]]:
        yield f"{WEIGHT}/{self.name}", Fragment(self.offset, self.run(self.home))
        for kind, value in self.kept.items():
            if kind != STEP:
                yield f"{kind}/{self.name}", Fragment(self.offset, self.run(value))
            elif self.offset == 0:
                yield f"{STEP}/{self.name}", Fragment(0, value.detach().view(1))

    def restore(self, saved: "SavedState") -> None:
        note_progress()
        for kind in saved.kinds(self.name):
            key = f"{kind}/{self.name}"
            if kind == WEIGHT:
                saved.fill(key, self.offset, self.run(self.home))
            elif kind == STEP:
                self.kept[STEP] = torch.zeros((), dtype=torch.float32, device=self.home.device)
                saved.fill(key, 0, self.kept[STEP].view(1))
            else:
                if kind not in self.kept:  # an optimizer that has made no step has kept nothing yet
                    self.kept[kind] = torch.zeros_like(self.home, requires_grad=False)
                saved.fill(key, self.offset, self.run(self.kept[kind]))


def whole_slots(module: nn.Module, optimizers: Sequence[Any]) -> list[Slot]:
    """Every trained parameter, where each rank holds all of them."""
    kept = {p: o.state[p] for o in optimizers for group in o.param_groups for p in group["params"]}
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    return [Slot(name, 0, p, 0, p.numel(), kept[p]) for name, p in trained]


def tensor_slots(tensors: Iterable[tuple[str, Tensor]]) -> list[Slot]:
    """Tensors that no optimizer moves, whole on each rank."""
    return [Slot(name, 0, tensor, 0, tensor.numel(), {}) for name, tensor in tensors]


def partitioned_slots(module: nn.Module, zero: Any) -> list[Slot]:
    """This rank's runs under ZeRO-1 and 2: the fp32 weights of a group lie in one row, cut into equal parts."""
    found = []
    for name, parameter in module.named_parameters():
        place = getattr(parameter, "_hp_mapping", None)  # None where none of it lies in this rank's part
        if place is None:
            continue
        home = zero.single_partition_of_fp32_groups[place.param_group_index]
        offset, length = place.lp_fragment_address.start, place.hp_fragment_address.numel
        found.append(Slot(name, offset, home, place.hp_fragment_address.start, length, zero.optimizer.state[home]))
    return found


def sharded_slots(module: nn.Module, zero: Any, rank: int) -> list[Slot]:
    """This rank's runs under ZeRO-3: every parameter is cut into equal parts, the last of them padded."""
    found = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        group, start, padded = zero.grad_position[zero.get_param_id(parameter)]
        home, offset = zero.fp32_partitioned_groups_flat[group], rank * padded
        length = min(padded, vars(parameter)["ds_numel"] - offset)
        if length > 0:
            found.append(Slot(name, offset, home, start, length, zero.optimizer.state[home]))
    return found


@torch.no_grad()
def spread(zero: Any, zero_stage: int) -> None:
    """After ZeRO's fp32 weights have changed: round them into the parameters, as a step does. A collective call."""
    if zero_stage < 3:
        zero.update_lp_params()
        return
    zero._partition_all_parameters()  # some are kept whole between passes, and gathered anew below
    for group in range(len(zero.fp32_partitioned_groups_flat)):
        zero._reassign_or_swap_out_partitioned_parameters(group)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def state_of(slots: Sequence[Slot]) -> State:
    """What these slots hold, not copied."""
    return dict(pair for slot in slots if slot.length for pair in slot.fragments())


def write_state(state: State, path: Path) -> None:
    """One rank's part as a safetensors file; the places where its runs begin are in the header."""
    offsets = {key: fragment.offset for key, fragment in state.items()}
    tensors = {key: fragment.values for key, fragment in state.items()}
    save_file(tensors, path, metadata={"offsets": json.dumps(offsets)})


class SavedState:
    """What all ranks wrote of one model into a folder, read by name and place; no more is read than is asked for.

    Errors: ValueError for a folder without a state, or one that lacks what is asked for.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[str, list[tuple[Any, int, int]]] = defaultdict(list)  # file, first and last number
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
        """What there is of a parameter, its weight always among it."""
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
