"""Llama's descendants with mixtures of experts: Qwen3-MoE, OLMoE and Mixtral."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lm.config import ModelConfig
from lm.families.family import Fields, Stored, expect
from lm.families.rotary import RotaryFamily


class MixtureFamily(RotaryFamily):
    """A family of which some or all layers have experts; a checkpoint stores each expert's maps as its own tensors."""

    ROUTER: ClassVar = "mlp.gate"
    EXPERT: ClassVar = "mlp.experts.{}"
    MAPS: ClassVar = {"up": ("gate_proj", "up_proj"), "down": ("down_proj",)}

    def stored(self, config: ModelConfig, ours: str) -> Stored:
        _, _, layer, inner = ours.split(".", 3) if ".mlp." in ours else ("", "", "", "")
        if inner == "mlp.router.weight":
            return Stored({f"model.layers.{layer}.{self.ROUTER}.weight": None})
        if not inner.startswith("mlp.experts."):
            return super().stored(config, ours)
        kind = inner.split(".")[2]
        rows = config.moe_intermediate_size if kind == "up" else config.hidden_size
        experts = [f"model.layers.{layer}.{self.EXPERT.format(number)}" for number in range(config.num_experts)]
        return Stored({f"{expert}.{name}.weight": rows for expert in experts for name in self.MAPS[kind]})


class Qwen3MoeFamily(MixtureFamily):
    """Qwen3-MoE (arXiv 2505.09388)."""

    def to_hf(self, config: ModelConfig) -> Fields:
        return {
            **super().to_hf(config),
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
            "moe_intermediate_size": config.moe_intermediate_size,
            "norm_topk_prob": config.norm_topk_prob,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(config.mlp_only_layers),
        }

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        expect(raw, "use_sliding_window", False)
        fields, step = super().from_hf(raw), raw.get("decoder_sparse_step", 1)
        layers = range(fields["num_hidden_layers"])
        plain = {*(raw.get("mlp_only_layers") or ())} | {layer for layer in layers if (layer + 1) % step}
        return {
            **fields,
            "num_experts": raw.get("num_experts", raw.get("num_local_experts", 128)),  # transformers 5 writes the other
            "num_experts_per_tok": raw.get("num_experts_per_tok", 8),
            "moe_intermediate_size": raw.get("moe_intermediate_size", 768),
            "norm_topk_prob": raw.get("norm_topk_prob", False),
            "mlp_only_layers": sorted(plain),
        }


class OlmoeFamily(MixtureFamily):
    """OLMoE (arXiv 2409.02060): RMSNorm of all heads' queries or keys together, experts in every layer."""

    @property
    def classes(self) -> Mapping[str, str]:
        return {"language": "OlmoeForCausalLM"}  # transformers has no classifier of this family

    def to_hf(self, config: ModelConfig) -> Fields:
        fields = super().to_hf(config)
        del fields["head_dim"]  # hidden_size / num_attention_heads
        return {
            **fields,
            "intermediate_size": config.moe_intermediate_size,
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
            "norm_topk_prob": config.norm_topk_prob,
            "clip_qkv": None,
        }

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        expect(raw, "clip_qkv", None)
        return {
            **super().from_hf(raw),
            "qk_norm": True,
            "qk_norm_over": "projection",
            "num_experts": raw.get("num_experts", 64),
            "num_experts_per_tok": raw.get("num_experts_per_tok", 8),
            "moe_intermediate_size": raw["intermediate_size"],
            "norm_topk_prob": raw.get("norm_topk_prob", False),
        }


class MixtralFamily(MixtureFamily):
    """Mixtral (arXiv 2401.04088): experts in every layer, whose weights are divided by their sum."""

    ROUTER: ClassVar = "block_sparse_moe.gate"
    EXPERT: ClassVar = "block_sparse_moe.experts.{}"
    MAPS: ClassVar = {"up": ("w1", "w3"), "down": ("w2",)}

    def to_hf(self, config: ModelConfig) -> Fields:
        return {
            **super().to_hf(config),
            "intermediate_size": config.moe_intermediate_size,
            "num_local_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
        }

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        return {
            **super().from_hf(raw),
            "num_experts": raw.get("num_local_experts", 8),
            "num_experts_per_tok": raw.get("num_experts_per_tok", 2),
            "moe_intermediate_size": raw["intermediate_size"],
            "norm_topk_prob": True,
        }
