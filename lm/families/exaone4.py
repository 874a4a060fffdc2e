"""EXAONE 4 (arXiv 2507.11407)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lm.config import ModelConfig
from lm.families.family import Fields
from lm.families.rotary import OUTPUT_NORMS, RotaryFamily, layer_types_to_hf, windows_from_hf

_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4}


class Exaone4Family(RotaryFamily):
    """RMSNorm of each branch's output, and of queries and keys. In its hybrid form, three of four layers have a sliding
    window, and the others no positions.
    """

    def to_hf(self, config: ModelConfig) -> Fields:
        is_hybrid = any(config.sliding_window) or config.layers_without_positions
        window = max(config.sliding_window) or _DEFAULTS["sliding_window"]
        return {
            **super().to_hf(config),
            "sliding_window": window if is_hybrid else None,
            "layer_types": layer_types_to_hf(config),
        }

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        raw = {**_DEFAULTS, **raw}
        fields = {**super().from_hf(raw), "norm_place": "output"}
        if raw["sliding_window"] is None:
            return fields
        bare = [layer for layer, window in enumerate(fields["sliding_window"]) if not window]
        return {**fields, "layers_without_positions": bare}

    def _windows_from(self, raw: Mapping[str, Any]) -> list[int]:
        pattern = raw["sliding_window_pattern"]  # "LLLG" = 4
        return windows_from_hf(raw, every=len(pattern) if isinstance(pattern, str) else pattern or 1)

    _INNER: ClassVar = {**RotaryFamily._INNER, **OUTPUT_NORMS}
