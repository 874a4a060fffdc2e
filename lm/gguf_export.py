"""Writes a model directory as a GGUF file, which llama.cpp and Ollama run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

import gguf
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from files.atomic import atomic_file
from lm.gguf_layout import (
    ARCHITECTURES,
    POSITIONS,
    ROPE_FREQUENCIES,
    Architecture,
    metadata_of,
    parts_of,
    rope_divisors,
)
from lm.gguf_vocabulary import vocabulary_metadata
from lm.model import LanguageModel
from lm.progress import note_progress
from lm.source import on_meta
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder, read_config

GGUFType = Literal["f32", "f16", "q8_0"]
_FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32, "f16": gguf.LlamaFileType.MOSTLY_F16, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0
}  # fmt: skip
_TYPES = {
    "f32": gguf.GGMLQuantizationType.F32, "f16": gguf.GGMLQuantizationType.F16, "q8_0": gguf.GGMLQuantizationType.Q8_0
}  # fmt: skip


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
    """Raises: ValueError for a weight that f16 cannot hold."""
    with np.errstate(over="ignore"):  # the next line reports it
        found = gguf.quantize(tensor.contiguous().numpy(), kind)
    if kind == gguf.GGMLQuantizationType.F16 and not np.isfinite(found).all():
        raise ValueError(f"{name} has weights beyond the range of f16; --type f32 holds them")
    return found
