"""To see inside a model: what its heads attend to, where its parameters are, what a token costs.

Shape letters: L layers, B batch, T query tokens, S key tokens, N heads, H head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lm.attention import attend, banded
from lm.block import Block, compute_dtype
from lm.config import ModelConfig
from lm.model import LanguageModel, ScalarModel


@torch.inference_mode()
def attention_weights(model: LanguageModel | ScalarModel, tokens_BT: Tensor) -> Tensor:
    """softmax(Q Kᵀ / √H) of every head, [L, B, N, T, S]; the rows of each T x S table sum to 1."""
    decoder, T = model.decoder, tokens_BT.shape[1]
    positions_BT = torch.arange(T, device=tokens_BT.device).expand(tokens_BT.shape)
    x_BTD = decoder.embed(tokens_BT, positions_BT)
    rotary = decoder.rotary(positions_BT, compute_dtype(x_BTD))
    found = []
    for layer, block in enumerate(decoder.blocks):
        assert isinstance(block, Block)
        mask = banded(None, decoder.config.window(layer), T, T, tokens_BT.device)
        seen_BTD = block.attention_norm(x_BTD) if block.norms_first else x_BTD
        q_BNTH, k_BGSH, _ = block.attention.project(seen_BTD, rotary)
        # Where the values are the unit vectors, what attention sums up is its weights.
        unit_BGSS = torch.eye(T, dtype=q_BNTH.dtype, device=q_BNTH.device).expand(*k_BGSH.shape[:2], T, T)
        found.append(attend(q_BNTH, k_BGSH, unit_BGSS, mask))
        x_BTD = block(x_BTD, rotary, mask, None, layer)
    return torch.stack(found)


@dataclass(frozen=True)
class Part:
    """A group of parameters: `name` with layers left out, how many tensors of one shape, and their numbers together."""

    name: str
    shape: tuple[int, ...]
    num_tensors: int
    num_parameters: int


def parameter_table(config: ModelConfig) -> list[Part]:
    """Where the language model's parameters are, in the order of the forward pass; no weights are made.

    The same tensor of every block is one row; a tied head is the embedding and is not counted again.
    """
    with torch.device("meta"):
        model = LanguageModel(config)
    parts: dict[str, Part] = {}
    for name, parameter in model.named_parameters():
        fields = name.removeprefix("decoder.").split(".")
        label = ".".join("*" if field.isdigit() else field for field in fields)
        before = parts.get(label, Part(label, tuple(parameter.shape), 0, 0))
        parts[label] = Part(
            label, before.shape, before.num_tensors + 1, before.num_parameters + parameter.numel()
        )  # fmt: skip
    return list(parts.values())


def flops_per_token(config: ModelConfig, context_tokens: int | None = None) -> int:
    """Floating-point operations of the forward pass for the last token of a context (the longest by default).

    Two for each weight of a matrix that multiplies (not the embedding, which is looked up), and four for each key and
    dimension of each head: the product with the key and the sum of the values. Norms and activations are left out.
    A training step takes three times as many.
    """
    length = config.context_tokens if context_tokens is None else context_tokens
    matrices = sum(
        part.num_parameters
        for part in parameter_table(config)
        if len(part.shape) == 2 and part.name not in ("embedding.weight", "positions.weight", "head.weight")
    )
    head = config.vocab_size * config.width
    keys = sum(min(length, config.window(layer) or length) for layer in range(config.num_layers))
    return 2 * (matrices + head) + 4 * config.num_heads * config.head_dim * keys


def cache_bytes_per_token(config: ModelConfig, bytes_per_number: int = 2) -> int:
    """Memory of the key-value cache for one token of one sequence, in bytes (bf16 by default)."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_per_number
