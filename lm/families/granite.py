"""Granite 3 and Granite-MoE (IBM, 2024)."""

from collections.abc import Mapping
from typing import Any

from lm.config import ModelConfig
from lm.families.family import Fields, Stored
from lm.families.mixtures import MixtralFamily
from lm.families.rotary import RotaryFamily

_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")


class GraniteFamily(RotaryFamily):
    """Llama with factors on embeddings, scores, branches and logits (µP, arXiv 2203.03466)."""

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


class GraniteMoeFamily(GraniteFamily, MixtralFamily):
    """Granite with Mixtral's experts, stored whole; in Granite-MoE-Shared, each token also uses an MLP of
    `shared_intermediate_size`.
    """

    def to_hf(self, config: ModelConfig) -> Fields:
        shared = config.shared_expert_intermediate_size
        return {
            **super().to_hf(config),
            **({"shared_intermediate_size": shared} if self.model_type == "granitemoeshared" else {}),
        }

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        return {
            **super().from_hf(raw),
            "shared_expert_intermediate_size": raw.get("shared_intermediate_size", 0),
        }

    def stored(self, config: ModelConfig, ours: str) -> Stored:
        before, _, inner = ours.partition(".mlp.")
        module, _, kind = inner.rpartition(".")
        if not module:
            return super().stored(config, ours)
        layer, experts = before.rpartition(".")[2], config.num_experts if module.startswith("experts.") else 0
        return Stored({f"model.layers.{layer}.{_OF_MIXTURE[module]}.{kind}": None}, experts=experts)


_OF_MIXTURE = {
    "router": "block_sparse_moe.router.layer",
    "experts.up": "block_sparse_moe.input_linear",
    "experts.down": "block_sparse_moe.output_linear",
    "shared.up": "shared_mlp.input_linear",
    "shared.down": "shared_mlp.output_linear",
}
