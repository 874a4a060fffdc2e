"""BERT (arXiv 1810.04805)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lm.config import ModelConfig
from lm.families.family import ACTIVATIONS, CLASSIC, Fields, Stored, activation_to_hf, expect


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
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_position_embeddings,
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_hidden_layers,
            "num_attention_heads": config.num_attention_heads,
            "intermediate_size": config.intermediate_size,
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
            "vocab_size": raw["vocab_size"],
            "max_position_embeddings": raw["max_position_embeddings"],
            "hidden_size": raw["hidden_size"],
            "num_hidden_layers": raw["num_hidden_layers"],
            "num_attention_heads": raw["num_attention_heads"],
            "num_key_value_heads": raw["num_attention_heads"],
            "intermediate_size": raw["intermediate_size"],
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
