"""Small models whose shapes a GPU's fused kernels take, the same on both devices."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lm.config import ModelConfig
from lm.model import LanguageModel
from lm.source import RandomInit, load

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def shape(**changes: Any) -> ModelConfig:
    """Llama's block: two layers of width 128, four query heads and two key-value heads of 32."""
    fields: dict[str, Any] = {
        "vocab_size": 512, "max_position_embeddings": 192, "hidden_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256,
    }  # fmt: skip
    return ModelConfig(**{**fields, **changes})


SHAPES = {
    "llama": shape(),
    "qwen3": shape(qk_norm=True, attention_bias="qkv"),
    "gpt2": shape(
        num_key_value_heads=4, mlp="gelu_tanh", mlp_bias=True, attention_bias="all", positions="learned", norm="layer"
    ),
    "mistral": shape(sliding_window=(0, 16)),
    "sinks": shape(attention_sinks=True, sliding_window=(16, 0), attention_bias="all"),
}


def pair(config: ModelConfig, dtype: torch.dtype = torch.float32) -> tuple[LanguageModel, LanguageModel]:
    """The same random weights on the CPU, in fp32, and on the GPU."""
    ours = load(RandomInit(partial(LanguageModel, config), seed=0))
    theirs = load(RandomInit(partial(LanguageModel, config), seed=0)).to(CUDA, dtype)
    return ours, theirs


def tokens(rows: int, length: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(3, 512, (rows, length), np.int32)


def prompts(number: int, longest: int) -> list[list[int]]:
    """Of different lengths."""
    generator = np.random.default_rng(1)
    return [generator.integers(3, 512, int(generator.integers(2, longest + 1))).tolist() for _ in range(number)]


def distance(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|, in fp64 on the CPU."""
    a, b = found.detach().cpu().double(), expected.detach().cpu().double()
    return float((a - b).norm() / b.norm())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
