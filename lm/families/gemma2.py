"""Gemma 2 (arXiv 2408.00118), and Gemma 3 without its vision tower (arXiv 2503.19786)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from lm.config import ModelConfig
from lm.families.family import Fields, Stored, expect
from lm.families.rotary import OUTPUT_NORMS, RotaryFamily

_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


class Gemma2Family(RotaryFamily):
    """Gemma 2: RMSNorm before and after each branch, a sliding window in every second layer, and caps of scores and
    logits. Gemma 3 has RMSNorm of queries and keys instead of caps, and windows in five of six layers, with a rotary
    base of their own.

    Norms multiply by 1 + weight. Heed's weights are those sums, so that norms are the same in all families.
    """

    def to_hf(self, config: ModelConfig) -> Fields:
        fields, divisor = super().to_hf(config), config.query_pre_attn_scalar or config.head_dim
        fields["hidden_activation"] = fields.pop("hidden_act")
        if divisor % 1:
            raise ValueError(f"query_pre_attn_scalar is {divisor}; transformers expects a whole number")
        return {
            **fields,
            "query_pre_attn_scalar": int(divisor),
            **{name: getattr(config, name) or None for name in _CAPS},
        }

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        raw = {**self.defaults, **raw}
        expect(raw, "use_bidirectional_attention", False, None)
        expect(raw, "hidden_activation", self.hidden_act)
        return {
            **super().from_hf(raw),
            "norm_place": "sandwich",
            "scale_embedding": True,
            "query_pre_attn_scalar": raw["query_pre_attn_scalar"],
            **{name: raw[name] or 0.0 for name in _CAPS},
        }

    def stored(self, config: ModelConfig, ours: str) -> Stored:
        place = super().stored(config, ours)
        return replace(place, added=1.0) if ours.endswith("norm.weight") else place

    _INNER: ClassVar = {**RotaryFamily._INNER, **OUTPUT_NORMS, "mlp_norm": "pre_feedforward_layernorm"}
