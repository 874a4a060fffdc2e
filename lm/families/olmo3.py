"""OLMo 3 (arXiv 2512.13961)."""

from collections.abc import Mapping
from typing import Any

from lm.config import ModelConfig
from lm.families.family import Fields
from lm.families.rotary import Olmo2Family, layer_types_to_hf, ropes_from_hf, ropes_to_hf, windows_from_hf

_THETA = 500_000.0
_WINDOW = 4096


class Olmo3Family(Olmo2Family):
    """OLMo 2 with a sliding window in three of four layers, whose rotary frequencies are not stretched."""

    def to_hf(self, config: ModelConfig) -> Fields:
        window = max(config.sliding_window) or _WINDOW  # transformers makes its mask in any case
        return {**super().to_hf(config), "sliding_window": window, "layer_types": layer_types_to_hf(config)}

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        fields = super().from_hf(raw)
        local = fields["rope_local_base_freq"] if any(fields["sliding_window"]) else 0.0
        return {**fields, "rope_local_base_freq": local}

    def _rope_to(self, config: ModelConfig) -> Fields:
        return ropes_to_hf(config)

    def _rope_from(self, raw: Mapping[str, Any]) -> Fields:
        return ropes_from_hf(raw, raw.get("rope_theta", _THETA), _THETA)

    def _windows_from(self, raw: Mapping[str, Any]) -> list[int]:
        return windows_from_hf({"sliding_window": _WINDOW, **raw}, every=4)
