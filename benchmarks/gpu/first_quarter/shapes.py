"""The models that the steps measure; a rehearsal measures `TINY` in place of each."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import SMALL
from lm.config import ModelConfig

Fields = Mapping[str, Any]
PUBLISHED = Path(__file__).parents[3] / "configs" / "models"


def published(name: str) -> Fields:
    """Returns the fields of a shape in configs/models."""
    return tomllib.loads((PUBLISHED / f"{name}.toml").read_text(encoding="utf-8"))


QWEN = published("Qwen/Qwen2.5-0.5B")  # 0.49B weights, tied
LLAMA8 = published("meta-llama/Meta-Llama-3-8B")
GPT2: Fields = SMALL.model_dump()  # 124M
# A Llama block at 1.3B: heads of 128, each with its own keys and values, and Llama 2's vocabulary.
LLAMA13: Fields = {
    "vocab_size": 32_000, "max_position_embeddings": 4096, "hidden_size": 2048, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 5504, "tie_word_embeddings": False,
}  # fmt: skip
TINY: Fields = {
    "vocab_size": 512, "max_position_embeddings": 128, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
}  # fmt: skip


def shape(fields: Fields, *, tiny: bool, **changes: Any) -> ModelConfig:
    """Returns the model of these fields with some changed; `TINY` if `tiny`."""
    return ModelConfig.model_validate(dict(TINY) if tiny else {**fields, **changes})
