"""Llama's descendants with mixtures of experts: Qwen2-MoE, Qwen3-MoE, OLMoE, Mixtral, GLM-4.5; DeepSeek's mixture."""

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
    OTHERS: ClassVar[Mapping[str, str]] = {}  # where other tensors of a mixture are

    def stored(self, config: ModelConfig, ours: str) -> Stored:
        _, _, layer, inner = ours.split(".", 3) if ".mlp." in ours else ("", "", "", "")
        if inner == "mlp.router.weight":
            return Stored({f"model.layers.{layer}.{self.ROUTER}.weight": None})
        if inner in self.OTHERS:
            return Stored({f"model.layers.{layer}.{self.OTHERS[inner]}": None})
        if inner == "mlp.shared.up.weight":
            shared, width = self.OTHERS["mlp.shared"], config.shared_expert_intermediate_size
            return Stored({f"model.layers.{layer}.{shared}.{name}.weight": width for name in self.MAPS["up"]})
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


class Qwen2MoeFamily(Qwen3MoeFamily):
    """Qwen2-MoE (arXiv 2407.10671): a shared expert, which each token multiplies by a sigmoid."""

    OTHERS: ClassVar = {
        "mlp.shared": "mlp.shared_expert",
        "mlp.shared.down.weight": "mlp.shared_expert.down_proj.weight",
        "mlp.shared_gate.weight": "mlp.shared_expert_gate.weight",
    }

    def to_hf(self, config: ModelConfig) -> Fields:
        return {
            **super().to_hf(config),
            "qkv_bias": config.attention_bias == "qkv",
            "shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        }

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        defaults = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "head_dim": None}
        return {
            **super().from_hf({**defaults, **raw}),
            "attention_bias": "qkv" if raw.get("qkv_bias", True) else "none",
            "shared_expert_intermediate_size": raw.get("shared_expert_intermediate_size", 5632),
            "shared_expert_gate": True,
        }


class SharedMixtureFamily(MixtureFamily):
    """DeepSeek's mixture: after a few plain layers, experts in groups and an MLP that every token uses. Layers that
    predict more than the next token are not read.
    """

    OTHERS: ClassVar = {
        "mlp.choice_bias": "mlp.gate.e_score_correction_bias",
        "mlp.shared": "mlp.shared_experts",
        "mlp.shared.down.weight": "mlp.shared_experts.down_proj.weight",
    }

    def to_hf(self, config: ModelConfig) -> Fields:
        width = config.moe_intermediate_size
        if not width or not config.shared_expert_intermediate_size:
            raise ValueError("a shape without experts, or without one that every token uses")
        return {
            **super().to_hf(config),
            "n_routed_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
            "n_group": config.n_group,
            "topk_group": config.topk_group,
            "moe_intermediate_size": width,
            "norm_topk_prob": config.norm_topk_prob,
            "routed_scaling_factor": config.routed_scaling_factor,
            "n_shared_experts": config.shared_expert_intermediate_size // width,
            "first_k_dense_replace": len(config.mlp_only_layers),
            "num_nextn_predict_layers": 0,
        }

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        raw = {**self.defaults, **raw}
        return {
            **super().from_hf(raw),
            "num_experts": raw["n_routed_experts"],
            "num_experts_per_tok": raw["num_experts_per_tok"],
            "n_group": raw.get("n_group") or 1,
            "topk_group": raw.get("topk_group") or 1,
            "moe_intermediate_size": raw["moe_intermediate_size"],
            "norm_topk_prob": raw["norm_topk_prob"],
            "scoring_func": "sigmoid",
            "router_bias": True,
            "routed_scaling_factor": raw["routed_scaling_factor"],
            "shared_expert_intermediate_size": (raw["n_shared_experts"] or 0) * raw["moe_intermediate_size"],
            "mlp_only_layers": list(range(raw["first_k_dense_replace"])),
        }


class Glm4MoeFamily(SharedMixtureFamily):
    """GLM-4.5 and 4.6 (arXiv 2508.06471)."""

    def to_hf(self, config: ModelConfig) -> Fields:
        return {**super().to_hf(config), "use_qk_norm": config.qk_norm}

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        return {**super().from_hf(raw), "qk_norm": raw.get("use_qk_norm", False)}


class OlmoeFamily(MixtureFamily):
    """OLMoE (arXiv 2409.02060): RMSNorm of all heads' queries or keys together, experts in every layer."""

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
