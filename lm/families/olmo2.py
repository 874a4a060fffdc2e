"""OLMo 2 (arXiv 2501.00656)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lm.families.family import Fields
from lm.families.rotary import RotaryFamily


class Olmo2Family(RotaryFamily):
    """OLMo 2: RMSNorm of each branch's output instead of its input, and of all heads' queries or keys together."""

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        return {**super().from_hf(raw), "norm_place": "output", "qk_norm": True, "qk_norm_over": "projection"}

    _INNER: ClassVar = {
        **RotaryFamily._INNER,
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }
