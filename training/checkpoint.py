"""Checkpoints: folders that are complete or absent, and the model state in them, which any number of ranks can read.

A folder is written under a temporary name, hashed, synced and read back, then renamed. Older ones are removed only
after that.

State is stored by parameter name and by position in the flattened parameter, for weights and optimizer states alike.
Each rank writes ranges with their offsets. A reader loads only the ranges it needs, from whichever file holds them. So
a checkpoint does not depend on the number of ranks or the ZeRO stage that wrote it.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from files.atomic import PREFIX, commit_folder, remove_folder, remove_unfinished, sync
from files.hashes import file_hash, file_names
from lm.progress import note_progress

MANIFEST = "manifest.json"
NUM_SHOWN = 5  # damaged files named in a message
WEIGHT, STEP = "weight", "step"  # kinds of saved tensors; the others are named by the optimizer

# Returns the names of the files in a checkpoint folder whose SHA-256 differs from the given one.
Check = Callable[[Path, Mapping[str, str]], Sequence[str]]


def writing_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"{PREFIX}{step:06d}"


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:06d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def begin_checkpoint(checkpoints: Path, step: int) -> Path:
    """Create an empty folder to write step `step` into.

    Only `checkpoints` itself is created: a run folder that has disappeared must not be created in its place.
    """
    checkpoints.mkdir(exist_ok=True)
    remove_unfinished(checkpoints)
    folder = writing_folder(checkpoints, step)
    folder.mkdir()
    return folder


def commit_checkpoint(writing: Path, step: int, hashes: Mapping[str, str], keep: int) -> Path:
    """Turn a fully written folder into `step-NNNNNN`, then remove all but the newest `keep` checkpoints.

    `hashes` are the SHA-256 of the files, which the caller has already read back. It is safe to call this again after
    it failed.
    """
    checkpoints = writing.parent
    final = step_folder(checkpoints, step)
    if not (final / MANIFEST).is_file() or writing.is_dir():
        manifest = {"step": step, "sha256": dict(sorted(hashes.items()))}
        (writing / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        commit_folder(writing, final)
    else:  # an earlier call failed after the rename
        sync(checkpoints)
    written = read_manifest(final)
    assert written.sha256 == hashes, f"checkpoint {final} is damaged right after it was written: {written.damage}"
    # Checkpoints of later steps are damaged ones that this run skipped.
    newest_first = [folder for folder in step_folders(checkpoints) if step_of(folder) <= step]
    later = [folder for folder in step_folders(checkpoints) if step_of(folder) > step]
    for old in (*later, *newest_first[keep:]):
        remove_folder(old)
    return final


@dataclass(frozen=True)
class Manifest:
    """The files that a checkpoint folder should hold, by relative path.

    `damage` says what is missing or added; "" if nothing is.
    """

    folder: Path
    sha256: Mapping[str, str]
    damage: str


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest, and check that the folder holds the files it names. Their contents are not read."""
    try:
        expected = dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"])
        present = set(_names(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Manifest(folder, {}, f"no readable manifest ({error})")
    return Manifest(folder, expected, _describe(expected.keys() ^ present))


def changed_files(folder: Path, sha256: Mapping[str, str]) -> list[str]:
    """Names of the files whose SHA-256 differs from the given one, or that cannot be read."""
    return [name for name, expected in sha256.items() if _hash_or_cause(folder / name) != expected]


def _hash_or_cause(path: Path) -> str:
    note_progress()
    try:
        return file_hash(path)
    except OSError as error:
        return str(error)


@dataclass(frozen=True)
class Resumption:
    """Where a stage resumes: step and name of the newest valid checkpoint; 0 and "" if there is none.

    `damaged` maps the names of newer checkpoints, which are skipped, to what is wrong with them.
    """

    step: int
    name: str
    damaged: Mapping[str, str]

    def notices(self, stage: str, num_steps: int, unit: str = "step") -> list[str]:
        """What the user should know, one line each."""
        passed = [f"{stage}: checkpoint {name} is damaged, so it is skipped: {d}" for name, d in self.damaged.items()]
        if not self.name:
            return [f"{stage}: starts from {unit} 0 of {num_steps} (no checkpoint yet)"]
        return [*passed, f"{stage}: resumes from {unit} {self.step} of {num_steps} (checkpoints/{self.name})"]


def find_resumption(checkpoints: Path, stage: str, check: Check = changed_files) -> Resumption:
    """Find the newest checkpoint that verifies. `check` reads the files, on several machines if there are several.

    Raises:
        ValueError: there are checkpoints but none verifies, or the folder cannot be read. Only the user can decide to
            pay for training again from step 0.
    """
    return choose_sound(checkpoints, stage, [read_manifest(folder) for folder in step_folders(checkpoints)], check)


def choose_sound(checkpoints: Path, stage: str, newest_first: Sequence[Manifest], check: Check) -> Resumption:
    """Like `find_resumption`, for manifests that were already read."""
    damaged: dict[str, str] = {}
    for manifest in newest_first:
        damage = manifest.damage or _describe(check(manifest.folder, manifest.sha256))
        if not damage:
            return Resumption(step_of(manifest.folder), manifest.folder.name, damaged)
        damaged[manifest.folder.name] = damage
    if damaged:
        causes = "; ".join(f"{name}: {damage}" for name, damage in damaged.items())
        raise ValueError(
            f"{checkpoints}: every checkpoint of {stage} is damaged ({causes}); restore one, or run again with"
            f" --from {stage}, which starts the stage from step 0"
        )
    return Resumption(0, "", {})


def share_of_files(sha256: Mapping[str, str], rank: int, num_ranks: int) -> dict[str, str]:
    """The files that one rank verifies; together, the ranks verify all."""
    return dict(sorted(sha256.items())[rank::num_ranks])


def step_folders(checkpoints: Path) -> list[Path]:
    """All checkpoints, newest first; [] if the folder does not exist.

    Raises:
        ValueError: the folder exists but cannot be read.
    """
    try:
        names = os.listdir(checkpoints)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"{checkpoints}: the folder of checkpoints cannot be read: {error.strerror}") from None
    return sorted((checkpoints / name for name in names if re.fullmatch(r"step-\d+", name)), key=step_of, reverse=True)


def _names(folder: Path) -> list[str]:
    """Relative paths of the files below `folder`, without the manifest."""
    return [name for name in file_names(folder) if Path(name).name != MANIFEST]


def _describe(names: Sequence[str] | set[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
    return f"files changed, missing or added: {', '.join(sorted(names)[:NUM_SHOWN])}{more}"


@dataclass(frozen=True)
class ShardRange:
    """Consecutive numbers of a flattened tensor, starting at position `offset`."""

    offset: int
    values: Tensor  # [n]


State = Mapping[str, ShardRange]  # by "KIND/NAME"


@dataclass(frozen=True)
class ParamShard:
    """The part of a parameter that one rank keeps, starting at position `offset` of the flattened parameter.

    It is the `length` numbers of `storage` that begin at `start`. The optimizer updates `storage` and keeps
    `optimizer_state` for all of it.
    """

    name: str
    offset: int
    storage: Tensor
    start: int
    length: int
    optimizer_state: MutableMapping[str, Any]

    def view(self, tensor: Tensor) -> Tensor:
        """Return this shard's numbers in a tensor laid out like `storage`, as a view [length]."""
        return tensor.detach().view(-1).narrow(0, self.start, self.length)

    def share(self, rank: int, num_ranks: int) -> "ParamShard":
        """Return one rank's share of a shard that is the same on all ranks."""
        first, last = (self.length * number // num_ranks for number in (rank, rank + 1))
        return ParamShard(
            self.name, self.offset + first, self.storage, self.start + first, last - first, self.optimizer_state
        )

    def ranges(self) -> Iterator[tuple[str, ShardRange]]:
        """Return the weights and the optimizer's state by "KIND/NAME", without copying."""
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
                if kind not in self.optimizer_state:  # an optimizer has no state before its first step
                    self.optimizer_state[kind] = torch.zeros_like(self.storage, requires_grad=False)
                saved.fill(key, self.offset, self.view(self.optimizer_state[kind]))


def whole_params(module: nn.Module, optimizers: Sequence[Any]) -> list[ParamShard]:
    """Return a shard for each trained parameter, for ranks that hold whole parameters."""
    states = {p: o.state[p] for o in optimizers for group in o.param_groups for p in group["params"]}
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    return [ParamShard(name, 0, p, 0, p.numel(), states[p]) for name, p in trained]


def whole_tensors(tensors: Iterable[tuple[str, Tensor]]) -> list[ParamShard]:
    """Return shards for tensors that no optimizer updates, whole on each rank."""
    return [ParamShard(name, 0, tensor, 0, tensor.numel(), {}) for name, tensor in tensors]


def state_of(shards: Sequence[ParamShard]) -> State:
    """Return the state that these shards hold, without copying."""
    return dict(pair for shard in shards if shard.length for pair in shard.ranges())


def write_state(state: State, path: Path) -> None:
    """Write one rank's part as a safetensors file, with the offsets of its ranges in the header."""
    offsets = {key: piece.offset for key, piece in state.items()}
    tensors = {key: piece.values for key, piece in state.items()}
    save_file(tensors, path, metadata={"offsets": json.dumps(offsets)})


class SavedState:
    """The state of one model, as all ranks wrote it into a folder. Reads only the requested names and positions.

    Raises:
        ValueError: the folder holds no state, or lacks a part that is requested.
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
            raise ValueError(f"{folder}: no model state found; a checkpoint of this version of Heed was expected")

    def kinds(self, name: str) -> Sequence[str]:
        """Return the kinds of tensors that were saved for a parameter; "weight" is always one of them."""
        if WEIGHT not in self._kinds.get(name, ()):
            raise ValueError(f"{self.folder}: has no weights of {name}, only those of {sorted(self._kinds)}")
        return self._kinds[name]

    def fill(self, key: str, offset: int, target: Tensor) -> None:
        """Read n numbers, starting at `offset`, into `target` [n]."""
        end, num_read = offset + len(target), 0
        for file, first, last in self._places[key]:
            low, high = max(first, offset), min(last, end)
            if low < high:
                target[low - offset : high - offset] = file.get_slice(key)[low - first : high - first]
                num_read += high - low
        if num_read != len(target):
            raise ValueError(
                f"{self.folder}: has {num_read} numbers of {key} from offset {offset}; {len(target)} were expected"
            )
