"""SmolLM3 (Hugging Face, 2025)."""

from collections.abc import Mapping
from typing import Any

from lm.config import ModelConfig
from lm.families.family import Fields
from lm.families.rotary import RotaryFamily

_DEFAULTS = {"num_key_value_heads": 4, "no_rope_layer_interval": 4, "tie_word_embeddings": True, "rope_theta": 2e6}


class SmolLM3Family(RotaryFamily):
    """Llama without positions in every fourth layer (arXiv 2501.18795)."""

    def to_hf(self, config: ModelConfig) -> Fields:
        fields, bare = super().to_hf(config), config.layers_without_positions
        del fields["max_window_layers"]
        return {**fields, "no_rope_layers": [int(n not in bare) for n in range(config.num_hidden_layers)]}

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        raw = {**_DEFAULTS, **raw}
        every, layers = raw["no_rope_layer_interval"], range(raw["num_hidden_layers"])
        turned = raw.get("no_rope_layers") or [(layer + 1) % every for layer in layers]
        bare = [layer for layer in layers if not turned[layer]]
        kinds = raw.get("layer_types") or ["sliding_attention" if n in bare else "full_attention" for n in layers]
        return {**super().from_hf({**raw, "layer_types": kinds}), "layers_without_positions": bare}
