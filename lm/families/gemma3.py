"""Gemma 3 without its vision tower (arXiv 2503.19786)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from lm.config import ModelConfig
from lm.families.family import Fields, Stored, expect
from lm.families.rotary import RotaryFamily, rope_from_hf, rope_to_hf

_DEFAULTS = {
    "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "sliding_window_pattern": 6, "tie_word_embeddings": True, "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip


class Gemma3Family(RotaryFamily):
    """Gemma 3: RMSNorm before and after each branch, and of queries and keys; most layers have a sliding window, with a
    rotary base of their own.

    Norms multiply by 1 + weight. Heed's weights are those sums, so that norms are the same in all families.
    """

    @property
    def classes(self) -> Mapping[str, str]:
        return {"language": "Gemma3ForCausalLM", "score": "Gemma3TextForSequenceClassification"}

    def to_hf(self, config: ModelConfig) -> Fields:
        fields = super().to_hf(config)
        fields["hidden_activation"] = fields.pop("hidden_act")
        local = {"rope_type": "default", "rope_theta": config.rope_local_base_freq or 10_000.0}
        windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
        return {
            **fields,
            "rope_parameters": {"full_attention": rope_to_hf(config), "sliding_attention": local},
            "query_pre_attn_scalar": config.query_pre_attn_scalar or config.head_dim,
            "sliding_window": max(windows) or _DEFAULTS["sliding_window"],  # transformers makes its mask in any case
            "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        }

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        raw = {**_DEFAULTS, **raw}
        for field in ("attn_logit_softcapping", "final_logit_softcapping"):
            expect(raw, field, None)
        expect(raw, "use_bidirectional_attention", False, None)
        expect(raw, "hidden_activation", self.hidden_act)
        ropes = raw.get("rope_parameters") or {}
        local = {"rope_theta": raw["rope_local_base_freq"], **(ropes.get("sliding_attention") or {})}
        everywhere = {
            "rope_theta": raw["rope_theta"],
            **(ropes.get("full_attention") or {}),
            **(raw.get("rope_scaling") or {}),
        }
        local_theta = rope_from_hf({"rope_parameters": local}, kinds=())["rope_theta"]
        fields = super().from_hf({**raw, "rope_parameters": everywhere})
        return {
            **fields,
            "norm_place": "sandwich",
            "qk_norm": True,
            "scale_embedding": True,
            "query_pre_attn_scalar": raw["query_pre_attn_scalar"],
            "rope_local_base_freq": local_theta if any(fields["sliding_window"]) else 0.0,
        }

    def _windows_from(self, raw: Mapping[str, Any]) -> list[int]:
        every, window = raw["sliding_window_pattern"], raw["sliding_window"] or 0
        by_default = [
            "sliding_attention" if (layer + 1) % every else "full_attention"
            for layer in range(raw["num_hidden_layers"])
        ]
        return [window if kind == "sliding_attention" else 0 for kind in raw.get("layer_types") or by_default]

    def stored(self, config: ModelConfig, ours: str) -> Stored:
        place = super().stored(config, ours)
        return replace(place, added=1.0) if ours.endswith("norm.weight") else place

    _INNER: ClassVar = {
        **RotaryFamily._INNER,
        "attention_output_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }
