"""The safetensors files of a model directory: written and read tensor by tensor, under Heed's names or the family's."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from files.atomic import remove_unfinished, sync, temporary_path, write_json
from lm.config import ModelConfig
from lm.families.family import Family, Stored
from lm.progress import note_progress
from lm.tokenizer import read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Tensors of checkpoints that are not read: computed tables (GPT-2's causal mask, Llama's rotary frequencies, BERT's
# position numbers), a table that T5 has but does not use, second copies of tied tensors, and heads for another purpose.
_COMPUTED = r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$|position_ids$|final_logits_bias$"
_UNUSED = r"\.EncDecAttention\.relative_attention_bias\.weight$"
_COPIES = r"^lm_head\.weight$|^cls\.predictions\.(decoder\.|bias$)|\.embed_tokens\.weight$"
_TOWERS = r"^model\.visual\.|^mtp\."  # of Qwen3.5, whose further layers predict more than the next token
_OTHER_HEADS = r"^cls\.seq_relationship\.|^(bert\.)?pooler\."
_OF_FURTHER = (
    ".eh_proj.weight"  # of layers that predict more than the next token (DeepSeek-V3, GLM-4.5), left out whole
)
# MXFP4 (OCP Microscaling Formats 1.0, section 5.3): two tensors of bytes for one of numbers.
BLOCKS, SCALES = "_blocks", "_scales"
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1, by its lowest three bits; the fourth is the sign
_BODY = re.compile(r"^(transformer|bert)\.")
SCORE_BIAS = "bias"  # the only buffer of a model that is not among a checkpoint's tensors, but in config.json
_LEFT_OUT = re.compile("|".join((_COMPUTED, _UNUSED, _COPIES, _TOWERS, _OTHER_HEADS)))
# BERT's published checkpoints name the norms' parameters as TensorFlow did.
_OLD_NAMES = {"gamma": "weight", "beta": "bias"}


def write_tensors(folder: Path, tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> None:
    """Write tensors as they come. Memory holds those of one file, which has at most `max_bytes` or a single tensor.

    Files are as `transformers` writes them: one model.safetensors or, for more, numbered files and an index. Until all
    are written and synced, the folder's earlier weights stay and the new files have temporary names.
    """
    remove_unfinished(folder)
    try:
        written, total_bytes = _write_files(folder, tensors, max_bytes)
    except BaseException:
        remove_unfinished(folder)  # on a full disk, a retry needs its space
        raise
    _give_names(folder, written, total_bytes)


def _write_files(folder: Path, tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> tuple[list[list[str]], int]:
    """Returns the names of the tensors in each file, and the total number of bytes."""
    written: list[list[str]] = []
    total_bytes = num_bytes = 0
    part: dict[str, Tensor] = {}

    def write(content: dict[str, Tensor]) -> None:
        path = _unfinished(folder, len(written))
        save_file(content, path, metadata={"format": "pt"})
        sync(path)
        note_progress()
        written.append([*content])

    for name, tensor in tensors:
        total_bytes += tensor.nbytes
        if tensor.nbytes > max_bytes:  # a file of its own
            write({name: tensor})
            continue
        if num_bytes + tensor.nbytes > max_bytes:
            write(part)
            part, num_bytes = {}, 0
        part[name] = tensor
        num_bytes += tensor.nbytes
        del tensor  # before the next one is made
    if part:
        write(part)
    return written, total_bytes


def _give_names(folder: Path, written: Sequence[Sequence[str]], total_bytes: int) -> None:
    """Rename the unfinished files, which become the folder's weights."""
    for stale in folder.glob("model*.safetensors*"):  # a stale index would hide a new single file
        stale.unlink()
    if len(written) == 1:
        _unfinished(folder, 0).rename(folder / WEIGHTS)
        return
    names = [f"model-{number + 1:05d}-of-{len(written):05d}.safetensors" for number in range(len(written))]
    for number, name in enumerate(names):
        _unfinished(folder, number).rename(folder / name)
    places = {tensor: name for name, tensors in zip(names, written, strict=True) for tensor in tensors}
    write_json(folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": places})


def _unfinished(folder: Path, number: int) -> Path:
    return temporary_path(folder / f"{number}.safetensors")


class Checkpoint:
    """The safetensors files of a directory, memory-mapped. Names and shapes are read at once, values on request.

    Raises: ValueError if there are none, or if the index names a missing file.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / INDEX if (folder / INDEX).is_file() else folder / WEIGHTS
        if not self.path.is_file():
            raise ValueError(
                f"{folder / WEIGHTS}: no such file; safetensors weights were expected (pickled weights are not read)"
            )
        self._files = [self.path]
        if self.path.name == INDEX:
            places = read_json(self.path).get("weight_map", {})
            self._files = sorted({folder / name for name in places.values()})
            for file in self._files:
                if not file.is_file():
                    raise ValueError(f"{file}: no such file, though {self.path} names it")

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        opened = [self._stack.enter_context(open_tensors(path)) for path in self._files]
        self._holder = {_modern(name): (file, name) for file in opened for name in file.keys()}  # noqa: SIM118
        stored = set(self._holder)
        of_blocks, of_scales = ({n.removesuffix(end) for n in stored if n.endswith(end)} for end in (BLOCKS, SCALES))
        packed = of_blocks & of_scales  # two tensors of MXFP4 count as the one that they hold
        self.names = (stored - {name + end for name in packed for end in (BLOCKS, SCALES)}) | packed
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def parts_of(self, name: str) -> tuple[str, ...]:
        """Returns the names under which a tensor is stored: its own, or in MXFP4 those of its two parts."""
        return (name,) if name in self._holder else (name + BLOCKS, name + SCALES)

    def shape(self, name: str) -> list[int]:
        """Returns a tensor's shape. One of MXFP4 has its matrices as (in, out), although its parts have (out, in)."""
        shape, *of_scales = ([*self._slice(part).get_shape()] for part in self.parts_of(name))
        if not of_scales or [shape[:-1]] != of_scales:
            return shape
        experts, rows, groups, num_bytes = shape
        return [experts, groups * num_bytes * 2, rows]

    def _slice(self, name: str) -> Any:
        file, stored_name = self._holder[name]
        return file.get_slice(stored_name)

    def tensor(self, name: str) -> Tensor:
        file, stored_name = self._holder[name]
        tensor: Tensor = file.get_tensor(stored_name)
        return tensor

    def part(self, name: str, first: int, end: int, dim: int) -> Tensor:
        """Reads only indices `first` to `end` (exclusive) of a tensor, along dimension 0 or 1."""
        stored = self._slice(name)
        part: Tensor = stored[:, first:end] if dim else stored[first:end]
        return part


def from_mxfp4(blocks_FGb: Tensor, scales_FG: Tensor) -> Tensor:
    """Returns the fp32 numbers [F, D] of a matrix in MXFP4. A byte has two numbers of 4 bits, the lower bits first; the
    numbers of a group share a scale of 2^(byte - 127).
    """
    values, bytes_256 = torch.tensor([*_MAGNITUDES, *(-number for number in _MAGNITUDES)]), torch.arange(256)
    pairs = torch.stack([values[bytes_256 & 15], values[bytes_256 >> 4]], dim=-1)
    numbers_FGb = F.embedding(blocks_FGb.int(), pairs).flatten(-2)
    return torch.ldexp(numbers_FGb, scales_FG.int()[..., None] - 127).flatten(1)


def open_tensors(path: Path) -> Any:
    """Opens a safetensors file. Raises: ValueError for a damaged one, naming it, which the library's error does not."""
    try:
        return safe_open(str(path), framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path}: incomplete or damaged: {error}; write or download it again") from None


def _modern(name: str) -> str:
    module, _, kind = name.rpartition(".")
    return f"{module}.{_OLD_NAMES[kind]}" if kind in _OLD_NAMES and module else name


class Reader:
    """A checkpoint's tensors under Heed's names, read one at a time.

    The published GPT-2 was saved without its head, and so without the prefix `transformer.`; a BERT without a head
    lacks `bert.` in the same way.
    """

    def __init__(self, checkpoint: Checkpoint, family: Family, model: nn.Module) -> None:
        config = model.config
        assert isinstance(config, ModelConfig)
        held = [*model.named_parameters(), *model.named_buffers()]  # tied tensors once
        shapes = {ours: list(tensor.shape) for ours, tensor in held if ours != SCORE_BIAS}
        self._checkpoint, self._family, self._config = checkpoint, family, config
        self._has_prefix = any(self._holds(family.stored(config, ours)) for ours in shapes)
        _check_fit(checkpoint, {ours: self._place(ours) for ours in shapes}, shapes)

    def holds(self, ours: str) -> bool:
        return self._holds(self._place(ours))

    def read(self, ours: str, shape: Sequence[int], rows: range | None = None) -> Tensor:
        """Reads one tensor of this shape, or some of its rows, in fp32, assembled from its parts."""
        note_progress()
        rows, place, start = range(shape[0]) if rows is None else rows, self._place(ours), 0
        if place.experts:
            return self._read_stacked(place, shape, rows)
        if place.groups:
            (name,) = place.parts
            return place.by_kind(self._checkpoint.tensor(name).float())[rows.start : rows.stop]
        rows_read = torch.empty(len(rows), *shape[1:])
        for name, num_rows in place.parts.items():
            end = start + (shape[0] if num_rows is None else num_rows)
            low, high = max(start, rows.start), min(end, rows.stop)
            if low < high:
                rows_read[low - rows.start : high - rows.start] = self._rows(
                    name, place, low - start, high - start, end - start
                )
            start = end
        return place.read(rows_read)

    def _rows(self, name: str, place: Stored, low: int, high: int, num_rows: int) -> Tensor:
        """Reads rows `low` to `high` of a part that has `num_rows`."""
        before = place.rows_before
        is_all = (low, high) == (0, num_rows)
        if is_all and not before:
            part = self._checkpoint.tensor(name)
        else:
            part = self._checkpoint.part(name, before + low, before + high, int(place.transposed))
        return part.T if place.transposed else part

    def _read_stacked(self, place: Stored, shape: Sequence[int], rows: range) -> Tensor:
        """Reads rows of a tensor that stacks experts, one expert at a time."""
        num_rows, (name,) = shape[0] // place.experts, place.parts
        found, end = torch.empty(len(rows), *shape[1:]), 0
        for number in range(rows.start // num_rows, -(-rows.stop // num_rows)):
            parts = [self._checkpoint.part(part, number, number + 1, 0)[0] for part in self._checkpoint.parts_of(name)]
            expert = parts[0].T if place.transposed and len(parts) == 1 else parts[0]
            expert = place.unstack(from_mxfp4(*parts) if len(parts) == 2 else expert)
            own = expert[max(rows.start - number * num_rows, 0) : rows.stop - number * num_rows]
            found[end : end + len(own)], end = own, end + len(own)
        return found

    def _place(self, ours: str) -> Stored:
        place = self._family.stored(self._config, ours)
        if place.otherwise and not self._holds(place):
            place = place.otherwise
        if self._has_prefix:
            return place
        return replace(place, parts={_BODY.sub("", name): rows for name, rows in place.parts.items()})

    def _holds(self, place: Stored) -> bool:
        return place.parts.keys() <= self._checkpoint.names


@contextmanager
def open_checkpoint(folder: Path, family: Family, model: nn.Module) -> Iterator[Reader]:
    """Opens the weights of a directory, and checks their names and shapes against `model`. Reads only its shapes.

    Raises: ValueError naming the file, and the names and shapes that do not fit.
    """
    with Checkpoint(folder) as checkpoint:
        yield Reader(checkpoint, family, model)


def _check_fit(checkpoint: Checkpoint, places: Mapping[str, Stored], shapes: Mapping[str, list[int]]) -> None:
    expected = {
        name: part_shape(shapes[ours], rows, place)
        for ours, place in places.items()
        for name, rows in place.parts.items()
    }
    wrong = [f"{name}: expected {expected[name]}, missing" for name in sorted(set(expected) - checkpoint.names)]
    further = tuple(name.removesuffix(_OF_FURTHER) + "." for name in checkpoint.names if name.endswith(_OF_FURTHER))
    for name in sorted(checkpoint.names - set(expected)):
        if name.startswith(further):
            continue
        if not _LEFT_OUT.search(name):
            wrong.append(f"{name}: found, not expected")
        elif name.endswith("final_logits_bias") and checkpoint.tensor(name).any():
            wrong.append(f"{name}: expected zeros, found others")
    for name in sorted(checkpoint.names & set(expected)):
        if checkpoint.shape(name) != expected[name]:
            wrong.append(f"{name}: expected {expected[name]}, found {checkpoint.shape(name)}")
    if wrong:
        raise ValueError(f"{checkpoint.path}: {len(wrong)} tensors do not fit the config: " + "; ".join(wrong[:8]))


def part_shape(whole: Sequence[int], rows: int | None, place: Stored) -> list[int]:
    """Returns the shape of a part of `rows` rows in a checkpoint; `whole` is the shape of Heed's tensor."""
    shape = [(whole[0] if rows is None else rows) + place.rows_before, *whole[1:]]
    if place.experts:
        shape[0] //= place.experts
    shape = shape[::-1] if place.transposed else shape
    return [place.experts, *shape] if place.experts else shape
