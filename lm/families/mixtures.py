"""Llama's descendants with mixtures of experts: Qwen2-MoE, Qwen3-MoE, OLMoE, Mixtral, gpt-oss, Granite-MoE, GLM-4.5,
DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437), and Moonlight, which is written as V3 (arXiv 2502.16982).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from lm.config import ModelConfig, yarn_factor
from lm.families.family import Fields, Stored, expect, read, written
from lm.families.rotary import GraniteFamily, RotaryFamily

_EXPERTS = {name: name for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")}
_QWEN3_MOE = {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False}  # if missing


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
            **written(config, _EXPERTS),
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
            **read({**_QWEN3_MOE, "num_experts": raw.get("num_local_experts", 128), **raw}, _EXPERTS),
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

    NAMES: ClassVar = {
        "n_routed_experts": "num_experts", "num_experts_per_tok": "num_experts_per_tok", "n_group": "n_group",
        "topk_group": "topk_group", "moe_intermediate_size": "moe_intermediate_size",
        "norm_topk_prob": "norm_topk_prob", "routed_scaling_factor": "routed_scaling_factor",
    }  # fmt: skip
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
            **written(config, self.NAMES),
            "n_shared_experts": config.shared_expert_intermediate_size // width,
            "first_k_dense_replace": len(config.mlp_only_layers),
            "num_nextn_predict_layers": 0,
        }

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        raw = {**self.defaults, **raw}
        return {
            **super().from_hf(raw),
            **read({**raw, **{name: raw.get(name) or 1 for name in ("n_group", "topk_group")}}, self.NAMES),
            "scoring_func": "sigmoid",
            "router_bias": True,
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

    NAMES: ClassVar = {
        "intermediate_size": "moe_intermediate_size", "num_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_tok", "norm_topk_prob": "norm_topk_prob",
    }  # fmt: skip

    def to_hf(self, config: ModelConfig) -> Fields:
        fields = super().to_hf(config)
        del fields["head_dim"]  # hidden_size / num_attention_heads
        return {
            **fields,
            **written(config, self.NAMES),
            "clip_qkv": None,
        }

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        expect(raw, "clip_qkv", None)
        return {
            **super().from_hf(raw),
            "qk_norm": True,
            "qk_norm_over": "projection",
            **read({"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, **raw}, self.NAMES),
        }


class MixtralFamily(MixtureFamily):
    """Mixtral (arXiv 2401.04088): experts in every layer, whose weights are divided by their sum."""

    ROUTER: ClassVar = "block_sparse_moe.gate"
    EXPERT: ClassVar = "block_sparse_moe.experts.{}"
    MAPS: ClassVar = {"up": ("w1", "w3"), "down": ("w2",)}
    NAMES: ClassVar = {
        "intermediate_size": "moe_intermediate_size", "num_local_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_tok",
    }  # fmt: skip

    def to_hf(self, config: ModelConfig) -> Fields:
        return {
            **super().to_hf(config),
            **written(config, self.NAMES),
        }

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        return {
            **super().from_hf(raw),
            **read({"num_local_experts": 8, "num_experts_per_tok": 2, **raw}, self.NAMES),
            "norm_topk_prob": True,
        }


# `rope_parameters` of a config without them.
_GPT_OSS_ROPE = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "original_max_position_embeddings": 4096}


class GptOssFamily(MixtralFamily):
    """gpt-oss (arXiv 2508.10925): attention with sinks, windows in every second layer, and experts with biases and a
    clamped SwiGLU. The fields are Mixtral's.

    Published checkpoints have their experts in MXFP4; Heed reads them, and writes plain numbers.
    """

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        expect(raw, "swiglu_alpha", 1.702)
        expect(raw, "swiglu_limit", 7.0)
        rope = {} if raw.get("rope_parameters") or raw.get("rope_scaling") else {"rope_parameters": _GPT_OSS_ROPE}
        raw = {"num_local_experts": 128, "num_experts_per_tok": 4, **raw, **rope}
        return {**super().from_hf(raw), "mlp_bias": True, "attention_sinks": True}

    def stored(self, config: ModelConfig, ours: str) -> Stored:
        _, _, layer, inner = (ours.split(".", 3) + [""] * 4)[:4]
        module = f"model.layers.{layer}"
        if inner == "attention.sinks":
            return Stored({f"{module}.self_attn.sinks": None})
        if inner.startswith("mlp.router."):
            return Stored({f"{module}.{inner}": None})
        if not inner.startswith("mlp.experts."):
            return super().stored(config, ours)
        _, _, kind, what = inner.split(".")
        name = {"up": "gate_up_proj", "down": "down_proj"}[kind] + ("_bias" if what == "bias" else "")
        return Stored(
            {f"{module}.mlp.experts.{name}": None},
            transposed=what == "weight",
            experts=config.num_experts,
            interleaved=kind == "up",
        )


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


_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class DeepseekV3Family(SharedMixtureFamily):
    """Latent attention (`lm.attention.LatentHeads`) and a mixture with a bias per expert."""

    ROUTING: ClassVar[Fields] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}  # fields of DeepSeek's own code

    def to_hf(self, config: ModelConfig) -> Fields:
        if not config.kv_lora_rank:
            raise ValueError("a shape without latent attention")
        fields = super().to_hf(config)
        del fields["head_dim"]  # in transformers that of the positions
        return {
            **fields,
            **{name: getattr(config, name) for name in _LATENT_SIZES},
            "q_lora_rank": config.q_lora_rank or None,
            "rope_interleave": config.rope_interleave,
        }

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        raw = {**self.defaults, **raw}
        raw["head_dim"] = raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"]
        for name, value in self.ROUTING.items():
            expect(raw, name, value)
        expect(raw, "moe_layer_freq", 1)
        return {
            **super().from_hf(raw),
            **{name: raw[name] for name in _LATENT_SIZES},
            "q_lora_rank": raw["q_lora_rank"] or 0,
            "rope_interleave": raw.get("rope_interleave", True),
        }

    def _rope_to(self, config: ModelConfig) -> Fields:
        rope, divisor = super()._rope_to(config), config.query_pre_attn_scalar
        if not divisor:
            return rope
        if rope["rope_type"] != "yarn" or rope["factor"] == 1:
            raise ValueError("transformers expects YaRN where scores have a scale of their own")
        scale = ((config.head_dim / divisor) ** 0.25 - 1) / (yarn_factor(rope["factor"]) - 1)
        return {**rope, "mscale_all_dim": round(scale, 12)}

    def _rope_from(self, raw: Mapping[str, Any]) -> Fields:
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        scale = rope.get("mscale_all_dim") or 0.0
        sharpening = yarn_factor(rope["factor"], scale) if scale else 1.0  # of scores: its square
        # Rounded, so that a number that is written and read again is the same.
        return {**super()._rope_from(raw), "query_pre_attn_scalar": float(f"{raw['head_dim'] / sharpening**4:.10g}")}

    def stored(self, config: ModelConfig, ours: str) -> Stored:
        if config.q_lora_rank and ours.endswith(".qkv.query.weight"):
            place = super().stored(config, ours)
            return replace(place, parts={name.replace("q_proj", "q_b_proj"): None for name in place.parts})
        return super().stored(config, ours)

    _INNER: ClassVar = {
        **RotaryFamily._INNER,
        "attention.qkv.query_latent": "self_attn.q_a_proj",
        "attention.qkv.query_norm": "self_attn.q_a_layernorm",
        "attention.qkv.query": "self_attn.q_proj",
        "attention.qkv.latent": "self_attn.kv_a_proj_with_mqa",
        "attention.qkv.latent_norm": "self_attn.kv_a_layernorm",
        "attention.qkv.key_value": "self_attn.kv_b_proj",
    }


class DeepseekV2Family(DeepseekV3Family):
    """Latent attention and a mixture with a softmax, whose weights are not divided by their sum."""

    ROUTING: ClassVar[Fields] = {"scoring_func": "softmax", "norm_topk_prob": False}

    def to_hf(self, config: ModelConfig) -> Fields:
        method = "group_limited_greedy" if config.n_group > 1 else "greedy"
        return {**super().to_hf(config), "topk_method": method}

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        expect(raw, "topk_method", "greedy", "group_limited_greedy")
        expect(raw, "rope_interleave", True)
        groups = {} if raw.get("topk_method") == "group_limited_greedy" else {"n_group": 1, "topk_group": 1}
        return {**super().from_hf({**raw, **groups}), "scoring_func": "softmax", "router_bias": False}
