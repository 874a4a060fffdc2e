"""DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437), and Moonlight, which is written as V3 (arXiv 2502.16982)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from lm.config import ModelConfig, yarn_factor
from lm.families.family import Fields, Stored, expect
from lm.families.mixtures import SharedMixtureFamily
from lm.families.rotary import RotaryFamily

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class DeepseekV3Family(SharedMixtureFamily):
    """Latent attention (`lm.latent`) and a mixture with a bias per expert."""

    ROUTING: ClassVar[Fields] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}  # fields of DeepSeek's own code

    def to_hf(self, config: ModelConfig) -> Fields:
        if not config.kv_lora_rank:
            raise ValueError("a shape without latent attention")
        fields = super().to_hf(config)
        del fields["head_dim"]  # in transformers that of the positions
        return {
            **fields,
            **{name: getattr(config, name) for name in _SIZES},
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
            **{name: raw[name] for name in _SIZES},
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
