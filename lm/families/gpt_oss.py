"""gpt-oss (arXiv 2508.10925)."""

from collections.abc import Mapping
from typing import Any

from lm.config import ModelConfig
from lm.families.family import Fields, Stored, expect
from lm.families.mixtures import MixtralFamily

# `rope_parameters` of a config without them.
_ROPE = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "original_max_position_embeddings": 4096}


class GptOssFamily(MixtralFamily):
    """gpt-oss: attention with sinks, windows in every second layer, and experts with biases and a clamped SwiGLU. The
    fields are Mixtral's.

    Published checkpoints have their experts in MXFP4; Heed reads them, and writes plain numbers.
    """

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        expect(raw, "swiglu_alpha", 1.702)
        expect(raw, "swiglu_limit", 7.0)
        rope = {} if raw.get("rope_parameters") or raw.get("rope_scaling") else {"rope_parameters": _ROPE}
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
