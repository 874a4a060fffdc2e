"""BART (arXiv 1910.13461)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lm.config import ModelConfig
from lm.families.family import ACTIVATIONS, CLASSIC, Fields, Stored, activation_to_hf, expect


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
