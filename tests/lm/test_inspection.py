"""Attention weights, parameter counts and costs against hand counts and a forward pass; and the count of what a forward
pass keeps against the tensors that autograd saves.
"""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.attention import attention_weights, measure_heads
from lm import attention
from lm.cache import KVCache, state_bytes
from lm.config import ModelConfig
from lm.delta import chunk_bytes
from lm.dropout import sequence_keys
from lm.encoder import EncoderDecoder, MaskedLanguageModel
from lm.inspection import (
    Pass,
    block_bytes,
    cache_bytes_per_token,
    ends_bytes,
    flops_per_source_token,
    flops_per_token,
    parameter_table,
)
from lm.layers import ExpertMaps, Fp32Linear
from lm.model import LanguageModel, count_parameters, init_weights
from lm.native import operators
from lm.native.kernels import library
from lm.positions import sinusoids

GPT2 = ModelConfig(
    vocab_size=50257, max_position_embeddings=1024, hidden_size=768, num_hidden_layers=12, num_attention_heads=12,
    num_key_value_heads=12, intermediate_size=3072,
    mlp="gelu_tanh", mlp_bias=True, attention_bias="all", positions="learned", norm="layer",
)  # fmt: skip


@torch.no_grad()
def test_attention_weights_are_causal_banded_and_sum_to_1(attending: LanguageModel) -> None:
    config = attending.config
    weights, across = attention_weights(attending.decoder, torch.tensor([[5, 1, 8, 0, 2, 7, 9]]))
    assert across is None
    assert weights.shape == (config.num_hidden_layers, 1, config.num_attention_heads, 7, 7)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:-1]))
    for layer in range(config.num_hidden_layers):
        window = config.window(layer) or 7
        for t in range(7):
            for s in range(7):
                assert (float(weights[layer, 0, 0, t, s]) > 0) == (t - window < s <= t)


@torch.no_grad()
def test_attention_weights_are_those_of_the_forward_pass(attending: LanguageModel) -> None:
    """A layer's attention, recomputed from its weights and values, equals the module's output."""
    tokens = torch.tensor([[5, 1, 8, 0, 2, 7, 9]])
    weights, _ = attention_weights(attending.decoder, tokens)
    seen: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
    hooks = [
        block.attention.register_forward_hook(
            lambda module, inputs, output: seen.append((module.project(inputs[0], inputs[1])[2], output, module.join))
        )
        for block in attending.decoder.blocks
    ]
    attending(tokens)
    for hook in hooks:
        hook.remove()
    for layer, (v_BGSH, output, join) in enumerate(seen):
        groups = attending.config.num_attention_heads // attending.config.num_key_value_heads
        mixed = weights[layer] @ v_BGSH.repeat_interleave(groups, dim=1)
        torch.testing.assert_close(join(mixed), output, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_heads_are_measured_over_all_tokens_from_the_third_on(attending: LanguageModel) -> None:
    """Against means over single weights, of texts of different lengths."""
    texts = [[1, 2, 3, 4, 5], [6, 7], [5, 4, 3]]
    found = measure_heads(attending.decoder, texts)
    assert [(head.layer, head.head) for head in found] == [(layer, head) for layer in range(2) for head in range(4)]
    tables = [attention_weights(attending.decoder, torch.tensor([text]))[0][:, 0] for text in texts]
    for head in found:
        asking = [(table[head.layer, head.head], t) for table in tables for t in range(2, table.shape[-1])]
        assert len(asking) == 3 + 1
        for mean, keys in (
            (head.preceding, [t - 1 for _, t in asking]),
            (head.first, [0 for _ in asking]),
            (head.itself, [t for _, t in asking]),
        ):
            weights = [float(table[t, key]) for (table, t), key in zip(asking, keys, strict=True)]
            assert mean == pytest.approx(sum(weights) / len(weights), abs=1e-6)


def test_texts_of_two_tokens_measure_nothing(llama: LanguageModel) -> None:
    assert measure_heads(llama.decoder, [[1, 2], [3]]) == []


@torch.no_grad()
def test_sinusoids_let_a_head_attend_to_the_preceding_token() -> None:
    """Queries are the positions, turned back by one step with one matrix for all."""
    config = ModelConfig(
        vocab_size=8, max_position_embeddings=16, hidden_size=32, num_hidden_layers=1, num_attention_heads=1,
        intermediate_size=4, positions="sinusoidal", norm_place="post",
    )  # fmt: skip
    model = LanguageModel(config).eval()
    model.decoder.embedding.weight.zero_()  # the blocks' input is the positions alone
    step = sinusoids(torch.tensor(1), 32)
    back = torch.zeros(32, 32)
    for i in range(0, 32, 2):
        sin, cos = step[i], step[i + 1]
        # sin(a - w) = sin a · cos w - cos a · sin w, cos(a - w) = sin a · sin w + cos a · cos w
        back[i, i : i + 2], back[i + 1, i : i + 2] = torch.stack([cos, -sin]), torch.stack([sin, cos])
    model.decoder.blocks[0].attention.qkv.weight.copy_(torch.cat([60 * back, torch.eye(32), torch.eye(32)]))
    (head,) = measure_heads(model.decoder, [[1] * 12])
    assert head.preceding > 0.99
    assert head.first < 0.01
    assert head.itself < 0.01


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
    banded = GPT2.model_copy(update={"sliding_window": (0, 256)})
    assert flops_per_token(GPT2) - flops_per_token(banded) == 4 * 768 * 6 * (1024 - 256)
    assert flops_per_token(GPT2, 100) == flops_per_token(banded, 100)


def test_grouped_queries_shrink_the_cache_alone() -> None:
    grouped = GPT2.model_copy(update={"num_key_value_heads": 3})
    assert cache_bytes_per_token(grouped, bytes_per_number=4) == cache_bytes_per_token(GPT2) // 2


SHAPE = {
    "vocab_size": 40, "max_position_embeddings": 16, "hidden_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_key_value_heads": 3,
    "intermediate_size": 20, "mlp": "gelu", "norm_place": "post", "norm": "layer", "positions": "learned",
}  # fmt: skip
BERT = ModelConfig(kind="encoder", mlp_bias=True, attention_bias="all", embedding_norm=True, type_vocab_size=2, **SHAPE)
VASWANI = ModelConfig(kind="encoder-decoder", num_encoder_layers=3, **SHAPE)


@torch.no_grad()
def test_an_encoder_looks_both_ways() -> None:
    model = MaskedLanguageModel(BERT).eval()
    init_weights(model, 1)
    tokens = torch.tensor([[5, 1, 8, 0, 2, 7, 9]])
    weights, across = attention_weights(model.encoder, tokens)
    assert across is None
    assert weights.shape == (2, 1, 3, 7, 7)
    assert (weights > 0).all()
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 1, 3, 7))
    # The first layer by hand: softmax of the products of its queries and keys.
    seen = model.encoder.embed(tokens, torch.arange(7)[None])
    q, k, _ = model.encoder.blocks[0].attention.qkv(seen).view(7, 9, 4).split(3, dim=1)
    expected = (torch.einsum("tnh,snh->nts", q, k) / 2).softmax(dim=-1)
    torch.testing.assert_close(weights[0, 0], expected)


@pytest.mark.parametrize("changes", [{}, {"positions": "relative", "query_pre_attn_scalar": 1}])
@torch.no_grad()
def test_a_decoder_looks_across_at_what_was_read(changes: dict[str, Any]) -> None:
    model = EncoderDecoder(VASWANI.model_copy(update=changes)).eval()
    init_weights(model, 1)
    sources, segments = torch.tensor([[5, 1, 8, 0, 0]]), torch.tensor([[1, 1, 1, 0, 0]])
    memory = model.read(sources, segments)
    own, across = attention_weights(model.decoder, torch.tensor([[3, 2, 7, 9]]), memory)
    assert across is not None
    assert own.shape == (2, 1, 3, 4, 4)
    assert across.shape == (2, 1, 3, 4, 5)
    assert (own.triu(1) == 0).all()
    assert (across[..., 3:] == 0).all()  # padding
    torch.testing.assert_close(across.sum(dim=-1), torch.ones(2, 1, 3, 4))
    # Recomputed from weights and values, a layer's attention equals the module's output.
    caught: list[tuple[torch.Tensor, torch.Tensor]] = []
    cross = model.decoder.blocks[1].cross
    hook = cross.register_forward_hook(lambda _, inputs, output: caught.append((inputs[1].values[1], output)))
    model(sources, torch.tensor([[3, 2, 7, 9]]), segments)
    hook.remove()
    values, output = caught[0]
    torch.testing.assert_close(cross.out((across[1] @ values).transpose(1, 2).flatten(2)), output)


def test_tables_of_every_kind_count_each_parameter_once() -> None:
    t5 = VASWANI.model_copy(update={"positions": "relative"})
    for config, kind in ((BERT, MaskedLanguageModel), (VASWANI, EncoderDecoder), (t5, EncoderDecoder)):
        assert sum(part.num_parameters for part in parameter_table(config)) == count_parameters([kind(config)])


def test_costs_of_an_encoder_and_of_an_encoder_decoder_by_hand() -> None:
    layer = 4 * 12 * 12 + 2 * 12 * 20  # attention and MLP
    assert flops_per_token(BERT, 5) == 2 * 2 * layer + 4 * 12 * 2 * 5
    # Per target token: two layers with the query and output of cross-attention, the head, and two attentions.
    assert flops_per_token(VASWANI, 5) == 2 * (2 * (layer + 2 * 12 * 12) + 40 * 12) + 4 * 12 * 2 * (5 + 5)
    # Per source token: three layers of the encoder, and keys and values for two layers of the decoder.
    assert flops_per_source_token(VASWANI, 5) == 2 * (3 * layer + 2 * 2 * 12 * 12) + 4 * 12 * 3 * 5
    assert cache_bytes_per_token(VASWANI) == 2 * 2 * 12 * 2


NUM_ROWS, NUM_TOKENS = 3, 40
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
BASE_SHAPE: dict[str, Any] = {
    "vocab_size": 64, "max_position_embeddings": 64, "hidden_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 160,
}  # fmt: skip
LLAMA_SHAPE = {**BASE_SHAPE, "mlp": "swiglu"}
GEMMA3 = {
    "norm_place": "sandwich", "qk_norm": True, "mlp": "geglu", "sliding_window": (8, 0), "rope_local_base_freq": 100.0,
    "query_pre_attn_scalar": 20,
}  # fmt: skip
GPT_OSS = {
    **EXPERTS, "norm_topk_prob": True, "mlp": "clamped_swiglu", "mlp_bias": True, "attention_bias": "all",
    "attention_sinks": True, "sliding_window": (8, 0),
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 6, "kv_lora_rank": 40, "q_lora_rank": 48, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "rope_interleave": True,
}  # fmt: skip
LINEAR = {
    "layer_types": ("linear_attention", "full_attention"), "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 24, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
}  # fmt: skip
OLMO2 = {"norm_place": "output", "qk_norm": True, "qk_norm_over": "projection"}
GPT2_SHAPE = {
    **BASE_SHAPE, "num_key_value_heads": 6, "norm": "layer", "positions": "learned", "mlp": "gelu_tanh",
    "mlp_bias": True, "attention_bias": "all",
}  # fmt: skip


def kept_bytes(model: torch.nn.Module, *arguments: Any, autocast: bool = False, **keywords: Any) -> int:
    """Returns the bytes of the storages that a forward pass saves for its backward, without parameters."""
    held = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # Holding the storage keeps its address from being reused.
        storages[storage.data_ptr()] = storage
        return tensor

    precision = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), precision:
        model(*arguments, **keywords)
    tokens = arguments[0].untyped_storage().data_ptr()
    weights = model_bytes_in_bf16(model) if autocast else 0
    return sum(s.nbytes() for at, s in storages.items() if at not in held and at != tokens) - weights


def model_bytes_in_bf16(model: torch.nn.Module) -> int:
    """Autocast keeps a bf16 copy of every matrix that is multiplied, and of its bias."""
    rounded = (torch.nn.Linear, ExpertMaps)
    linears = [m for m in model.modules() if isinstance(m, rounded) and not isinstance(m, Fp32Linear)]
    return sum(2 * module.weight.numel() for module in linears)


def planned_bytes(config: ModelConfig, of: Pass) -> int:
    return config.num_hidden_layers * block_bytes(config, of) + ends_bytes(config, of)


def fused(
    q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, mask_BTS: Tensor | None, sinks_N: Tensor | None, cap: float
) -> Tensor:
    assert mask_BTS is None
    assert sinks_N is None
    assert not cap
    return F.scaled_dot_product_attention(q_BNTH, k_BGSH, v_BGSH, is_causal=True)


@pytest.mark.parametrize(
    "changes",
    [
        LLAMA_SHAPE, GPT2_SHAPE, {**GPT2_SHAPE, "norm_place": "post", "mlp": "gelu"}, {**LLAMA_SHAPE, "qk_norm": True},
        {**BASE_SHAPE, "mlp": "relu2"}, {**GPT2_SHAPE, "mlp": "relu", "embedding_norm": True},
        {**LLAMA_SHAPE, "num_key_value_heads": 6, "head_dim": 24}, {**LLAMA_SHAPE, **OLMO2},
        {**GPT2_SHAPE, "norm_place": "sandwich"}, {**LLAMA_SHAPE, **GEMMA3, "num_key_value_heads": 6},
        {**LLAMA_SHAPE, "partial_rotary_factor": 0.5}, {**LLAMA_SHAPE, **EXPERTS}, {**LLAMA_SHAPE, **LATENT},
        {**LLAMA_SHAPE, **LATENT, "q_lora_rank": 0, "v_head_dim": 20},
        {**LLAMA_SHAPE, **EXPERTS, "norm_topk_prob": True, "num_experts_per_tok": 5}, {**LLAMA_SHAPE, **GPT_OSS},
        {**LLAMA_SHAPE, **LINEAR, "qk_norm": True, "attn_output_gate": True},
        {**LLAMA_SHAPE, "attn_logit_softcapping": 2.0, "sliding_window": (8, 0), "residual_multiplier": 0.5},
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["fp32", "bf16", "autocast", "dropout"])
def test_the_count_is_what_autograd_saves(changes: dict[str, Any], kind: str) -> None:
    config = ModelConfig.model_validate(changes)
    model = LanguageModel(config, 0.1 if kind == "dropout" else 0.0)
    init_weights(model, seed=0)
    model = model.to(torch.bfloat16 if kind == "bf16" else torch.float32)
    tokens_BT = torch.randint(0, 64, (NUM_ROWS, NUM_TOKENS))
    c, s = (4 if kind in ("fp32", "dropout") else 2), (2 if kind == "bf16" else 4)
    is_tiled = library() is not None
    of = Pass(NUM_ROWS, NUM_TOKENS, c, s, is_fused=False, has_dropout=kind == "dropout", is_tiled=is_tiled)
    keys = sequence_keys(0, np.arange(NUM_ROWS)[:, None], tokens_BT.device)
    found = kept_bytes(model, tokens_BT, autocast=kind == "autocast", sequence_keys_BT=keys)
    assert planned_bytes(config, of) == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("sizes", [(2, 4, 16, 16, 4), (1, 4, 32, 16, 4), (4, 4, 16, 48, 3)])
def test_a_linear_layer_takes_as_much_as_it_computes_again(sizes: tuple[int, ...]) -> None:
    """What autograd saves of one layer while its backward pass reads its rows again."""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    linear = {f"linear_{name}": size for name, size in zip(names, sizes, strict=True)}
    config = ModelConfig.model_validate({**LLAMA_SHAPE, "layer_types": ("linear_attention",), **linear})
    model = LanguageModel(config)
    init_weights(model, seed=0)
    layer = model.decoder.blocks[0].attention
    x_BTD, positions = torch.randn(2, 128, 96), torch.arange(128).expand(2, 128)
    given = layer.qkvz(x_BTD), layer.gates(x_BTD)
    own = layer.conv, layer.a_log, layer.dt_bias, layer.norm
    found = kept_bytes(Reading(layer), positions, *given, *own) - sum(x.nbytes for x in given)
    assert chunk_bytes(config) == pytest.approx(found / x_BTD[..., 0].numel(), rel=0.1)


class Reading(torch.nn.Module):
    """Reads rows as the layer's backward pass does."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *given: Tensor) -> None:
        self.layer._read_rows(*given)


def test_states_take_the_place_of_keys_and_values() -> None:
    config = ModelConfig.model_validate({**LLAMA_SHAPE, **LINEAR})  # layers 0 and 2 of 3 are linear
    assert cache_bytes_per_token(config) == 2 * 2 * 16 * 2
    assert state_bytes(config) == 2 * (4 * 24 * 16 * 4 + 3 * (2 * 2 * 24 + 4 * 16) * 2)
    for like in (torch.zeros(0), torch.zeros(0, dtype=torch.bfloat16)):
        size = like.element_size()
        cache = KVCache.empty(config, 5, 7, like)
        assert cache.nbytes == 5 * (7 * cache_bytes_per_token(config, size) + state_bytes(config, size))
    whole = ModelConfig.model_validate({**LLAMA_SHAPE, "num_hidden_layers": 1})
    per_key = 4 * 6 * 16
    assert flops_per_token(whole, 9) - flops_per_token(whole, 8) == per_key
    assert flops_per_token(config, 9) - flops_per_token(config, 8) == per_key
    assert flops_per_token(config, 1) - 2 * matrices(config) == per_key + 2 * 6 * 4 * 24 * 16


def matrices(config: ModelConfig) -> int:
    """Counts the weights of the blocks' matrices and the head."""
    model = LanguageModel(config)
    return sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2)  # the head is the embedding


@pytest.mark.parametrize("changes", [{**LLAMA_SHAPE, "num_key_value_heads": 6}, GPT2_SHAPE, {**LLAMA_SHAPE, **LATENT}])
def test_fused_attention_keeps_no_table_of_weights(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # PyTorch's fused CPU kernel saves what its GPU kernel does if heads are views, as they are on a GPU.
    monkeypatch.setattr(attention, "attend", fused)
    monkeypatch.setattr(operators, "library", lambda: None)
    config = ModelConfig.model_validate(changes)
    model = LanguageModel(config)
    init_weights(model, seed=0)
    of = Pass(NUM_ROWS, NUM_TOKENS, 4, 4, is_fused=True, has_dropout=False)
    found = kept_bytes(model, torch.randint(0, 64, (NUM_ROWS, NUM_TOKENS)))
    assert planned_bytes(config, of) == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 6, "positions": "relative"}])
def test_an_encoder_decoder_keeps_both_stacks(changes: dict[str, Any]) -> None:
    config = ModelConfig.model_validate(
        {**BASE_SHAPE, "kind": "encoder-decoder", "num_encoder_layers": 2, "mlp": "relu2", **changes}
    )
    model = EncoderDecoder(config)
    init_weights(model, seed=0)
    tokens_BT = torch.randint(0, 64, (NUM_ROWS, NUM_TOKENS))
    of = Pass(NUM_ROWS, NUM_TOKENS, 4, 4, is_fused=False, has_dropout=False, is_tiled=library() is not None)
    decoder = config.num_hidden_layers * block_bytes(config, of, cross_attention=True)
    encoder = config.num_encoder_layers * block_bytes(config, of)
    found = kept_bytes(model, tokens_BT, tokens_BT.clone())
    assert decoder + encoder + 2 * ends_bytes(config, of) == pytest.approx(found, rel=0.05)


def test_a_gpt_by_hand_against_the_papers_count() -> None:
    """arXiv 2205.05198, eq. 1: s·b·h·(34 + 5 a·s/h) bytes, of which dropout's masks and outputs take 2 + 3 a·s/h.

    The rest, 32 + 2 a·s/h in units of D bytes per token: norms 2 + 2, inputs of the first products 2 + 2, Q, K and V 6,
    attention's output 2, the MLP 2 · 4 · 2 = 16; and a bf16 copy of the weights. PyTorch's norms keep two more numbers.
    """
    config = ModelConfig.model_validate({**GPT2_SHAPE, "hidden_size": 96, "intermediate_size": 384})
    of = Pass(1, NUM_TOKENS, 2, 2, is_fused=False, has_dropout=False)
    assert block_bytes(config, of) == NUM_TOKENS * (32 * 96 + 2 * 6 * NUM_TOKENS + 2 * 8)
