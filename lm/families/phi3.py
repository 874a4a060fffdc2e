"""Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905)."""

from collections.abc import Mapping
from typing import Any

from lm.config import ModelConfig
from lm.families.family import Fields, Stored
from lm.families.rotary import RotaryFamily, rope_from_hf, rope_to_hf


class Phi3Family(RotaryFamily):
    """Phi-3 and Phi-4: one tensor for Q, K and V and one for gate and up, and rotary positions for a part of each head.

    The long contexts of Phi-3 (128k) and Phi-4-mini are refused: their rope_type, "longrope", has other frequencies for
    rows that are longer than the original context.
    """

    def to_hf(self, config: ModelConfig) -> Fields:
        if config.rope_scaling is not None:
            raise ValueError("transformers refuses scaled rotary positions in this family")
        rope = {**rope_to_hf(config), "partial_rotary_factor": config.partial_rotary_factor}
        return {**super().to_hf(config), "rope_parameters": rope}

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        rope = dict(raw.get("rope_parameters") or {})
        part = rope.pop("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
        whole = {**raw, "rope_parameters": rope}
        scaling = rope_from_hf(whole, kinds=())
        return {**super().from_hf(whole), **scaling, "partial_rotary_factor": part}

    def stored(self, config: ModelConfig, ours: str) -> Stored:
        for inner, theirs in (("attention.qkv", "self_attn.qkv_proj"), ("mlp.up", "mlp.gate_up_proj")):
            if f".{inner}." in ours:
                _, _, layer, *_ = ours.split(".")
                return Stored({f"model.layers.{layer}.{theirs}.weight": None})
        return super().stored(config, ours)
