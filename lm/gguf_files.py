"""Converts GGUF files, which llama.cpp and Ollama run, to model directories, and model directories to GGUF files.

A file is converted once per machine, and cached. Quantised weights are written as fp32, which holds them exactly; f16
and bf16 weights stay as they are.
"""

import fcntl
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from files.atomic import atomic_file, atomic_folder
from files.hashes import unchanged_hash
from lm.config import ModelConfig
from lm.families import FAMILIES
from lm.families.family import Family
from lm.gguf_layout import (
    ARCHITECTURES,
    POSITIONS,
    ROPE_FREQUENCIES,
    Architecture,
    architecture_of,
    config_fields,
    metadata_of,
    parts_of,
    rope_divisors,
)
from lm.gguf_vocabulary import tokenizer_files, vocabulary_metadata
from lm.hub import gguf_cache
from lm.model import LanguageModel
from lm.progress import note_progress
from lm.source import on_meta
from lm.tensor_files import write_tensors
from lm.tokenizer import Tokenizer
from lm.weights import CONFIG, ModelFolder, config_from_hf, read_config, stored_tensors

_LAYOUT = "2"  # version of the cache's contents; change it whenever these change
_FILE_BYTES = 500_000_000  # of weights held in memory at once
_EXACT = {gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16}

GGUFType = Literal["f32", "f16", "q8_0"]
_FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32, "f16": gguf.LlamaFileType.MOSTLY_F16, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0
}  # fmt: skip
_TYPES = {
    "f32": gguf.GGMLQuantizationType.F32, "f16": gguf.GGMLQuantizationType.F16, "q8_0": gguf.GGMLQuantizationType.Q8_0
}  # fmt: skip


def cached_model(path: Path, *, has_weights: bool = True) -> Path:
    """Returns the model directory of a GGUF file, and writes it first if needed: $XDG_CACHE_HOME/heed/gguf/SHA-256.

    Without `has_weights`, the directory may have only the shape and the vocabulary, which take little space.
    Raises: ValueError naming the file and what in it is damaged, missing or not supported.
    """
    cache = gguf_cache()
    folder = cache / f"{unchanged_hash(path)}-{_LAYOUT}"
    if folder.is_dir():
        return folder
    if not has_weights:
        folder = folder.with_name(f"{folder.name}-no-weights")
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # waits while another process writes it
        if not folder.is_dir():
            with atomic_folder(folder) as temporary:
                _write(path, temporary, has_weights)
    return folder


def _write(path: Path, folder: Path, has_weights: bool) -> None:
    try:
        file = GGUFFile(path)
        model = on_meta(lambda: LanguageModel(file.config))
        files = tokenizer_files(file.metadata)
        if has_weights:
            write_tensors(folder, stored_tensors(model, file.tensors(model)), _FILE_BYTES)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    fields = {"architectures": [file.family.classes["language"]], **file.fields, "dtype": "float32"}
    (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


class GGUFFile:
    """A language model in a GGUF file, memory-mapped. Raises: ValueError for a file that is damaged or incomplete."""

    def __init__(self, path: Path) -> None:
        try:
            reader = gguf.GGUFReader(path)
            self._fields, found = reader.fields, reader.tensors
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            raise ValueError(f"incomplete, damaged or not a GGUF file ({error}); download it again") from None
        self._tensors = {tensor.name: tensor for tensor in found}
        if self.metadata.get("split.count", 1) > 1:
            raise ValueError("one of several parts; merge them with llama.cpp's `llama-gguf-split --merge`")

    @cached_property
    def metadata(self) -> Mapping[str, Any]:
        return {name: field.contents() for name, field in self._fields.items()}

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The fields of config.json."""
        shapes = {name: [int(size) for size in reversed(tensor.shape)] for name, tensor in self._tensors.items()}
        divisors = self._tensor(ROPE_FREQUENCIES).float() if ROPE_FREQUENCIES in self._tensors else None
        return config_fields(self.metadata, shapes, divisors)

    @property
    def family(self) -> Family:
        return next(family for family in FAMILIES if family.model_type == self.fields["model_type"])

    @cached_property
    def config(self) -> ModelConfig:
        return config_from_hf(self.fields, "metadata")

    def tensors(self, model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
        """Yields the model's tensors under Heed's names, dequantised, one at a time.

        Raises: ValueError naming tensors that are missing, unexpected, of the wrong shape or of unknown quantisation.
        """
        architecture = architecture_of(self.metadata["general.architecture"])
        shapes = {ours: list(parameter.shape) for ours, parameter in model.named_parameters()}
        places = {
            ours: parts_of(architecture, self.family, self.config, ours, shape[0]) for ours, shape in shapes.items()
        }
        expected = {part.name: [part.num_rows, *shapes[ours][1:]] for ours, parts in places.items() for part in parts}
        self._check(expected)
        for ours, parts in places.items():
            yield ours, torch.cat([part.from_file(self._tensor(part.name)) for part in parts])

    def _check(self, expected: Mapping[str, list[int]]) -> None:
        shapes = {name: [int(size) for size in reversed(tensor.shape)] for name, tensor in self._tensors.items()}
        wrong = [f"{name}: expected {shape}, missing" for name, shape in expected.items() if name not in shapes]
        for name, shape in shapes.items():
            if name not in expected and name != ROPE_FREQUENCIES:
                wrong.append(f"{name}: found, not expected")
            elif name in expected and shape != expected[name]:
                wrong.append(f"{name}: expected {expected[name]}, found {shape}")
        if wrong:
            raise ValueError(f"{len(wrong)} tensors do not fit the metadata: {'; '.join(wrong[:8])}")

    def _tensor(self, name: str) -> Tensor:
        """Reads a tensor. Raises: ValueError for a quantisation that the library cannot undo."""
        note_progress()
        stored = self._tensors[name]
        if stored.tensor_type in _EXACT:
            return torch.from_numpy(np.array(stored.data))
        if stored.tensor_type == gguf.GGMLQuantizationType.BF16:
            words = np.array(stored.data).view(np.int16)
            return torch.from_numpy(words).view(torch.bfloat16)
        try:
            return torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type))
        except NotImplementedError:
            kind = stored.tensor_type.name
            raise ValueError(f"{name} is quantised as {kind}, which Heed cannot read; F16 or Q8_0 are safe") from None


def export_gguf(folder: Path, path: Path, kind: GGUFType) -> int:
    """Write the language model of a directory as a GGUF file, one tensor in memory at a time.

    Matrices are written as `kind`, vectors as f32, as llama.cpp needs them.
    Returns the context of the written model, in tokens; with sliding windows, this is the shortest window.
    Raises: ValueError naming what llama.cpp does not compute as Heed does, and as `ModelFolder` and `Tokenizer.load`.
    """
    assert kind in get_args(GGUFType), kind
    config, family, _ = read_config(folder, "language")
    architecture = next((one for one in ARCHITECTURES if family.model_type in one.families), None)
    if architecture is None:
        known = ", ".join(name for one in ARCHITECTURES for name in one.families)
        raise ValueError(f"{folder}: model_type is {family.model_type!r}; one of {known} was expected")
    try:
        shape = metadata_of(architecture, config)
        vocabulary = vocabulary_metadata(Tokenizer.load(folder), config.vocab_size)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    writer = gguf.GGUFWriter(None, architecture.name)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(path.stem)
    writer.add_file_type(_FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in {**shape, **vocabulary}.items():
        _add(writer, key, value)
    sizes = {name: (shape, _kind_of(name, shape, kind)) for name, shape in _shapes(folder, architecture)}
    for name, (size, stored_as) in sizes.items():
        num_bytes = int(np.prod(gguf.quant_shape_to_byte_shape(size, stored_as)))
        writer.add_tensor_info(name, size, np.dtype(np.float32), num_bytes, raw_dtype=stored_as)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary:
        writer.write_header_to_file(temporary)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in _tensors(folder, architecture):
            writer.write_tensor_data(_stored(name, tensor, sizes[name][1]))
        writer.close()
    return int(shape[f"{architecture.name}.context_length"])


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    """Add metadata in the type that llama.cpp expects: whole numbers unsigned, but the list of token types signed."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        assert isinstance(value, list), (key, value)
        writer.add_array(key, value)


def _shapes(folder: Path, architecture: Architecture) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the name and shape of each tensor of the file."""
    config, family, _ = read_config(folder, "language")
    for ours, parameter in on_meta(ModelFolder(folder, LanguageModel).build).named_parameters():
        for part in parts_of(architecture, family, config, ours, len(parameter)):
            yield part.name, (part.num_rows, *parameter.shape[1:])
    divisors = rope_divisors(config)
    if divisors is not None:
        yield ROPE_FREQUENCIES, tuple(divisors.shape)


def _tensors(folder: Path, architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors themselves, in the order of `_shapes`."""
    config, family, _ = read_config(folder, "language")
    for ours, tensor in ModelFolder(folder, LanguageModel).tensors():
        note_progress()
        parts = parts_of(architecture, family, config, ours, len(tensor))
        for part, rows in zip(parts, tensor.split([part.num_rows for part in parts]), strict=True):
            yield part.name, part.to_file(rows)
    divisors = rope_divisors(config)
    if divisors is not None:
        yield ROPE_FREQUENCIES, divisors


def _kind_of(name: str, shape: tuple[int, ...], kind: GGUFType) -> gguf.GGMLQuantizationType:
    if len(shape) == 1 or name == POSITIONS:
        return gguf.GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[_TYPES[kind]]
    return _TYPES[kind] if shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16  # rows are quantised by blocks


def _stored(name: str, tensor: Tensor, kind: gguf.GGMLQuantizationType) -> NDArray[np.generic]:
    """Converts a tensor to `kind`. Raises: ValueError for a weight that f16 cannot hold."""
    with np.errstate(over="ignore"):  # the next line reports it
        stored = gguf.quantize(tensor.contiguous().numpy(), kind)
    if kind == gguf.GGMLQuantizationType.F16 and not np.isfinite(stored).all():
        raise ValueError(f"{name} has weights beyond the range of f16; --type f32 holds them")
    return stored
