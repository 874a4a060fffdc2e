"""T5 (arXiv 1910.10683), its version 1.1, and FLAN-T5."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lm.config import ModelConfig
from lm.families.family import Fields, Stored, expect

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
            "vocab_size": config.vocab_size,
            "n_positions": config.max_position_embeddings,
            "d_model": config.hidden_size,
            "d_kv": config.head_dim,
            "d_ff": config.intermediate_size,
            "num_layers": config.num_encoder_layers,
            "num_decoder_layers": config.num_hidden_layers,
            "num_heads": config.num_attention_heads,
            "relative_attention_num_buckets": config.relative_attention_num_buckets,
            "relative_attention_max_distance": config.relative_attention_max_distance,
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
        expect(raw, "is_gated_act", is_gated)
        expect(raw, "dense_act_fn", "gelu_new" if activation == "gated-gelu" else name)
        return {
            "kind": "encoder-decoder",
            "vocab_size": raw["vocab_size"],
            "max_position_embeddings": raw.get("n_positions", 512),
            "hidden_size": raw["d_model"],
            "num_hidden_layers": raw.get("num_decoder_layers") or raw["num_layers"],
            "num_encoder_layers": raw["num_layers"],
            "num_attention_heads": raw["num_heads"],
            "num_key_value_heads": raw["num_heads"],
            "head_dim": raw["d_kv"],
            "intermediate_size": raw["d_ff"],
            "mlp": _ACTIVATIONS[activation],
            "query_pre_attn_scalar": 1,
            "positions": "relative",
            "relative_attention_num_buckets": raw.get("relative_attention_num_buckets", 32),
            "relative_attention_max_distance": raw.get("relative_attention_max_distance", 128),
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
