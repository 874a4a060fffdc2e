"""The families of published checkpoints: how `config.json` spells a shape, and what each tensor is called.

What a model is for is named by a word: "language" and "score" models sit on decoders, "masked", "sequence", "token" and
"span" models on encoders, "translate" on an encoder-decoder.

A family can hold a shape if the shape comes back unchanged from its spelling; a shape that no family holds (GPT-3's
banded layers, for one) is written in Heed's own spelling, which only Heed reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from pydantic import ValidationError

from lm.config import ModelConfig

Fields = dict[str, Any]


@dataclass(frozen=True)
class Stored:
    """One of our tensors as a checkpoint holds it: {name: number of rows} of the parts that its rows are cut into.

    None: all rows. `transposed` where the checkpoint keeps a matrix as (in, out), as GPT-2 does. `rows_before` rows of
    the checkpoint's table come before ours and are not used: BART counts its positions from 2.
    """

    parts: Mapping[str, int | None]
    transposed: bool = False
    rows_before: int = 0


class Family(Protocol):
    """A family of checkpoints."""

    @property
    def model_type(self) -> str: ...

    @property
    def classes(self) -> Mapping[str, str]:
        """What `architectures` calls the family's model for each purpose that it serves."""

    def to_hf(self, config: ModelConfig) -> Fields:
        """The shape's fields of `config.json`."""

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        """The fields of ModelConfig. Errors: KeyError for a missing field, ValueError for what we do not compute."""

    def stored(self, config: ModelConfig, ours: str, /) -> Stored:
        """Where the model's tensor of this name lies. Errors: KeyError for one that the family does not have."""


def expect(raw: Mapping[str, Any], field: str, *values: Any) -> None:
    """Errors: ValueError where the field is there with a value that is none of these."""
    if field in raw and raw[field] not in values:
        raise ValueError(f"{field} is {raw[field]!r}; {' or '.join(map(repr, values))} was expected")


_ROPE_FIELDS = {
    "factor": "factor",
    "original_context_tokens": "original_max_position_embeddings",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
_ROPE_FIELDS_OF = {
    "linear": ("factor",),
    "llama3": ("factor", "original_context_tokens", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_context_tokens", "beta_fast", "beta_slow"),
}


def rope_to_hf(config: ModelConfig) -> Fields:
    """`rope_parameters` of `config.json`."""
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    values = {_ROPE_FIELDS[name]: getattr(scaling, name) for name in _ROPE_FIELDS_OF[scaling.kind]}
    return {"rope_type": scaling.kind, "rope_theta": config.rope_theta, **values}


def rope_from_hf(raw: Mapping[str, Any]) -> Fields:
    """`rope_theta` and `rope_scaling`, from `rope_parameters` or from the two fields of older checkpoints."""
    rope = raw.get("rope_parameters") or {
        "rope_theta": raw.get("rope_theta", 10_000.0),
        **(raw.get("rope_scaling") or {}),
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    expect({"rope_type": kind}, "rope_type", "default", *_ROPE_FIELDS_OF)
    expect(rope, "partial_rotary_factor", 1.0)
    for field in ("attention_factor", "mscale", "mscale_all_dim"):
        expect(rope, field, None)
    expect(rope, "truncate", True)
    if kind == "default":
        return {"rope_theta": rope["rope_theta"]}
    found = {
        name: rope[_ROPE_FIELDS[name]] for name in _ROPE_FIELDS_OF[kind] if rope.get(_ROPE_FIELDS[name]) is not None
    }
    return {"rope_theta": rope["rope_theta"], "rope_scaling": {"kind": kind, **found}}


@dataclass(frozen=True)
class RotaryFamily:
    """Llama and what grew from it: RMSNorm before each branch, rotary positions, grouped queries.

    `attention_bias`: the family's products have biases on "none", on "qkv", or on "all" where its flag says so.
    `windows`: no layer looks back a limited way, all of them do, or those that `layer_types` names.
    """

    model_type: str
    class_prefix: str
    mlp: Literal["swiglu", "relu2"] = "swiglu"
    attention_bias: Literal["none", "qkv", "flag"] = "none"
    mlp_bias_flag: bool = False
    windows: Literal["none", "all", "by layer"] = "none"
    qk_norm: bool = False

    @property
    def classes(self) -> Mapping[str, str]:
        return {
            "language": f"{self.class_prefix}ForCausalLM",
            "score": f"{self.class_prefix}ForSequenceClassification",
        }

    @property
    def hidden_act(self) -> str:
        return {"swiglu": "silu", "relu2": "relu2"}[self.mlp]

    def to_hf(self, config: ModelConfig) -> Fields:
        fields = {
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.context_tokens,
            "hidden_size": config.width,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "intermediate_size": config.mlp_width,
            "hidden_act": self.hidden_act,
            "rms_norm_eps": config.norm_eps,
            "rope_parameters": rope_to_hf(config),
            "tie_word_embeddings": config.tie_embeddings,
        }
        if self.attention_bias == "flag":
            fields["attention_bias"] = config.attention_bias == "all"
        if self.mlp_bias_flag:
            fields["mlp_bias"] = config.mlp_bias
        window = max(config.windows)
        if self.windows == "all":
            fields["sliding_window"] = window or None
        elif self.windows == "by layer":
            banded = [config.window(layer) > 0 for layer in range(config.num_layers)]
            fields |= {
                "use_sliding_window": window > 0,
                "sliding_window": window or None,
                "max_window_layers": banded.index(True) if True in banded else config.num_layers,
                "layer_types": ["sliding_attention" if found else "full_attention" for found in banded],
            }
        return fields

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        expect(raw, "hidden_act", self.hidden_act)
        if not self.mlp_bias_flag:
            expect(raw, "mlp_bias", False)
        if self.attention_bias != "flag":
            expect(raw, "attention_bias", False, *([True] if self.attention_bias == "qkv" else []))
        flagged = "all" if raw.get("attention_bias") else "none"
        heads = raw["num_attention_heads"]
        return {
            "vocab_size": raw["vocab_size"],
            "context_tokens": raw["max_position_embeddings"],
            "width": raw["hidden_size"],
            "num_layers": raw["num_hidden_layers"],
            "num_heads": heads,
            "num_kv_heads": raw.get("num_key_value_heads") or heads,
            "head_dim": raw.get("head_dim"),
            "mlp_width": raw["intermediate_size"],
            "mlp": self.mlp,
            "mlp_bias": bool(raw.get("mlp_bias")),
            "attention_bias": flagged if self.attention_bias == "flag" else self.attention_bias,
            "qk_norm": self.qk_norm,
            "windows": self._windows_from(raw),
            "norm_eps": raw["rms_norm_eps"],
            "tie_embeddings": raw.get("tie_word_embeddings", False),
            **rope_from_hf(raw),
        }

    def _windows_from(self, raw: Mapping[str, Any]) -> list[int]:
        window, num_layers = raw.get("sliding_window") or 0, raw["num_hidden_layers"]
        if self.windows == "all":
            return [window]
        if self.windows == "none" or not raw.get("use_sliding_window"):
            return [0]
        first = raw.get("max_window_layers", num_layers)
        by_default = ["full_attention"] * first + ["sliding_attention"] * (num_layers - first)
        kinds = raw.get("layer_types") or by_default
        return [window if kind == "sliding_attention" else 0 for kind in kinds]

    def stored(self, config: ModelConfig, ours: str) -> Stored:
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        stacked = {
            "attention.qkv": {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key},
            "mlp.up": {"mlp.gate_proj": config.mlp_width, "mlp.up_proj": config.mlp_width},
        }
        module, _, kind = ours.rpartition(".")
        if not module.startswith("decoder.blocks."):
            return Stored({f"{self._OUTER[module]}.{kind}": None})
        _, _, layer, inner = module.split(".", 3)
        if inner in stacked and not (inner == "mlp.up" and config.mlp != "swiglu"):
            return Stored({f"model.layers.{layer}.{part}.{kind}": rows for part, rows in stacked[inner].items()})
        return Stored({f"model.layers.{layer}.{self._INNER[inner]}.{kind}": None})

    _OUTER: ClassVar = {
        "decoder.embedding": "model.embed_tokens",
        "decoder.norm": "model.norm",
        "head": "lm_head",
        "score": "score",
    }
    _INNER: ClassVar = {
        "attention_norm": "input_layernorm",
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
        "attention.out": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    }


_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
_THEIR_NAMES = {"gelu_tanh": "gelu_new"}  # of the activations that are not called what we call them

# What GPT-2, BERT and BART have in common.
_CLASSIC: Fields = {"mlp_bias": True, "attention_bias": "all", "positions": "learned", "norm": "layer"}


class GPT2Family:
    """GPT-2: LayerNorm before each branch, learned positions, biases everywhere, matrices kept as (in, out)."""

    model_type = "gpt2"
    classes: ClassVar = {"language": "GPT2LMHeadModel", "score": "GPT2ForSequenceClassification"}

    def to_hf(self, config: ModelConfig) -> Fields:
        return {
            "vocab_size": config.vocab_size,
            "n_positions": config.context_tokens,
            "n_embd": config.width,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_inner": config.mlp_width,
            "activation_function": _THEIR_NAMES.get(config.mlp, config.mlp),
            "layer_norm_epsilon": config.norm_eps,
            "tie_word_embeddings": config.tie_embeddings,
        }

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        expect(raw, "activation_function", *_ACTIVATIONS)
        expect(raw, "scale_attn_weights", True)
        expect(raw, "scale_attn_by_inverse_layer_idx", False)
        expect(raw, "add_cross_attention", False)
        return {
            "vocab_size": raw["vocab_size"],
            "context_tokens": raw["n_positions"],
            "width": raw["n_embd"],
            "num_layers": raw["n_layer"],
            "num_heads": raw["n_head"],
            "num_kv_heads": raw["n_head"],
            "mlp_width": raw.get("n_inner") or 4 * raw["n_embd"],
            "mlp": _ACTIVATIONS[raw.get("activation_function", "gelu_new")],
            **_CLASSIC,
            "norm_eps": raw["layer_norm_epsilon"],
            "tie_embeddings": raw.get("tie_word_embeddings", True),
        }

    def stored(self, _config: ModelConfig, ours: str) -> Stored:
        module, _, kind = ours.rpartition(".")
        if not module.startswith("decoder.blocks."):
            return Stored({f"{self._OUTER[module]}.{kind}": None})
        _, _, layer, inner = module.split(".", 3)
        is_matrix = kind == "weight" and "norm" not in inner
        return Stored({f"transformer.h.{layer}.{self._INNER[inner]}.{kind}": None}, transposed=is_matrix)

    _OUTER: ClassVar = {
        "decoder.embedding": "transformer.wte",
        "decoder.positions": "transformer.wpe",
        "decoder.norm": "transformer.ln_f",
        "head": "lm_head",
        "score": "score",
    }
    _INNER: ClassVar = {
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }


class BertFamily:
    """BERT: an encoder with LayerNorm behind each branch, learned positions and token types, biases everywhere."""

    model_type = "bert"
    classes: ClassVar = {
        "masked": "BertForMaskedLM",
        "sequence": "BertForSequenceClassification",
        "token": "BertForTokenClassification",
        "span": "BertForQuestionAnswering",
    }

    def to_hf(self, config: ModelConfig) -> Fields:
        return {
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.context_tokens,
            "hidden_size": config.width,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "intermediate_size": config.mlp_width,
            "hidden_act": _THEIR_NAMES.get(config.mlp, config.mlp),
            "layer_norm_eps": config.norm_eps,
            "type_vocab_size": config.token_types,
            "tie_word_embeddings": config.tie_embeddings,
        }

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        expect(raw, "hidden_act", *_ACTIVATIONS)
        expect(raw, "position_embedding_type", "absolute", None)
        expect(raw, "is_decoder", False)
        expect(raw, "add_cross_attention", False)
        return {
            "kind": "encoder",
            "vocab_size": raw["vocab_size"],
            "context_tokens": raw["max_position_embeddings"],
            "width": raw["hidden_size"],
            "num_layers": raw["num_hidden_layers"],
            "num_heads": raw["num_attention_heads"],
            "num_kv_heads": raw["num_attention_heads"],
            "mlp_width": raw["intermediate_size"],
            "mlp": _ACTIVATIONS[raw.get("hidden_act", "gelu")],
            **_CLASSIC,
            "token_types": raw["type_vocab_size"],
            "embedding_norm": True,
            "norm_place": "post",
            "norm_eps": raw["layer_norm_eps"],
            "tie_embeddings": raw.get("tie_word_embeddings", True),
        }

    def stored(self, config: ModelConfig, ours: str) -> Stored:
        if ours == "head.bias":
            return Stored({"cls.predictions.bias": None})
        module, _, kind = ours.rpartition(".")
        if not module.startswith("encoder.blocks."):
            return Stored({f"{self._OUTER[module]}.{kind}": None})
        _, _, layer, inner = module.split(".", 3)
        if inner == "attention.qkv":
            rows = config.num_heads * config.head_dim
            names: Mapping[str, int | None] = {f"attention.self.{part}": rows for part in ("query", "key", "value")}
        else:
            names = {self._INNER[inner]: None}
        return Stored({f"bert.encoder.layer.{layer}.{name}.{kind}": rows for name, rows in names.items()})

    _OUTER: ClassVar = {
        "encoder.embedding": "bert.embeddings.word_embeddings",
        "encoder.positions": "bert.embeddings.position_embeddings",
        "encoder.token_types": "bert.embeddings.token_type_embeddings",
        "encoder.embedding_norm": "bert.embeddings.LayerNorm",
        "transform": "cls.predictions.transform.dense",
        "transform_norm": "cls.predictions.transform.LayerNorm",
        "head": "cls.predictions.decoder",
        "pooler": "bert.pooler.dense",
        "classifier": "classifier",
        "ends": "qa_outputs",
    }
    _INNER: ClassVar = {
        "attention.out": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "mlp.up": "intermediate.dense",
        "mlp.down": "output.dense",
        "mlp_norm": "output.LayerNorm",
    }


class BartFamily:
    """BART: an encoder-decoder with LayerNorm behind each branch and learned positions that count from 2."""

    model_type = "bart"
    classes: ClassVar = {"translate": "BartForConditionalGeneration"}

    def to_hf(self, config: ModelConfig) -> Fields:
        stacks = {"encoder": config.num_encoder_layers, "decoder": config.num_layers}
        fields: Fields = {
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.context_tokens,
            "d_model": config.width,
            "activation_function": _THEIR_NAMES.get(config.mlp, config.mlp),
            "scale_embedding": config.embedding_scale,
            "num_hidden_layers": config.num_encoder_layers,
            "is_encoder_decoder": True,
            "tie_word_embeddings": config.tie_embeddings,
        }
        for stack, num_layers in stacks.items():
            fields |= {
                f"{stack}_layers": num_layers,
                f"{stack}_attention_heads": config.num_heads,
                f"{stack}_ffn_dim": config.mlp_width,
            }
        return fields

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        expect(raw, "activation_function", *_ACTIVATIONS)
        for field in ("attention_heads", "ffn_dim"):
            expect(raw, f"decoder_{field}", raw[f"encoder_{field}"])
        return {
            "kind": "encoder-decoder",
            "vocab_size": raw["vocab_size"],
            "context_tokens": raw["max_position_embeddings"],
            "width": raw["d_model"],
            "num_layers": raw["decoder_layers"],
            "num_encoder_layers": raw["encoder_layers"],
            "num_heads": raw["encoder_attention_heads"],
            "num_kv_heads": raw["encoder_attention_heads"],
            "mlp_width": raw["encoder_ffn_dim"],
            "mlp": _ACTIVATIONS[raw.get("activation_function", "gelu")],
            **_CLASSIC,
            "embedding_norm": True,
            "embedding_scale": raw.get("scale_embedding", False),
            "norm_place": "post",
            "norm_eps": 1e-5,
            "tie_embeddings": raw.get("tie_word_embeddings", True),
        }

    def stored(self, config: ModelConfig, ours: str) -> Stored:
        module, _, kind = ours.rpartition(".")
        if ".blocks." not in module:
            name = self._OUTER[module]
            return Stored({f"{name}.{kind}": None}, rows_before=2 if "positions" in module else 0)
        stack, _, layer, inner = module.split(".", 3)
        rows = config.num_heads * config.head_dim
        stacked = {
            "attention.qkv": {f"self_attn.{part}_proj": rows for part in "qkv"},
            "cross.key_value": {f"encoder_attn.{part}_proj": rows for part in "kv"},
        }
        names: Mapping[str, int | None] = stacked.get(inner) or {self._INNER[inner]: None}
        return Stored({f"model.{stack}.layers.{layer}.{name}.{kind}": size for name, size in names.items()})

    _OUTER: ClassVar = {
        "encoder.embedding": "model.shared",
        "encoder.positions": "model.encoder.embed_positions",
        "decoder.positions": "model.decoder.embed_positions",
        "encoder.embedding_norm": "model.encoder.layernorm_embedding",
        "decoder.embedding_norm": "model.decoder.layernorm_embedding",
        "head": "lm_head",
    }
    _INNER: ClassVar = {
        "attention.out": "self_attn.out_proj",
        "attention_norm": "self_attn_layer_norm",
        "cross.query": "encoder_attn.q_proj",
        "cross.out": "encoder_attn.out_proj",
        "cross_norm": "encoder_attn_layer_norm",
        "mlp.up": "fc1",
        "mlp.down": "fc2",
        "mlp_norm": "final_layer_norm",
    }


class HeedFamily:
    """Any shape, in Heed's own words."""

    model_type = "heed"
    classes: ClassVar = {
        "language": "HeedForCausalLM",
        "score": "HeedForSequenceClassification",
        "masked": "HeedForMaskedLM",
        "sequence": "HeedForEncoderSequenceClassification",
        "token": "HeedForTokenClassification",
        "span": "HeedForQuestionAnswering",
        "translate": "HeedForConditionalGeneration",
    }

    def to_hf(self, config: ModelConfig) -> Fields:
        return config.model_dump(mode="json")

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        missing = [name for name, field in ModelConfig.model_fields.items() if field.is_required() and name not in raw]
        if missing:
            raise KeyError(missing[0])
        return {name: raw[name] for name in ModelConfig.model_fields if name in raw}

    def stored(self, _config: ModelConfig, ours: str) -> Stored:
        return Stored({ours: None})


FAMILIES: tuple[Family, ...] = (
    RotaryFamily("llama", "Llama", attention_bias="flag", mlp_bias_flag=True),
    RotaryFamily("arcee", "Arcee", mlp="relu2", attention_bias="flag", mlp_bias_flag=True),
    RotaryFamily("mistral", "Mistral", windows="all"),
    RotaryFamily("qwen2", "Qwen2", attention_bias="qkv", windows="by layer"),
    RotaryFamily("qwen3", "Qwen3", attention_bias="flag", windows="by layer", qk_norm=True),
    GPT2Family(),
    BertFamily(),
    BartFamily(),
    HeedFamily(),
)


def family_of(config: ModelConfig, purpose: str) -> Family:
    """The first family that holds the shape and has a model for the purpose."""
    return next(family for family in FAMILIES if purpose in family.classes and holds(family, config))


def holds(family: Family, config: ModelConfig) -> bool:
    """Whether the shape comes back unchanged from the family's spelling."""
    try:
        return ModelConfig.model_validate(family.from_hf(family.to_hf(config))) == config
    except (KeyError, ValueError, ValidationError):
        return False
