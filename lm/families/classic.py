"""Families before Llama: GPT-2 (Radford et al., 2019), BERT (arXiv 1810.04805), BART (arXiv 1910.13461), and T5 (arXiv
1910.10683) with its version 1.1 and FLAN-T5.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from lm.config import ModelConfig
from lm.families.family import ACTIVATIONS, CLASSIC, SIZES, Fields, Stored, activation_to_hf, expect, read, written


class GPT2Family:
    """GPT-2: LayerNorm before each branch, learned positions, biases everywhere, matrices stored as (in, out)."""

    model_type = "gpt2"
    classes: ClassVar = {"language": "GPT2LMHeadModel", "score": "GPT2ForSequenceClassification"}

    def to_hf(self, config: ModelConfig) -> Fields:
        return {
            **written(config, self._NAMES),
            "n_inner": config.intermediate_size,
            "activation_function": activation_to_hf(config),
            "layer_norm_epsilon": config.norm_eps,
            "tie_word_embeddings": config.tie_word_embeddings,
        }

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        expect(raw, "activation_function", *ACTIVATIONS)
        expect(raw, "scale_attn_weights", True)
        expect(raw, "scale_attn_by_inverse_layer_idx", False)
        expect(raw, "add_cross_attention", False)
        return {
            **read(raw, self._NAMES),
            "num_key_value_heads": raw["n_head"],
            "intermediate_size": raw.get("n_inner") or 4 * raw["n_embd"],
            "mlp": ACTIVATIONS[raw.get("activation_function", "gelu_new")],
            **CLASSIC,
            "norm_eps": raw["layer_norm_epsilon"],
            "tie_word_embeddings": raw.get("tie_word_embeddings", True),
        }

    def stored(self, _config: ModelConfig, ours: str) -> Stored:
        module, _, kind = ours.rpartition(".")
        if not module.startswith("decoder.blocks."):
            return Stored({f"{self._OUTER[module]}.{kind}": None})
        _, _, layer, inner = module.split(".", 3)
        is_matrix = kind == "weight" and "norm" not in inner
        return Stored({f"transformer.h.{layer}.{self._INNER[inner]}.{kind}": None}, transposed=is_matrix)

    _NAMES: ClassVar = {
        "vocab_size": "vocab_size", "n_positions": "max_position_embeddings", "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    }  # fmt: skip
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
    """BERT: an encoder with LayerNorm after each branch, learned positions and token types, biases everywhere."""

    model_type = "bert"
    classes: ClassVar = {
        "body": "BertModel",
        "masked": "BertForMaskedLM",
        "next": "BertForPreTraining",
        "sequence": "BertForSequenceClassification",
        "token": "BertForTokenClassification",
        "span": "BertForQuestionAnswering",
    }

    def to_hf(self, config: ModelConfig) -> Fields:
        return {
            **written(config, self._NAMES),
            "hidden_act": activation_to_hf(config),
            "layer_norm_eps": config.norm_eps,
            "type_vocab_size": config.type_vocab_size,
            "tie_word_embeddings": config.tie_word_embeddings,
        }

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        expect(raw, "hidden_act", *ACTIVATIONS)
        expect(raw, "position_embedding_type", "absolute", None)
        expect(raw, "is_decoder", False)
        expect(raw, "add_cross_attention", False)
        if not raw["type_vocab_size"]:
            raise ValueError("type_vocab_size is 0; at least 1 was expected")
        return {
            "kind": "encoder",
            **read(raw, self._NAMES),
            "num_key_value_heads": raw["num_attention_heads"],
            "mlp": ACTIVATIONS[raw.get("hidden_act", "gelu")],
            **CLASSIC,
            "type_vocab_size": raw["type_vocab_size"],
            "embedding_norm": True,
            "norm_place": "post",
            "norm_eps": raw["layer_norm_eps"],
            "tie_word_embeddings": raw.get("tie_word_embeddings", True),
        }

    def stored(self, config: ModelConfig, ours: str) -> Stored:
        if ours == "head.bias" and config.tie_word_embeddings:  # an untied head has a bias of its own
            return Stored({"cls.predictions.bias": None})
        module, _, kind = ours.rpartition(".")
        if not module.startswith("encoder.blocks."):
            return Stored({f"{self._OUTER[module]}.{kind}": None})
        _, _, layer, inner = module.split(".", 3)
        if inner == "attention.qkv":
            rows = config.num_attention_heads * config.head_dim
            names: Mapping[str, int | None] = {f"attention.self.{part}": rows for part in ("query", "key", "value")}
        else:
            names = {self._INNER[inner]: None}
        return Stored({f"bert.encoder.layer.{layer}.{name}.{kind}": rows for name, rows in names.items()})

    _NAMES: ClassVar = {name: name for name in SIZES if name not in ("num_key_value_heads", "head_dim")}
    _OUTER: ClassVar = {
        "encoder.embedding": "bert.embeddings.word_embeddings",
        "encoder.positions": "bert.embeddings.position_embeddings",
        "encoder.token_types": "bert.embeddings.token_type_embeddings",
        "encoder.embedding_norm": "bert.embeddings.LayerNorm",
        "transform": "cls.predictions.transform.dense",
        "transform_norm": "cls.predictions.transform.LayerNorm",
        "head": "cls.predictions.decoder",
        "pooler": "bert.pooler.dense",
        "next_sentence": "cls.seq_relationship",
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
    """BART: an encoder-decoder with LayerNorm after each branch and learned positions that count from 2.

    If `transformers` does not tie the head, it does not share the embedding either; Heed always shares it.
    """

    model_type = "bart"
    classes: ClassVar = {"translate": "BartForConditionalGeneration"}

    def to_hf(self, config: ModelConfig) -> Fields:
        stacks = {"encoder": config.num_encoder_layers, "decoder": config.num_hidden_layers}
        fields: Fields = {
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_position_embeddings,
            "d_model": config.hidden_size,
            "activation_function": activation_to_hf(config),
            "scale_embedding": config.scale_embedding,
            "num_hidden_layers": config.num_encoder_layers,
            "is_encoder_decoder": True,
            "tie_word_embeddings": config.tie_word_embeddings,
        }
        for stack, num_layers in stacks.items():
            fields |= {
                f"{stack}_layers": num_layers,
                f"{stack}_attention_heads": config.num_attention_heads,
                f"{stack}_ffn_dim": config.intermediate_size,
            }
        return fields

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        expect(raw, "activation_function", *ACTIVATIONS)
        expect(raw, "tie_word_embeddings", True)
        for field in ("attention_heads", "ffn_dim"):
            expect(raw, f"decoder_{field}", raw[f"encoder_{field}"])
        return {
            "kind": "encoder-decoder",
            "vocab_size": raw["vocab_size"],
            "max_position_embeddings": raw["max_position_embeddings"],
            "hidden_size": raw["d_model"],
            "num_hidden_layers": raw["decoder_layers"],
            "num_encoder_layers": raw["encoder_layers"],
            "num_attention_heads": raw["encoder_attention_heads"],
            "num_key_value_heads": raw["encoder_attention_heads"],
            "intermediate_size": raw["encoder_ffn_dim"],
            "mlp": ACTIVATIONS[raw.get("activation_function", "gelu")],
            **CLASSIC,
            "embedding_norm": True,
            "scale_embedding": raw.get("scale_embedding", False),
            "norm_place": "post",
            "norm_eps": 1e-5,
            "tie_word_embeddings": True,
        }

    def stored(self, config: ModelConfig, ours: str) -> Stored:
        module, _, kind = ours.rpartition(".")
        if ".blocks." not in module:
            name = self._OUTER[module]
            return Stored({f"{name}.{kind}": None}, rows_before=2 if "positions" in module else 0)
        stack, _, layer, inner = module.split(".", 3)
        rows = config.num_attention_heads * config.head_dim
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


_T5 = {"n_positions": 512, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}  # if missing
# Names of `feed_forward_proj`, and Heed's; version 1.1's "gelu" is the approximation by tanh.
_ACTIVATIONS = {
    "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gated-gelu": "geglu", "gated-silu": "swiglu",
}  # fmt: skip


class T5Family:
    """T5: an encoder-decoder with RMSNorm before each branch, no biases, scores that nothing divides, and a bias per
    head and relative distance, which all layers of a stack share.

    A head that shares the embedding (version 1.0) reads states divided by √d_model; the decoder's last norm does that
    in Heed. A head of its own (version 1.1) reads them as they are. Since version 5, transformers makes such a T5 with
    a head that shares the embedding and is not stored; in Heed it begins as a copy of the embedding.
    """

    model_type = "t5"
    classes: ClassVar = {"translate": "T5ForConditionalGeneration"}

    def to_hf(self, config: ModelConfig) -> Fields:
        return {
            **written(config, self._NAMES),
            "feed_forward_proj": {ours: theirs for theirs, ours in _ACTIVATIONS.items()}[config.mlp],
            "layer_norm_epsilon": config.norm_eps,
            "is_encoder_decoder": True,
            "tie_word_embeddings": config.tie_word_embeddings,
            "scale_decoder_outputs": config.tie_word_embeddings,
        }

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        activation = raw.get("feed_forward_proj", "relu")
        expect({"feed_forward_proj": activation}, "feed_forward_proj", *_ACTIVATIONS)
        is_gated, name = activation.startswith("gated-"), activation.removeprefix("gated-")
        decoder_layers = raw.get("num_decoder_layers") or raw["num_layers"]
        expect(raw, "is_gated_act", is_gated)
        expect(raw, "dense_act_fn", "gelu_new" if activation == "gated-gelu" else name)
        return {
            "kind": "encoder-decoder",
            **read({**_T5, **raw, "num_decoder_layers": decoder_layers}, self._NAMES),
            "num_key_value_heads": raw["num_heads"],
            "mlp": _ACTIVATIONS[activation],
            "query_pre_attn_scalar": 1,
            "positions": "relative",
            "norm_eps": raw.get("layer_norm_epsilon", 1e-6),
            # Since version 5, transformers writes that all heads are tied, and this field for those that are not.
            "tie_word_embeddings": raw.get("scale_decoder_outputs", raw.get("tie_word_embeddings") is not False),
        }

    def stored(self, config: ModelConfig, ours: str) -> Stored:
        module, _, kind = ours.rpartition(".")
        if ".blocks." not in module:
            is_scaled = module == "decoder.norm" and config.tie_word_embeddings
            return Stored(
                {f"{self._OUTER[module]}.{kind}": None},
                factor=config.hidden_size**-0.5 if is_scaled else 1.0,
                otherwise=Stored({"shared.weight": None}) if module == "head" else None,
            )
        stack, _, layer, inner = module.split(".", 3)
        place, names = self._INNER[inner]
        rows = config.num_attention_heads * config.head_dim
        if inner == "mlp.up" and config.is_gated:
            names, rows = ("wi_0", "wi_1"), config.intermediate_size
        branch = f"{stack}.block.{layer}.layer.{place.format(mlp=2 if stack == 'decoder' else 1)}"
        return Stored({f"{branch}.{name}.{kind}": rows if len(names) > 1 else None for name in names})

    _NAMES: ClassVar = {
        "vocab_size": "vocab_size", "n_positions": "max_position_embeddings", "d_model": "hidden_size",
        "d_kv": "head_dim", "d_ff": "intermediate_size", "num_layers": "num_encoder_layers",
        "num_decoder_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
        "relative_attention_num_buckets": "relative_attention_num_buckets",
        "relative_attention_max_distance": "relative_attention_max_distance",
    }  # fmt: skip
    _OUTER: ClassVar = {
        "encoder.embedding": "shared",
        "encoder.relative_bias": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
        "decoder.relative_bias": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
        "encoder.norm": "encoder.final_layer_norm",
        "decoder.norm": "decoder.final_layer_norm",
        "head": "lm_head",
    }
    _INNER: ClassVar = {
        "attention_norm": ("0", ("layer_norm",)),
        "attention.qkv": ("0.SelfAttention", ("q", "k", "v")),
        "attention.out": ("0.SelfAttention", ("o",)),
        "cross_norm": ("1", ("layer_norm",)),
        "cross.query": ("1.EncDecAttention", ("q",)),
        "cross.key_value": ("1.EncDecAttention", ("k", "v")),
        "cross.out": ("1.EncDecAttention", ("o",)),
        "mlp_norm": ("{mlp}", ("layer_norm",)),
        "mlp.up": ("{mlp}.DenseReluDense", ("wi",)),
        "mlp.down": ("{mlp}.DenseReluDense", ("wo",)),
    }
