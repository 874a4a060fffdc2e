"""One small decoder of every kind that the block can be."""

from typing import Any

import pytest

from lm.config import ModelConfig, RopeScaling
from lm.model import LanguageModel, initialise

_BASE: dict[str, Any] = {
    "vocab_size": 12, "context_tokens": 40, "width": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "mlp_width": 24, "tie_embeddings": False,
}  # fmt: skip
_GPT: dict[str, Any] = {
    "num_kv_heads": 4, "mlp": "gelu_tanh", "mlp_bias": True, "attention_bias": "all", "positions": "learned",
    "norm": "layer",
}  # fmt: skip

DECODERS = {
    name: ModelConfig.model_validate({**_BASE, **changes})
    for name, changes in {
        "llama": {},
        "llama 3": {"rope_scaling": RopeScaling(kind="llama3", factor=4, original_context_tokens=16)},
        "arcee": {"mlp": "relu2"},
        "gpt2": _GPT,
        "gpt3": {**_GPT, "windows": (0, 3), "tie_embeddings": True},
        "mistral": {"windows": (4,), "head_dim": 6},
        "qwen2": {"attention_bias": "qkv"},
        "qwen3": {"qk_norm": True, "head_dim": 6, "windows": (5, 0)},
        "vaswani": {**_GPT, "mlp": "relu", "positions": "sinusoidal", "norm_place": "post"},
    }.items()
}


def small_decoder(config: ModelConfig) -> LanguageModel:
    model = LanguageModel(config)
    initialise(model, 5)
    return model.eval()


@pytest.fixture(scope="session", params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> LanguageModel:
    """Each of them in turn, with random weights and a context of 40 tokens out of a vocabulary of 12."""
    return small_decoder(DECODERS[request.param])


@pytest.fixture(scope="session")
def llama() -> LanguageModel:
    """The plainest of them."""
    return small_decoder(DECODERS["llama"])
