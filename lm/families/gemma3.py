"""Gemma 3 without its vision tower (arXiv 2503.19786)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lm.config import ModelConfig
from lm.families.family import Fields
from lm.families.gemma2 import Gemma2Family
from lm.families.rotary import ropes_from_hf, ropes_to_hf


class Gemma3Family(Gemma2Family):
    """Gemma 2 with RMSNorm of queries and keys instead of caps; five of six layers have a sliding window, with a rotary
    base of their own.
    """

    @property
    def classes(self) -> Mapping[str, str]:
        return {"language": "Gemma3ForCausalLM", "score": "Gemma3TextForSequenceClassification"}

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        fields = super().from_hf(raw)
        local = fields["rope_local_base_freq"] if any(fields["sliding_window"]) else 0.0
        return {**fields, "rope_local_base_freq": local}

    def _rope_to(self, config: ModelConfig) -> Fields:
        return ropes_to_hf(config)

    def _rope_from(self, raw: Mapping[str, Any]) -> Fields:
        return ropes_from_hf(raw, raw["rope_theta"], raw["rope_local_base_freq"])

    _DEFAULTS: ClassVar = {
        **Gemma2Family._DEFAULTS, "sliding_window_pattern": 6, "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0, "attn_logit_softcapping": None, "final_logit_softcapping": None,
    }  # fmt: skip
