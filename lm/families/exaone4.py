"""EXAONE 4 (arXiv 2507.11407)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lm.config import ModelConfig
from lm.families.family import Fields
from lm.families.rotary import OUTPUT_NORMS, RotaryFamily


class Exaone4Family(RotaryFamily):
    """RMSNorm of each branch's output, and of queries and keys. In its hybrid form, three of four layers have a sliding
    window, and the others no positions.
    """

    def to_hf(self, config: ModelConfig) -> Fields:
        is_hybrid = any(config.sliding_window) or config.layers_without_positions
        return {**super().to_hf(config), **({} if is_hybrid else {"sliding_window": None})}

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        fields = {**super().from_hf(raw), "norm_place": "output"}
        if {**self.defaults, **raw}["sliding_window"] is None:
            return fields
        bare = [layer for layer, window in enumerate(fields["sliding_window"]) if not window]
        return {**fields, "layers_without_positions": bare}

    _INNER: ClassVar = {**RotaryFamily._INNER, **OUTPUT_NORMS}
