"""Converts GGUF files, which llama.cpp and Ollama run, to model directories, and model directories to GGUF files.

A file is converted once per machine, and cached. Quantised weights are written as fp32, which holds them exactly; f16
and bf16 weights stay as they are.

The second half of the file is the layout: the metadata of a decoder's shape, and the name and form of each tensor.
GGUF's matrices are [out, in], like Heed's, but Q and K in Llama's architecture are permuted: llama.cpp rotates pairs of
neighbouring dimensions, whereas published checkpoints pair each dimension of the first half with one of the second.
"""

import fcntl
import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
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
from lm.config import ModelConfig, RopeScaling
from lm.families import FAMILIES, Family, expect
from lm.families.family import Fields
from lm.gguf_vocabulary import tokenizer_files, vocabulary_metadata
from lm.hub import gguf_cache
from lm.model import LanguageModel
from lm.positions import llama3_scaling, rope_divisors
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

Metadata = Mapping[str, Any]
ROPE_FREQUENCIES = "rope_freqs.weight"  # llama.cpp divides the rotary frequencies by it: Llama 3's scaling
_READ_DIVISORS = ("llama", "arcee")  # the architectures in which it does
HEAD, EMBEDDING, POSITIONS = "output.weight", "token_embd.weight", "position_embd.weight"
# Metadata that changes what a model computes, with the only value that Heed supports; None: the key must be absent.
_MUST_BE = {
    "expert_shared_count": 0, "expert_shared_feed_forward_length": None, "expert_weights_scale": 1.0,
    "expert_gating_func": 1, "attention.scale": None, "attention.causal": True, "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0, "logit_scale": None, "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "use_parallel_residual": None, "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": None,
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp and the families of Heed that it covers. `permutes`: Q and K are permuted.

    `mixture`: the family of its files with experts; `divides_by_sum`: what it does with the weights of a token's.
    """

    name: str
    gguf_name: gguf.MODEL_ARCH
    families: tuple[str, ...]
    permutes: bool = False
    mixture: str = ""
    divides_by_sum: bool = True


ARCHITECTURES = (
    Architecture("llama", gguf.MODEL_ARCH.LLAMA, ("llama", "mistral", "mixtral"), permutes=True, mixture="mixtral"),
    Architecture("arcee", gguf.MODEL_ARCH.ARCEE, ("arcee",), permutes=True),
    Architecture("qwen2", gguf.MODEL_ARCH.QWEN2, ("qwen2",)),
    Architecture("qwen3", gguf.MODEL_ARCH.QWEN3, ("qwen3",)),
    Architecture("qwen3moe", gguf.MODEL_ARCH.QWEN3MOE, ("qwen3_moe",), mixture="qwen3_moe"),
    Architecture("olmoe", gguf.MODEL_ARCH.OLMOE, ("olmoe",), mixture="olmoe", divides_by_sum=False),
    Architecture("gpt2", gguf.MODEL_ARCH.GPT2, ("gpt2",)),
)


@dataclass(frozen=True)
class Part:
    """A tensor of the file: `num_rows` rows of one of Heed's tensors, consecutive within each of its `num_blocks` equal
    blocks. Blocks are experts, whose matrices the file keeps apart: [E, out, in].

    `num_heads` > 0: its rows are permuted within each head.
    """

    name: str
    num_rows: int
    num_heads: int = 0
    num_blocks: int = 1

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Returns its shape, given that of Heed's tensor."""
        blocks = () if self.num_blocks == 1 else (self.num_blocks,)
        return (*blocks, self.num_rows // self.num_blocks, *whole[1:])

    def from_file(self, part: Tensor) -> Tensor:
        return part if not self.num_heads else _swapped(part, self.num_heads, (-1, 2))

    def to_file(self, part: Tensor) -> Tensor:
        return part if not self.num_heads else _swapped(part, self.num_heads, (2, -1))


def _cut(tensor: Tensor, parts: Sequence[Part]) -> Iterator[Tensor]:
    """Yields the parts of one of Heed's tensors, as the file has them."""
    blocks = tensor.unflatten(0, (parts[0].num_blocks, -1))
    sizes = [part.num_rows // part.num_blocks for part in parts]
    for part, rows in zip(parts, blocks.split(sizes, dim=1), strict=True):
        yield part.to_file(rows.reshape(part.shape(tensor.shape)))


def _joined(stored: Sequence[Tensor], parts: Sequence[Part]) -> Tensor:
    """Returns one of Heed's tensors, given its parts in the file."""
    tensors = [part.from_file(tensor) for part, tensor in zip(parts, stored, strict=True)]
    return torch.cat(tensors) if parts[0].num_blocks == 1 else torch.cat(tensors, dim=1).flatten(0, 1)


def _swapped(part: Tensor, num_heads: int, halves: tuple[int, int]) -> Tensor:
    """Arranges the rows of each head as a `halves` table and returns them in the order of its transpose."""
    return part.reshape(num_heads, *halves, *part.shape[1:]).transpose(1, 2).reshape(part.shape).contiguous()


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
        expected = {part.name: [*part.shape(shapes[ours])] for ours, parts in places.items() for part in parts}
        self._check(expected)
        for ours, parts in places.items():
            yield ours, _joined([self._tensor(part.name) for part in parts], parts)

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
            return torch.from_numpy(np.array(stored.data).view(np.int16)).view(torch.bfloat16)
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
            yield part.name, part.shape(parameter.shape)
    if _has_divisors(config):
        yield ROPE_FREQUENCIES, (config.head_dim // 2,)


def _tensors(folder: Path, architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors themselves, in the order of `_shapes`."""
    config, family, _ = read_config(folder, "language")
    for ours, tensor in ModelFolder(folder, LanguageModel).tensors():
        note_progress()
        parts = parts_of(architecture, family, config, ours, len(tensor))
        yield from zip((part.name for part in parts), _cut(tensor, parts), strict=True)
    if config.rope_scaling is not None and _has_divisors(config):
        yield ROPE_FREQUENCIES, rope_divisors(config.head_dim, config.rope_theta, config.rope_scaling)


def _has_divisors(config: ModelConfig) -> bool:
    """Whether the file has the tensor ROPE_FREQUENCIES: for Llama 3's scaling."""
    return config.rope_scaling is not None and config.rope_scaling.rope_type == "llama3"


def _kind_of(name: str, shape: tuple[int, ...], kind: GGUFType) -> gguf.GGMLQuantizationType:
    if len(shape) == 1 or name == POSITIONS or ".ffn_gate_inp." in name:  # a router, which llama.cpp never quantises
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


def architecture_of(name: str) -> Architecture:
    """Returns the architecture of this name. Raises: ValueError if no family of Heed covers it."""
    architecture = next((one for one in ARCHITECTURES if one.name == name), None)
    if architecture is None:
        known = ", ".join(one.name for one in ARCHITECTURES)
        raise ValueError(f"general.architecture is {name!r}; one of {known} was expected")
    return architecture


def parts_of(architecture: Architecture, family: Family, config: ModelConfig, ours: str, num_rows: int) -> list[Part]:
    """Returns the file's tensors that together make up Heed's tensor of this name and number of rows, in order."""
    names = gguf.get_tensor_name_map(architecture.gguf_name, config.num_hidden_layers)
    sizes = dict[str, int]()
    for theirs, rows in family.stored(config, ours).parts.items():
        of_all = re.sub(r"\.experts\.\d+\.", ".experts.", theirs)
        sizes[of_all] = sizes.get(of_all, 0) + (num_rows if rows is None else rows)
    parts = []
    for theirs, size in sizes.items():
        name = names.get_name(theirs, (".weight", ".bias"))
        assert name is not None, f"GGUF has no name for {theirs}"
        heads = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads}
        permuted = next((number for kind, number in heads.items() if architecture.permutes and kind in name), 0)
        parts.append(Part(name, size, permuted, config.num_experts if ".experts." in theirs else 1))
    return parts


def config_fields(metadata: Metadata, shapes: Mapping[str, Sequence[int]], rope_divisors: Tensor | None) -> Fields:
    """Returns the fields of `config.json`, from a file's metadata and the shapes of its tensors.

    `rope_divisors` is the tensor ROPE_FREQUENCIES. Raises: ValueError naming a key of the metadata that is missing, or
    whose value Heed does not support.
    """
    architecture = architecture_of(str(metadata.get("general.architecture")))
    keys = _Keys(architecture.name, metadata)
    for key, value in _MUST_BE.items():
        if keys.get(key, value) != value:
            expected = "no such key" if value is None else value
            raise ValueError(f"{keys.full(key)} is {keys.get(key)}; {expected} was expected")
    if EMBEDDING not in shapes:
        raise ValueError(f"no tensor {EMBEDDING}; a whole language model was expected")
    common = {
        "vocab_size": shapes[EMBEDDING][0],
        "tie_word_embeddings": HEAD not in shapes,
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if architecture.name == "gpt2":
        return {**common, **_gpt2_fields(keys)}
    return {**common, **_rotary_fields(keys, set(shapes)), "rope_parameters": _rope_fields(keys, rope_divisors)}


def _gpt2_fields(keys: "_Keys") -> Fields:
    return {
        "model_type": "gpt2",
        "n_positions": keys.number("context_length"),
        "n_embd": keys.number("embedding_length"),
        "n_layer": keys.number("block_count"),
        "n_head": keys.number("attention.head_count"),
        "n_inner": keys.number("feed_forward_length"),
        "activation_function": "gelu_new",
        "layer_norm_epsilon": keys.real("attention.layer_norm_epsilon"),
    }


def _rotary_fields(keys: "_Keys", tensors: Set[str]) -> Fields:
    heads, width = keys.number("attention.head_count"), keys.number("embedding_length")
    head_dim = keys.get("attention.key_length") or keys.get("rope.dimension_count") or width // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        expect({keys.full(key): keys.get(key, head_dim)}, keys.full(key), head_dim)
    window, architecture = keys.get("attention.sliding_window"), architecture_of(keys.architecture)
    if not architecture.mixture:
        expect({keys.full("expert_count"): keys.get("expert_count", 0)}, keys.full("expert_count"), 0)
    has_experts = keys.get("expert_count", 0) != 0 or architecture.mixture in architecture.families[:1]
    plain = "mistral" if keys.architecture == "llama" and window else architecture.families[0]
    model_type = architecture.mixture if has_experts else plain
    family = next(family for family in FAMILIES if family.model_type == model_type)
    fields = {
        "model_type": model_type,
        "max_position_embeddings": keys.number("context_length"),
        "hidden_size": width,
        "num_hidden_layers": keys.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.number("attention.head_count_kv", heads),
        "head_dim": int(head_dim),
        "intermediate_size": keys.number("feed_forward_length"),
        "hidden_act": getattr(family, "hidden_act", None),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
    }
    if model_type != "qwen2":  # its biases are part of the family
        fields["attention_bias"] = "blk.0.attn_output.bias" in tensors
    if model_type in ("llama", "arcee"):
        fields["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    if has_experts:
        num_experts = keys.number("expert_count")
        fields |= {
            "num_local_experts" if model_type == "mixtral" else "num_experts": num_experts,
            "num_experts_per_tok": keys.number("expert_used_count"),
            "norm_topk_prob": architecture.divides_by_sum,
        }
    if model_type == "qwen3_moe":  # the others' experts are as wide as `feed_forward_length`
        fields["moe_intermediate_size"] = keys.number("expert_feed_forward_length")
    if model_type in ("mistral", "mixtral"):
        fields["sliding_window"] = int(window) if window else None
    elif window:
        raise ValueError(f"{keys.full('attention.sliding_window')} is {window}; no window was expected")
    return fields


def _rope_fields(keys: "_Keys", divisors: Tensor | None) -> Fields:
    """Returns `rope_parameters` of config.json."""
    theta = keys.real("rope.freq_base", 10_000.0)
    if divisors is not None and not torch.all(divisors == 1):
        return {"rope_type": "llama3", "rope_theta": theta, **llama3_scaling(theta, divisors, ROPE_FREQUENCIES)}
    kind, factor = keys.get("rope.scaling.type", "none"), keys.real("rope.scaling.factor", 0.0)
    expect({keys.full("rope.scaling.type"): kind}, keys.full("rope.scaling.type"), "none", "linear", "yarn")
    if kind == "none" or factor in (0.0, 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    fields = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        fields["original_max_position_embeddings"] = keys.number("rope.scaling.original_context_length")
        for name in ("beta_fast", "beta_slow"):
            value = keys.get(f"rope.scaling.yarn_{name}")
            fields |= {} if value is None else {name: _short(value)}
    return fields


class _Keys:
    """The metadata of one architecture. Keys are passed without the architecture's name."""

    def __init__(self, architecture: str, metadata: Metadata) -> None:
        self.architecture, self._metadata = architecture, metadata

    def full(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(self.full(key), default)

    def number(self, key: str, default: int | None = None) -> int:
        """Returns a whole number. Raises: ValueError if it is missing or differs between layers."""
        value = self.get(key, default)
        if isinstance(value, Sequence) and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int):
            raise ValueError(f"{self.full(key)} is {'missing' if value is None else value}; a number was expected")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, float):
            raise ValueError(f"{self.full(key)} is {'missing' if value is None else value}; a number was expected")
        return _short(value)


def _short(value: float) -> float:
    """Returns the shortest decimal that is the same number in fp32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def metadata_of(architecture: Architecture, config: ModelConfig) -> dict[str, Any]:
    """Returns the metadata of a shape. Raises: ValueError for a shape that llama.cpp computes differently.

    A model with sliding windows gets the shortest of them as its context: up to that length it attends to every token.
    """
    window = min((width for width in config.sliding_window if width), default=0)
    context = config.max_position_embeddings
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": min(context, window) if window else context,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
    }
    if config.num_experts:
        fields |= _experts_metadata(architecture, config)
    if architecture.name == "gpt2":
        if config.mlp != "gelu_tanh":
            raise ValueError(f"model.mlp is {config.mlp!r}; llama.cpp computes 'gelu_tanh' in a GPT-2")
        fields["attention.layer_norm_epsilon"] = config.norm_eps
    else:
        if architecture.name in ("arcee", "qwen3", "qwen3moe", "olmoe") and (
            config.attention_bias != "none" or config.mlp_bias
        ):
            raise ValueError(f"the model has biases, which llama.cpp does not add in a model of {architecture.name}")
        scaling = config.rope_scaling
        if scaling is not None and scaling.rope_type == "llama3" and architecture.name not in _READ_DIVISORS:
            raise ValueError(
                f"rope_type is 'llama3', which llama.cpp does not compute in a model of {architecture.name}; one of"
                f" {', '.join(_READ_DIVISORS)} was expected"
            )
        fields |= {
            "attention.layer_norm_rms_epsilon": config.norm_eps,
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
            "rope.dimension_count": config.head_dim,
            "rope.freq_base": config.rope_theta,
            **_scaling_metadata(scaling),
        }
    return {f"{architecture.name}.{key}": value for key, value in fields.items()}


def _experts_metadata(architecture: Architecture, config: ModelConfig) -> dict[str, Any]:
    name, divides, heads = architecture.name, architecture.divides_by_sum, config.num_attention_heads
    for key, value, expected in (
        ("norm_topk_prob", config.norm_topk_prob, divides),
        ("mlp_only_layers", list(config.mlp_only_layers), []),
        ("tie_word_embeddings", config.tie_word_embeddings and name == "olmoe", False),
        ("num_key_value_heads", config.num_key_value_heads, heads if name == "olmoe" else config.num_key_value_heads),
    ):
        if value != expected:
            raise ValueError(f"model.{key} is {value}; llama.cpp computes {expected} in a model of {name}")
    return {
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }


def _scaling_metadata(scaling: RopeScaling | None) -> dict[str, Any]:
    """Returns no metadata for Llama 3's scaling, which is a tensor instead."""
    if scaling is None or scaling.rope_type == "llama3":
        return {}
    if not scaling.truncate:
        raise ValueError("model.rope_scaling.truncate is false; llama.cpp computes true")
    for name in ("attention_factor", "llama_4_scaling_beta"):
        if value := getattr(scaling, name):
            raise ValueError(f"model.rope_scaling.{name} is {value}; only 0 is written for llama.cpp")
    fields: dict[str, Any] = {"rope.scaling.type": scaling.rope_type, "rope.scaling.factor": scaling.factor}
    if scaling.rope_type == "yarn":
        fields |= {
            "rope.scaling.original_context_length": scaling.original_max_position_embeddings,
            "rope.scaling.yarn_beta_fast": scaling.beta_fast,
            "rope.scaling.yarn_beta_slow": scaling.beta_slow,
        }
    return fields
