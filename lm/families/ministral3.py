"""Ministral 3 without its vision tower (Mistral AI, 2025)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lm.config import ModelConfig
from lm.families.family import Fields, expect
from lm.families.rotary import RotaryFamily

_BETA = "llama_4_scaling_beta"


class Ministral3Family(RotaryFamily):
    """Mistral with YaRN, whose queries grow with each length of the original context."""

    def _rope_to(self, config: ModelConfig) -> Fields:
        rope, scaling = super()._rope_to(config), config.rope_scaling
        if scaling is None:
            raise ValueError("transformers expects YaRN in this family")
        if rope.get("attention_factor") == 1:  # as it is published
            del rope["attention_factor"]
            rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
        return {**rope, _BETA: scaling.llama_4_scaling_beta}

    def _rope_from(self, raw: Mapping[str, Any]) -> Fields:
        fields, rope = super()._rope_from(raw), raw["rope_parameters"]
        expect({"rope_type": rope.get("rope_type", rope.get("type"))}, "rope_type", *self._SCALINGS)
        return {**fields, "rope_scaling": {**fields["rope_scaling"], _BETA: rope[_BETA]}}

    _SCALINGS: ClassVar = ("yarn",)
