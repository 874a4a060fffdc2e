"""GPT-2 (Radford et al., 2019)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lm.config import ModelConfig
from lm.families.family import ACTIVATIONS, CLASSIC, Fields, Stored, activation_to_hf, expect


class GPT2Family:
    """GPT-2: LayerNorm before each branch, learned positions, biases everywhere, matrices stored as (in, out)."""

    model_type = "gpt2"
    classes: ClassVar = {"language": "GPT2LMHeadModel", "score": "GPT2ForSequenceClassification"}

    def to_hf(self, config: ModelConfig) -> Fields:
        return {
            "vocab_size": config.vocab_size,
            "n_positions": config.max_position_embeddings,
            "n_embd": config.hidden_size,
            "n_layer": config.num_hidden_layers,
            "n_head": config.num_attention_heads,
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
            "vocab_size": raw["vocab_size"],
            "max_position_embeddings": raw["n_positions"],
            "hidden_size": raw["n_embd"],
            "num_hidden_layers": raw["n_layer"],
            "num_attention_heads": raw["n_head"],
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
