"""Model directories in the Hugging Face layout: config.json, model.safetensors, tokenizer files.

`mlp = "swiglu"` is written as Llama and `mlp = "relu2"` as Arcee, so `transformers` and the servers built on it load
a policy as it stands. A scalar model becomes the family's sequence classifier with one label; its bias, which no
preference depends on, has no place there and is kept in config.json as `score_bias`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lm.config import ModelConfig
from lm.model import LanguageModel, ScalarModel
from lm.tokenizer import Tokenizer, read_json

Weights = Mapping[str, Tensor]
AnyModel = TypeVar("AnyModel", LanguageModel, ScalarModel)


@dataclass(frozen=True)
class Family:
    """A family of checkpoints: its names in `config.json` and our MLP kind."""

    model_type: str
    class_prefix: str
    hidden_act: str
    mlp: Literal["swiglu", "relu2"]


FAMILIES = (Family("llama", "Llama", "silu", "swiglu"), Family("arcee", "Arcee", "relu2", "relu2"))


def save_model(folder: Path, model: LanguageModel | ScalarModel, weights: Weights, tokenizer: Tokenizer) -> None:
    """Write `weights` (a state dict of `model`, which may live elsewhere) and the tokenizer to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    config = config_to_hf(model, tokenizer)
    if isinstance(model, ScalarModel):
        config["score_bias"] = float(weights["bias"])
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {name: tensor.detach().contiguous() for name, tensor in weights_to_hf(model.config, weights).items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def load_language_model(folder: Path, dropout: float = 0.0) -> LanguageModel:
    """The language model of a directory. Errors: ValueError naming file, and names and shapes that do not fit."""
    config, _ = config_from_hf(folder, "ForCausalLM")
    return _load(folder, LanguageModel(config, dropout))


def load_scalar_model(folder: Path, dropout: float = 0.0) -> ScalarModel:
    """The reward model or value function of a directory; errors as for `load_language_model`."""
    config, raw = config_from_hf(folder, "ForSequenceClassification")
    model = _load(folder, ScalarModel(config, dropout))
    model.bias.fill_(float(raw.get("score_bias", 0.0)))
    return model


def load_backbone(folder: Path, model: ScalarModel) -> None:
    """Give a scalar model the decoder of the language model in `folder`."""
    source = load_language_model(folder)
    if source.config != model.config:
        raise ValueError(f"{folder}: its shape {source.config} is not the expected {model.config}")
    model.decoder.load_state_dict(source.decoder.state_dict())


def _load(folder: Path, model: AnyModel) -> AnyModel:
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; safetensors weights were expected (pickled weights are not read)")
    with safe_open(str(path), framework="pt") as file:
        names = set(file.keys())
        expected = {name: tuple(t.shape) for name, t in weights_to_hf(model.config, model.state_dict()).items()}
        wrong = [f"{name}: {problem}" for name, problem in _differences(names, expected, lambda n: file.get_slice(n))]
        if wrong:
            raise ValueError(f"{path}: {len(wrong)} tensors do not fit the config: " + "; ".join(wrong[:8]))
        tensors = {name: file.get_tensor(name) for name in expected}
    state = weights_from_hf(model.config, tensors)
    if isinstance(model, ScalarModel):
        state["bias"] = model.bias
    elif model.config.tie_embeddings:
        state["head.weight"] = state["decoder.embedding.weight"]
    model.load_state_dict(state)
    return model


def _differences(
    names: set[str], expected: Mapping[str, tuple[int, ...]], slice_of: Callable[[str], Any]
) -> list[tuple[str, str]]:
    problems = [(name, f"expected {list(expected[name])}, missing") for name in sorted(set(expected) - names)]
    problems += [(name, "found, not expected") for name in sorted(names - set(expected))]
    for name in sorted(names & set(expected)):
        found = tuple(slice_of(name).get_shape())
        if found != expected[name]:
            problems.append((name, f"expected {list(expected[name])}, found {list(found)}"))
    return problems


def config_to_hf(model: LanguageModel | ScalarModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """`config.json` of a model."""
    config = model.config
    family = next(family for family in FAMILIES if family.mlp == config.mlp)
    scalar = isinstance(model, ScalarModel)
    return {
        "architectures": [family.class_prefix + ("ForSequenceClassification" if scalar else "ForCausalLM")],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_tokens,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_width,
        "hidden_act": family.hidden_act,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.end_id,
        "pad_token_id": tokenizer.pad_id,
        "dtype": "float32",
        **({"num_labels": 1, "id2label": {"0": "score"}, "label2id": {"score": 0}} if scalar else {}),
    }


def config_from_hf(folder: Path, head: str) -> tuple[ModelConfig, dict[str, Any]]:
    """Our config and the raw one. Errors: ValueError for another architecture, head or missing field."""
    path = folder / "config.json"
    raw = read_json(path)
    family = next((family for family in FAMILIES if family.model_type == raw.get("model_type")), None)
    if family is None or raw.get("hidden_act") != family.hidden_act:
        raise ValueError(
            f"{path}: model_type {raw.get('model_type')!r} with hidden_act {raw.get('hidden_act')!r};"
            f" expected one of {[(f.model_type, f.hidden_act) for f in FAMILIES]}"
        )
    if raw.get("architectures") != [family.class_prefix + head]:
        raise ValueError(
            f"{path}: architectures is {raw.get('architectures')}; [{family.class_prefix + head!r}] was expected"
        )
    for field in ("attention_bias", "mlp_bias"):
        if raw.get(field):
            raise ValueError(f"{path}: {field} is true; models without biases are supported")
    rope = raw.get("rope_parameters") or {"rope_type": "default", "rope_theta": raw.get("rope_theta", 10_000.0)}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"{path}: rope_type is {rope['rope_type']!r}; 'default' was expected")
    try:
        config = ModelConfig(
            vocab_size=raw["vocab_size"],
            context_tokens=raw["max_position_embeddings"],
            width=raw["hidden_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw.get("num_key_value_heads", raw["num_attention_heads"]),
            mlp_width=raw["intermediate_size"],
            mlp=family.mlp,
            rope_theta=rope["rope_theta"],
            norm_eps=raw["rms_norm_eps"],
            tie_embeddings=raw.get("tie_word_embeddings", False),
        )
    except KeyError as error:
        raise ValueError(f"{path}: field {error.args[0]!r} is missing") from None
    if raw.get("head_dim", config.head_dim) != config.head_dim:
        raise ValueError(f"{path}: head_dim is {raw['head_dim']}; hidden_size / heads = {config.head_dim} was expected")
    return config, raw


_PLAIN = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
_OUTER = {"decoder.embedding.weight": "model.embed_tokens.weight", "decoder.norm.weight": "model.norm.weight"}


def _fused(config: ModelConfig) -> dict[str, dict[str, int]]:
    """Our fused matrices: the Hugging Face matrices they stack, with their row counts, in order."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = {"self_attn.q_proj.weight": query, "self_attn.k_proj.weight": key, "self_attn.v_proj.weight": key}
    up = {"mlp.gate_proj.weight": config.mlp_width} if config.mlp == "swiglu" else {}
    return {"attention.qkv.weight": qkv, "mlp.up.weight": {**up, "mlp.up_proj.weight": config.mlp_width}}


def weights_to_hf(config: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    """Our state dict under the Hugging Face names; tied heads and the score bias are left out."""
    result = {theirs: weights[ours] for ours, theirs in _OUTER.items()}
    for layer in range(config.num_layers):
        ours_prefix, theirs_prefix = f"decoder.blocks.{layer}.", f"model.layers.{layer}."
        for ours, theirs in _PLAIN.items():
            result[theirs_prefix + theirs] = weights[ours_prefix + ours]
        for ours, parts in _fused(config).items():
            pieces = weights[ours_prefix + ours].split(list(parts.values()))
            result |= {theirs_prefix + theirs: piece for theirs, piece in zip(parts, pieces, strict=True)}
    if "score.weight" in weights:
        result["score.weight"] = weights["score.weight"]
    elif not config.tie_embeddings:
        result["lm_head.weight"] = weights["head.weight"]
    return result


def weights_from_hf(config: ModelConfig, tensors: Weights) -> dict[str, Tensor]:
    """The inverse of `weights_to_hf`, in fp32."""
    result = {ours: tensors[theirs] for ours, theirs in _OUTER.items()}
    for layer in range(config.num_layers):
        ours_prefix, theirs_prefix = f"decoder.blocks.{layer}.", f"model.layers.{layer}."
        for ours, theirs in _PLAIN.items():
            result[ours_prefix + ours] = tensors[theirs_prefix + theirs]
        for ours, parts in _fused(config).items():
            result[ours_prefix + ours] = torch.cat([tensors[theirs_prefix + theirs] for theirs in parts])
    for theirs, ours in (("score.weight", "score.weight"), ("lm_head.weight", "head.weight")):
        if theirs in tensors:
            result[ours] = tensors[theirs]
    return {name: tensor.float() for name, tensor in result.items()}
