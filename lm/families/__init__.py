"""The families of published checkpoints: how `config.json` spells a shape, and what each tensor is called.

One word names a model's purpose: "language" and "score" models are decoders, "masked", "next" (masked words and the
next sentence), "sequence", "token" and "span" models are encoders, and "translate" is an encoder-decoder.

A family holds a shape if writing and reading the family's config fields returns it unchanged. A shape that no family
holds, such as GPT-3's banded layers, is written in Heed's own fields, which only Heed reads.
"""

from pydantic import ValidationError

from lm.config import ModelConfig
from lm.families.classic import BartFamily, BertFamily, GPT2Family, T5Family
from lm.families.family import Family, HeedFamily, Stored, expect
from lm.families.mixtures import (
    DeepseekV2Family,
    DeepseekV3Family,
    Glm4MoeFamily,
    GptOssFamily,
    GraniteMoeFamily,
    MixtralFamily,
    OlmoeFamily,
    Qwen2MoeFamily,
    Qwen3MoeFamily,
)
from lm.families.qwen3_next import Qwen3NextFamily, Qwen35Family, Qwen35MoeFamily, WithTower
from lm.families.rotary import (
    Exaone4Family,
    Gemma2Family,
    Glm4Family,
    GraniteFamily,
    Ministral3Family,
    Olmo2Family,
    Phi3Family,
    RotaryFamily,
    SmolLM3Family,
)

__all__ = ["FAMILIES", "NOT_COVERED", "Family", "Stored", "expect", "family_of"]

_MISTRAL = {"num_key_value_heads": 8, "sliding_window": 4096}
_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_EXAONE = {"num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4}
_OLMO3 = {
    "sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 500_000.0, "rope_local_base_freq": 500_000.0,
}  # fmt: skip
_GPT_OSS = {
    "attention_bias": True, "head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128,
    "sliding_window_pattern": 2,
}  # fmt: skip
_GEMMA2 = {
    "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "sliding_window_pattern": 2, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip
_GEMMA3 = {
    **_GEMMA2, "sliding_window_pattern": 6, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0,
    "attn_logit_softcapping": None, "final_logit_softcapping": None,
}  # fmt: skip
_GLM_MOE = {
    "num_key_value_heads": 8, "partial_rotary_factor": 0.5, "n_routed_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408, "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}  # fmt: skip
_DEEPSEEK_V2 = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2, "first_k_dense_replace": 0,
    "norm_topk_prob": False, "routed_scaling_factor": 1.0,
}  # fmt: skip
_DEEPSEEK_V3 = {
    **_DEEPSEEK_V2, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}  # fmt: skip

_QWEN3_NEXT = {
    "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True, "intermediate_size": 5632,
}  # fmt: skip
_QWEN35_MOE = {**_QWEN3_NEXT, "num_experts": 256, "num_experts_per_tok": 8}
_QWEN35 = {"num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25, "intermediate_size": 12288}
_QWEN35_FAMILY = Qwen35Family("qwen3_5_text", "Qwen3_5", score_prefix="Qwen3_5Text", defaults=_QWEN35)
_QWEN35_MOE_FAMILY = Qwen35MoeFamily("qwen3_5_moe_text", "Qwen3_5Moe", score_prefix=None, defaults=_QWEN35_MOE)

# What no shape of Heed describes, in families that are close to those above.
NOT_COVERED = {
    "gemma3": "which has a vision tower (its language model alone is gemma3_text)",
    "mistral3": "which has a vision tower (its language model alone is mistral or ministral3)",
}

FAMILIES: tuple[Family, ...] = (
    RotaryFamily("llama", "Llama", attention_bias="flag", mlp_bias_flag=True, even_heads=True),
    RotaryFamily("arcee", "Arcee", mlp="relu2", attention_bias="flag", mlp_bias_flag=True, even_heads=True),
    RotaryFamily("mistral", "Mistral", windows="all", defaults=_MISTRAL),
    RotaryFamily("qwen2", "Qwen2", attention_bias="qkv", windows="by layer", defaults=_QWEN),
    RotaryFamily(
        "qwen3", "Qwen3", attention_bias="flag", windows="by layer", qk_norm=True, defaults={**_QWEN, "head_dim": 128}
    ),
    Qwen3MoeFamily(
        "qwen3_moe",
        "Qwen3Moe",
        attention_bias="flag",
        qk_norm=True,
        defaults={"num_key_value_heads": 4},
    ),
    Qwen2MoeFamily("qwen2_moe", "Qwen2Moe", attention_bias="qkv", defaults={"num_key_value_heads": 16}),
    _QWEN35_FAMILY,
    _QWEN35_MOE_FAMILY,
    Qwen3NextFamily("qwen3_next", "Qwen3Next", defaults=_QWEN3_NEXT),
    WithTower(_QWEN35_FAMILY, "qwen3_5", {"language": "Qwen3_5ForConditionalGeneration"}),
    WithTower(_QWEN35_MOE_FAMILY, "qwen3_5_moe", {"language": "Qwen3_5MoeForConditionalGeneration"}),
    Glm4MoeFamily(
        "glm4_moe", "Glm4Moe", score_prefix=None, attention_bias="qkv flag", partial_rotary=True, defaults=_GLM_MOE
    ),
    DeepseekV3Family("deepseek_v3", "DeepseekV3", attention_bias="flag", defaults=_DEEPSEEK_V3),
    DeepseekV2Family("deepseek_v2", "DeepseekV2", attention_bias="flag", even_heads=True, defaults=_DEEPSEEK_V2),
    OlmoeFamily("olmoe", "Olmoe", score_prefix=None, attention_bias="flag"),
    MixtralFamily("mixtral", "Mixtral", windows="all", defaults={"num_key_value_heads": 8}),
    GptOssFamily(
        "gpt_oss", "GptOss", mlp="clamped_swiglu", attention_bias="flag", windows="in turn", defaults=_GPT_OSS
    ),
    Olmo2Family("olmo2", "Olmo2", attention_bias="flag"),
    Olmo2Family("olmo3", "Olmo3", attention_bias="flag", windows="in turn", local_rope=True, defaults=_OLMO3),
    Phi3Family("phi3", "Phi3", windows="all", partial_rotary=True),
    SmolLM3Family("smollm3", "SmolLM3", attention_bias="flag", mlp_bias_flag=True, windows="by layer"),
    GraniteFamily("granite", "Granite", score_prefix=None, attention_bias="flag", mlp_bias_flag=True),
    GraniteMoeFamily("granitemoe", "GraniteMoe", score_prefix=None, attention_bias="flag"),
    GraniteMoeFamily("granitemoeshared", "GraniteMoeShared", score_prefix=None, attention_bias="flag"),
    Ministral3Family("ministral3", "Ministral3", windows="all", defaults={"num_key_value_heads": 8, "head_dim": 128}),
    Exaone4Family("exaone4", "Exaone4", qk_norm=True, windows="in turn", defaults=_EXAONE),
    Glm4Family("glm4", "Glm4", attention_bias="qkv flag", partial_rotary=True),
    Gemma2Family(
        "gemma2", "Gemma2", mlp="geglu", attention_bias="flag", even_heads=True, windows="in turn", defaults=_GEMMA2
    ),
    Gemma2Family(
        "gemma3_text",
        "Gemma3",
        mlp="geglu",
        attention_bias="flag",
        qk_norm=True,
        even_heads=True,
        windows="in turn",
        local_rope=True,
        score_prefix="Gemma3Text",
        defaults=_GEMMA3,
    ),
    GPT2Family(),
    BertFamily(),
    BartFamily(),
    T5Family(),
    HeedFamily(),
)


def family_of(config: ModelConfig, purpose: str) -> Family:
    """Returns the first family that holds the shape and has a model for the purpose."""
    return next(family for family in FAMILIES if purpose in family.classes and holds(family, config))


def holds(family: Family, config: ModelConfig) -> bool:
    """Whether writing and reading the family's config fields returns the shape unchanged."""
    try:
        return ModelConfig.model_validate(family.from_hf(family.to_hf(config))) == config
    except (KeyError, ValueError, ValidationError):
        return False
