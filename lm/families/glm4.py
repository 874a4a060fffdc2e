"""GLM-4 of 2025, such as GLM-4-9B-0414 (arXiv 2406.12793 and its model card)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lm.families.family import Fields
from lm.families.rotary import RotaryFamily

_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5}


class Glm4Family(RotaryFamily):
    """RMSNorm before and after each branch; rotary positions turn neighbouring dimensions of half of each head."""

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        return {**super().from_hf({**_DEFAULTS, **raw}), "norm_place": "sandwich", "rope_interleave": True}

    _WHOLE: ClassVar = ("mlp.up",)
    _INNER: ClassVar = {
        **RotaryFamily._INNER,
        "attention_output_norm": "post_self_attn_layernorm",
        "mlp.up": "mlp.gate_up_proj",
        "mlp_output_norm": "post_mlp_layernorm",
    }
