"""gpt-oss (arXiv 2508.10925)."""

from collections.abc import Mapping
from typing import Any

from lm.config import ModelConfig
from lm.families.family import Fields, Stored, expect
from lm.families.rotary import RotaryFamily

_DEFAULTS = {"attention_bias": True, "head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128}
# `rope_parameters` of a config without them.
_ROPE = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "original_max_position_embeddings": 4096}


class GptOssFamily(RotaryFamily):
    """gpt-oss: attention with sinks, windows in every second layer, and experts with biases and a clamped SwiGLU.

    Published checkpoints have their experts in MXFP4; Heed reads them, and writes plain numbers.
    """

    def to_hf(self, config: ModelConfig) -> Fields:
        windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
        return {
            **super().to_hf(config),
            "intermediate_size": config.moe_intermediate_size,
            "num_local_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
            "sliding_window": max(windows) or _DEFAULTS["sliding_window"],  # transformers makes its mask in any case
            "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        }

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        expect(raw, "swiglu_alpha", 1.702)
        expect(raw, "swiglu_limit", 7.0)
        rope = {} if raw.get("rope_parameters") or raw.get("rope_scaling") else {"rope_parameters": _ROPE}
        raw = {**_DEFAULTS, **raw, **rope}
        return {
            **super().from_hf(raw),
            "mlp_bias": True,
            "attention_sinks": True,
            "num_experts": raw.get("num_local_experts", 128),
            "num_experts_per_tok": raw.get("num_experts_per_tok", 4),
            "moe_intermediate_size": raw["intermediate_size"],
            "norm_topk_prob": True,
        }

    def _windows_from(self, raw: Mapping[str, Any]) -> list[int]:
        num_layers = raw["num_hidden_layers"]
        kinds = raw.get("layer_types") or (["sliding_attention", "full_attention"] * num_layers)[:num_layers]
        return [raw["sliding_window"] or 0 if kind == "sliding_attention" else 0 for kind in kinds]

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
