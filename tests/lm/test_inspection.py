"""Attention weights, parameter counts and costs against hand counts and a forward pass."""

import torch

from lm.config import ModelConfig
from lm.inspection import attention_weights, cache_bytes_per_token, flops_per_token, parameter_table
from lm.model import LanguageModel, count_parameters

GPT2 = ModelConfig(
    vocab_size=50257, context_tokens=1024, width=768, num_layers=12, num_heads=12, num_kv_heads=12, mlp_width=3072,
    mlp="gelu_tanh", mlp_bias=True, attention_bias="all", positions="learned", norm="layer",
)  # fmt: skip


@torch.no_grad()
def test_attention_weights_are_causal_banded_and_sum_to_1(decoder: LanguageModel) -> None:
    config = decoder.config
    weights = attention_weights(decoder, torch.tensor([[5, 1, 8, 0, 2, 7, 9]]))
    assert weights.shape == (config.num_layers, 1, config.num_heads, 7, 7)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:-1]))
    for layer in range(config.num_layers):
        window = config.window(layer) or 7
        for t in range(7):
            for s in range(7):
                assert (float(weights[layer, 0, 0, t, s]) > 0) == (t - window < s <= t)


@torch.no_grad()
def test_attention_weights_are_those_of_the_forward_pass(decoder: LanguageModel) -> None:
    """A layer's attention, put together again from its weights and values, is what the module gives."""
    tokens = torch.tensor([[5, 1, 8, 0, 2, 7, 9]])
    weights = attention_weights(decoder, tokens)
    seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    hooks = [
        block.attention.register_forward_hook(
            lambda module, inputs, output: seen.append((module.project(inputs[0], inputs[1])[2], output, module.out))
        )
        for block in decoder.decoder.blocks
    ]
    decoder(tokens)
    for hook in hooks:
        hook.remove()
    for layer, (v_BGSH, output, out) in enumerate(seen):
        groups = decoder.config.num_heads // decoder.config.num_kv_heads
        mixed = weights[layer] @ v_BGSH.repeat_interleave(groups, dim=1)
        torch.testing.assert_close(out(mixed.transpose(1, 2).flatten(2)), output, atol=1e-5, rtol=1e-4)


def test_the_table_counts_every_parameter_once(decoder: LanguageModel) -> None:
    assert sum(part.num_parameters for part in parameter_table(decoder.config)) == count_parameters([decoder])


def test_gpt2_by_hand() -> None:
    table = {part.name: part for part in parameter_table(GPT2)}
    assert table["blocks.*.attention.qkv.weight"].shape == (2304, 768)
    assert table["blocks.*.attention.qkv.weight"].num_tensors == 12
    assert table["embedding.weight"].num_parameters == 50257 * 768
    assert "head.weight" not in table
    assert sum(part.num_parameters for part in table.values()) == 124_439_808  # the published count
    matrices = 12 * (4 * 768 * 768 + 2 * 768 * 3072) + 50257 * 768
    assert flops_per_token(GPT2, 1) == 2 * matrices + 4 * 768 * 12
    assert flops_per_token(GPT2) == 2 * matrices + 4 * 768 * 12 * 1024
    assert cache_bytes_per_token(GPT2) == 2 * 12 * 768 * 2


def test_a_band_costs_its_width() -> None:
    banded = GPT2.model_copy(update={"windows": (0, 256)})
    assert flops_per_token(GPT2) - flops_per_token(banded) == 4 * 768 * 6 * (1024 - 256)
    assert flops_per_token(GPT2, 100) == flops_per_token(banded, 100)


def test_grouped_queries_shrink_the_cache_alone() -> None:
    grouped = GPT2.model_copy(update={"num_kv_heads": 3})
    assert cache_bytes_per_token(grouped, bytes_per_number=4) == cache_bytes_per_token(GPT2) // 2
