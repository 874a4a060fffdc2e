"""How a GGUF file describes a decoder: the metadata of its shape, and the name and layout of each tensor.

GGUF is the format of llama.cpp and Ollama. Its matrices are [out, in], like Heed's, but Q and K in Llama's architecture
are permuted: llama.cpp rotates pairs of neighbouring dimensions, whereas published checkpoints pair each dimension of
the first half with one of the second.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from lm.config import ModelConfig, RopeScaling
from lm.families import FAMILIES, Family, expect
from lm.families.family import Fields
from lm.positions import rotary_frequencies

Metadata = Mapping[str, Any]
ROPE_FREQUENCIES = "rope_freqs.weight"  # llama.cpp divides the rotary frequencies by it: Llama 3's scaling
_READ_DIVISORS = ("llama", "arcee")  # the architectures in which it does
HEAD, EMBEDDING, POSITIONS = "output.weight", "token_embd.weight", "position_embd.weight"
# Metadata that changes what a model computes, with the only value that Heed supports; None: the key must be absent.
_MUST_BE = {
    "expert_count": 0, "attention.scale": None, "attention.causal": True, "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0, "logit_scale": None, "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "use_parallel_residual": None, "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": None,
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp and the families of Heed that it covers. `permutes`: Q and K are permuted."""

    name: str
    gguf_name: gguf.MODEL_ARCH
    families: tuple[str, ...]
    permutes: bool = False


ARCHITECTURES = (
    Architecture("llama", gguf.MODEL_ARCH.LLAMA, ("llama", "mistral"), permutes=True),
    Architecture("arcee", gguf.MODEL_ARCH.ARCEE, ("arcee",), permutes=True),
    Architecture("qwen2", gguf.MODEL_ARCH.QWEN2, ("qwen2",)),
    Architecture("qwen3", gguf.MODEL_ARCH.QWEN3, ("qwen3",)),
    Architecture("gpt2", gguf.MODEL_ARCH.GPT2, ("gpt2",)),
)


@dataclass(frozen=True)
class Part:
    """A tensor of the file: `num_rows` consecutive rows of one of Heed's tensors.

    `num_heads` > 0: its rows are permuted within each head.
    """

    name: str
    num_rows: int
    num_heads: int = 0

    def from_file(self, part: Tensor) -> Tensor:
        return part if not self.num_heads else _swapped(part, self.num_heads, (-1, 2))

    def to_file(self, part: Tensor) -> Tensor:
        return part if not self.num_heads else _swapped(part, self.num_heads, (2, -1))


def _swapped(part: Tensor, num_heads: int, halves: tuple[int, int]) -> Tensor:
    """Arranges the rows of each head as a `halves` table and returns them in the order of its transpose."""
    return part.reshape(num_heads, *halves, *part.shape[1:]).transpose(1, 2).reshape(part.shape).contiguous()


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
    parts = []
    for theirs, rows in family.stored(config, ours).parts.items():
        name = names.get_name(theirs, (".weight", ".bias"))
        assert name is not None, f"GGUF has no name for {theirs}"
        heads = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads}
        permuted = next((number for kind, number in heads.items() if architecture.permutes and kind in name), 0)
        parts.append(Part(name, num_rows if rows is None else rows, permuted))
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
    window = keys.get("attention.sliding_window")
    model_type = "mistral" if keys.architecture == "llama" and window else keys.architecture
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
    if model_type == "mistral":
        fields["sliding_window"] = int(window)
    elif window:
        raise ValueError(f"{keys.full('attention.sliding_window')} is {window}; no window was expected")
    return fields


def _rope_fields(keys: "_Keys", divisors: Tensor | None) -> Fields:
    """Returns `rope_parameters` of config.json."""
    theta = keys.real("rope.freq_base", 10_000.0)
    if divisors is not None and not torch.all(divisors == 1):
        return {"rope_type": "llama3", "rope_theta": theta, **_llama3_fields(theta, divisors)}
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


def _llama3_fields(theta: float, divisors: Tensor) -> Fields:
    """Recovers Llama 3's scaling from the numbers that divide the frequencies (`lm.attention` has the formula).

    Between the two bounds, 1 / divisor is linear in the frequency, and this line gives the bounds. The third number,
    the original context, can be chosen freely, since only its ratios to the bounds count; published models have a low
    bound of 1.
    Raises: ValueError for divisors that follow another formula.
    """
    unlike = f"{ROPE_FREQUENCIES} scales the rotary frequencies by an unknown formula; Llama 3's was expected"
    factor = _short(float(divisors.max()))
    between = (divisors > 1 + 1e-4) & (divisors < factor * (1 - 1e-4))
    if int(between.sum()) < 2:
        raise ValueError(unlike)
    frequencies = rotary_frequencies(2 * len(divisors), theta, None, divisors.device)
    turns = frequencies[between] / (2 * math.pi)
    kept = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
    slope = float((kept[0] - kept[-1]) / (turns[0] - turns[-1]))
    low_over_span = float(turns[0]) * slope - float(kept[0])  # low / (high - low)
    if low_over_span <= 0 or slope <= 0:
        raise ValueError(unlike)
    fields = {
        "factor": factor,
        "original_max_position_embeddings": round(slope / low_over_span),
        "low_freq_factor": 1.0,
        "high_freq_factor": round(1 + 1 / low_over_span, 4),
    }
    again = _divisors(2 * len(divisors), theta, RopeScaling.model_validate({"rope_type": "llama3", **fields}))
    if not torch.allclose(again, divisors, rtol=1e-3):
        raise ValueError(unlike)
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
    if architecture.name == "gpt2":
        if config.mlp != "gelu_tanh":
            raise ValueError(f"model.mlp is {config.mlp!r}; llama.cpp computes 'gelu_tanh' in a GPT-2")
        fields["attention.layer_norm_epsilon"] = config.norm_eps
    else:
        if architecture.name in ("arcee", "qwen3") and (config.attention_bias != "none" or config.mlp_bias):
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


def _scaling_metadata(scaling: RopeScaling | None) -> dict[str, Any]:
    """Returns no metadata for Llama 3's scaling, which is a tensor instead."""
    if scaling is None or scaling.rope_type == "llama3":
        return {}
    fields: dict[str, Any] = {"rope.scaling.type": scaling.rope_type, "rope.scaling.factor": scaling.factor}
    if scaling.rope_type == "yarn":
        fields |= {
            "rope.scaling.original_context_length": scaling.original_max_position_embeddings,
            "rope.scaling.yarn_beta_fast": scaling.beta_fast,
            "rope.scaling.yarn_beta_slow": scaling.beta_slow,
        }
    return fields


def rope_divisors(config: ModelConfig) -> Tensor | None:
    """Returns the tensor ROPE_FREQUENCIES of a shape with Llama 3's scaling; None for any other shape."""
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type != "llama3":
        return None
    return _divisors(config.head_dim, config.rope_theta, scaling)


def _divisors(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Returns the numbers by which a scaling divides the rotary frequencies."""
    device = torch.device("cpu")
    return rotary_frequencies(head_dim, theta, None, device) / rotary_frequencies(head_dim, theta, scaling, device)
