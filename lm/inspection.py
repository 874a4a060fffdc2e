"""Inspect a model: what its heads attend to, where its parameters are, what a token costs.

Shape letters: L layers, B batch, T query tokens, S key tokens, N heads, H head dim.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lm.attention import Attention, CrossAttention, attend
from lm.cache import CrossAttentionCache
from lm.config import ModelConfig
from lm.source import on_meta
from lm.transformer import Transformer
from lm.weights import PRETRAINED


@torch.inference_mode()
def attention_weights(
    stack: Transformer, tokens_BT: Tensor, cross_cache: CrossAttentionCache | None = None
) -> tuple[Tensor, Tensor | None]:
    """softmax(Q Kᵀ / √H) of every head: self-attention [L, B, N, T, T], and attention to an encoder [L, B, N, T, S] or
    None. Rows sum to 1.
    """
    own: list[Tensor] = []
    across: list[Tensor] = []

    def look(attention: Attention, inputs: tuple[Any, ...]) -> None:
        x_BTD, rotary, mask_BTT = inputs[:3]
        q_BNTH, k_BGTH, _ = attention.project(x_BTD, rotary)
        own.append(_weights(q_BNTH, k_BGTH, mask_BTT))

    def look_across(attention: CrossAttention, inputs: tuple[Any, ...]) -> None:
        x_BTD, seen, layer = inputs
        across.append(_weights(attention.queries(x_BTD), seen.keys[layer], seen.real_BS[:, None]))

    with ExitStack() as watching:
        for module in stack.modules():
            if isinstance(module, Attention):
                watching.enter_context(module.register_forward_pre_hook(look))
            elif isinstance(module, CrossAttention):
                watching.enter_context(module.register_forward_pre_hook(look_across))
        stack.hidden(tokens_BT, None, cross_cache)
    return torch.stack(own), torch.stack(across) if across else None


def _weights(q_BNTH: Tensor, k_BGSH: Tensor, mask_BTS: Tensor | None) -> Tensor:
    """With unit vectors as values, attention returns its weights."""
    T, S = q_BNTH.shape[2], k_BGSH.shape[2]
    unit_BGSS = torch.eye(S, dtype=q_BNTH.dtype, device=q_BNTH.device).expand(*k_BGSH.shape[:2], S, S)
    return attend(q_BNTH, k_BGSH, unit_BGSS, None if mask_BTS is None else mask_BTS.expand(-1, T, -1))


@dataclass(frozen=True)
class Part:
    """A group of parameters: `name` without the layer number, tensors of that name, and their parameters in total."""

    name: str
    shape: tuple[int, ...]
    num_tensors: int
    num_parameters: int


def parameter_table(config: ModelConfig) -> list[Part]:
    """The parameters of a model of this shape, as it is pretrained, in the order of the forward pass; no weights are
    allocated. Blocks share one row per tensor; a tied head is the embedding and is not counted again.
    """
    kind = PRETRAINED[config.kind]
    model = on_meta(lambda: kind(config))
    # The only transformer need not be named.
    stack = "" if config.kind == "encoder-decoder" else f"{config.kind}."
    parts: dict[str, Part] = {}
    for name, parameter in model.named_parameters():
        fields = name.removeprefix(stack).split(".")
        label = ".".join("*" if field.isdigit() else field for field in fields)
        before = parts.get(label, Part(label, tuple(parameter.shape), 0, 0))
        parts[label] = Part(
            label, before.shape, before.num_tensors + 1, before.num_parameters + parameter.numel()
        )  # fmt: skip
    return list(parts.values())


def flops_per_token(config: ModelConfig, max_position_embeddings: int | None = None) -> int:
    """Floating-point operations of the forward pass for the last token of a context (the longest by default).

    Two for each weight of a matrix that multiplies (not the embedding, which is looked up), and four for each key and
    dimension of each head: the product with the key and the sum of the values. Norms and activations are left out, and
    of an encoder its head. An encoder-decoder's target token has a source of the same length; what the source itself
    costs is in `flops_per_source_token`. A training step takes three times as many.
    """
    length = config.max_position_embeddings if max_position_embeddings is None else max_position_embeddings
    names = [part.name for part in parameter_table(config)]
    if config.kind == "encoder-decoder":
        names = [name for name in names if name.startswith("decoder.") and ".cross.key_value." not in name]
    keys = sum(min(length, config.window(layer) or length) for layer in range(config.num_hidden_layers))
    keys += config.num_hidden_layers * length if config.kind == "encoder-decoder" else 0
    head = 0 if config.kind == "encoder" else config.vocab_size * config.hidden_size
    return 2 * (_multiplying_weights(config, names) + head) + 4 * config.num_attention_heads * config.head_dim * keys


def flops_per_source_token(config: ModelConfig, source_tokens: int | None = None) -> int:
    """As `flops_per_token`, for a token that an encoder-decoder reads: the encoder, and the keys and values that the
    decoder's blocks will look at.
    """
    config.require_kind("encoder-decoder")
    length = config.max_position_embeddings if source_tokens is None else source_tokens
    names = [part.name for part in parameter_table(config) if part.name.startswith("encoder.")]
    names += [part.name for part in parameter_table(config) if ".cross.key_value." in part.name]
    keys = config.num_encoder_layers * length
    return 2 * _multiplying_weights(config, names) + 4 * config.num_attention_heads * config.head_dim * keys


def _multiplying_weights(config: ModelConfig, names: Sequence[str]) -> int:
    """Weights of the blocks' matrices among these parts."""
    return sum(
        part.num_parameters
        for part in parameter_table(config)
        if part.name in names and len(part.shape) == 2 and "blocks." in part.name
    )


def cache_bytes_per_token(config: ModelConfig, bytes_per_number: int = 2) -> int:
    """Memory of the key-value cache for one token of one sequence, in bytes (bf16 by default); of an encoder-decoder,
    for one that it reads or writes.
    """
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * bytes_per_number
