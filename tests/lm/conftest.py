"""One small decoder of every kind of block."""

from typing import Any

import pytest

from lm.config import ModelConfig, RopeScaling
from lm.model import LanguageModel, init_weights

_BASE: dict[str, Any] = {
    "vocab_size": 12, "max_position_embeddings": 40, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "tie_word_embeddings": False,
}  # fmt: skip
_GPT: dict[str, Any] = {
    "num_key_value_heads": 4, "mlp": "gelu_tanh", "mlp_bias": True, "attention_bias": "all", "positions": "learned",
    "norm": "layer",
}  # fmt: skip

DECODERS = {
    name: ModelConfig.model_validate({**_BASE, **changes})
    for name, changes in {
        "llama": {},
        "llama 3": {"rope_scaling": RopeScaling(rope_type="llama3", factor=4, original_max_position_embeddings=16)},
        "arcee": {"mlp": "relu2"},
        "gpt2": _GPT,
        "gpt3": {**_GPT, "sliding_window": (0, 3), "tie_word_embeddings": True},
        "mistral": {"sliding_window": (4,), "head_dim": 6},
        "qwen2": {"attention_bias": "qkv"},
        "qwen3": {"qk_norm": True, "head_dim": 6, "sliding_window": (5, 0)},
        "olmo2": {"norm_place": "output", "qk_norm": True, "qk_norm_over": "projection"},
        "gemma3": {
            "norm_place": "sandwich",
            "qk_norm": True,
            "mlp": "geglu",
            "sliding_window": (5, 0),
            "rope_local_base_freq": 100.0,
            "query_pre_attn_scalar": 7,
            "scale_embedding": True,
        },
        "phi3": {"partial_rotary_factor": 0.5},
        "gemma2": {
            "norm_place": "sandwich",
            "mlp": "geglu",
            "sliding_window": (5, 0),
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 1.5,
        },
        "granite, glm4 and ministral3": {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.7,
            "query_pre_attn_scalar": 3.5,
            "rope_interleave": True,
            "layers_without_positions": (1,),
            "rope_scaling": RopeScaling(
                rope_type="yarn",
                factor=2,
                original_max_position_embeddings=4,
                attention_factor=1.0,
                llama_4_scaling_beta=0.7,
            ),
        },
        "deepseek v3": {
            "q_lora_rank": 6,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 2,
            "v_head_dim": 5,
            "head_dim": 6,
            "num_key_value_heads": 4,
            "rope_interleave": True,
            "query_pre_attn_scalar": 3.5,
        },
        "qwen3-next": {
            "qk_norm": True,
            "attn_output_gate": True,
            "partial_rotary_factor": 0.5,
            "layer_types": ("linear_attention", "full_attention"),
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 5,
            "linear_value_head_dim": 3,
            "linear_conv_kernel_dim": 4,
        },
        "vaswani": {**_GPT, "mlp": "relu", "positions": "sinusoidal", "norm_place": "post"},
        "learned in every layer": {"positions": "learned", "positions_every_layer": True},
    }.items()
}


def small_decoder(config: ModelConfig) -> LanguageModel:
    model = LanguageModel(config)
    init_weights(model, 5)
    return model.eval()


# What is special about these, a table of angles, an activation and biases, concerns no step of generation.
_PLAIN = ("llama 3", "arcee", "qwen2")


@pytest.fixture(
    scope="session",
    params=[pytest.param(name, marks=pytest.mark.nightly) if name in _PLAIN else name for name in DECODERS],
)
def decoder(request: pytest.FixtureRequest) -> LanguageModel:
    """Each of them in turn, with random weights, a context of 40 tokens and a vocabulary of 12."""
    return small_decoder(DECODERS[request.param])


@pytest.fixture
def attending(decoder: LanguageModel) -> LanguageModel:
    """Each of them whose layers all have attention."""
    if decoder.config.num_linear_layers:
        pytest.skip("linear layers have no attention weights")
    return decoder


@pytest.fixture(scope="session")
def llama() -> LanguageModel:
    """The simplest of them."""
    return small_decoder(DECODERS["llama"])
