"""Granite 3 (IBM, 2024)."""

from collections.abc import Mapping
from typing import Any

from lm.config import ModelConfig
from lm.families.family import Fields
from lm.families.rotary import RotaryFamily

_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")


class GraniteFamily(RotaryFamily):
    """Llama with factors on embeddings, scores, branches and logits (µP, arXiv 2203.03466)."""

    @property
    def classes(self) -> Mapping[str, str]:
        return {"language": "GraniteForCausalLM"}  # transformers has no classifier of this family

    def to_hf(self, config: ModelConfig) -> Fields:
        return {
            **super().to_hf(config),
            "attention_multiplier": (config.query_pre_attn_scalar or config.head_dim) ** -0.5,
            **{name: getattr(config, name) for name in _MULTIPLIERS},
        }

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        # Rounded, so that a number that is written and read again is the same.
        divisor = float(f"{raw.get('attention_multiplier', 1.0) ** -2:.12g}")
        factors = {name: raw.get(name, 1.0) for name in _MULTIPLIERS}
        return {**super().from_hf(raw), "query_pre_attn_scalar": divisor, **factors}
