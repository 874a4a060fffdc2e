"""The count of what a forward pass keeps against the tensors that autograd saves."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lm import attention
from lm.activations import Pass, block_bytes, ends_bytes
from lm.config import ModelConfig
from lm.dropout import sequence_keys
from lm.encoder_decoder import EncoderDecoder
from lm.model import LanguageModel, init_weights
from lm.native import operators
from lm.native.build import library

ROWS, TOKENS = 3, 40
BASE: dict[str, Any] = {
    "vocab_size": 64, "max_position_embeddings": 64, "hidden_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 160,
}  # fmt: skip
LLAMA = {**BASE, "mlp": "swiglu"}
GPT2 = {
    **BASE, "num_key_value_heads": 6, "norm": "layer", "positions": "learned", "mlp": "gelu_tanh", "mlp_bias": True,
    "attention_bias": "all",
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
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    return sum(2 * module.weight.numel() for module in linears)


def planned_bytes(config: ModelConfig, of: Pass) -> int:
    return config.num_hidden_layers * block_bytes(config, of) + ends_bytes(config, of)


def fused(q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, mask_BTS: Tensor | None) -> Tensor:
    assert mask_BTS is None
    return F.scaled_dot_product_attention(q_BNTH, k_BGSH, v_BGSH, is_causal=True)


@pytest.mark.parametrize(
    "changes",
    [
        LLAMA, GPT2, {**GPT2, "norm_place": "post", "mlp": "gelu"}, {**LLAMA, "qk_norm": True},
        {**BASE, "mlp": "relu2"}, {**GPT2, "mlp": "relu", "embedding_norm": True},
        {**LLAMA, "num_key_value_heads": 6, "head_dim": 24},
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["fp32", "bf16", "autocast", "dropout"])
def test_the_count_is_what_autograd_saves(changes: dict[str, Any], kind: str) -> None:
    config = ModelConfig.model_validate(changes)
    model = LanguageModel(config, 0.1 if kind == "dropout" else 0.0)
    init_weights(model, seed=0)
    model = model.to(torch.bfloat16 if kind == "bf16" else torch.float32)
    tokens_BT = torch.randint(0, 64, (ROWS, TOKENS))
    c, s = (4 if kind in ("fp32", "dropout") else 2), (2 if kind == "bf16" else 4)
    is_tiled = library() is not None
    of = Pass(ROWS, TOKENS, c, s, is_fused=False, has_dropout=kind == "dropout", is_tiled=is_tiled)
    keys = sequence_keys(0, np.arange(ROWS)[:, None], tokens_BT.device)
    found = kept_bytes(model, tokens_BT, autocast=kind == "autocast", sequence_keys_BT=keys)
    assert planned_bytes(config, of) == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("changes", [{**LLAMA, "num_key_value_heads": 6}, GPT2])
def test_fused_attention_keeps_no_table_of_weights(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # PyTorch's fused CPU kernel saves what its GPU kernel does if heads are views, as they are on a GPU.
    monkeypatch.setattr(attention, "attend", fused)
    monkeypatch.setattr(operators, "library", lambda: None)
    config = ModelConfig.model_validate(changes)
    model = LanguageModel(config)
    init_weights(model, seed=0)
    of = Pass(ROWS, TOKENS, 4, 4, is_fused=True, has_dropout=False)
    found = kept_bytes(model, torch.randint(0, 64, (ROWS, TOKENS)))
    assert planned_bytes(config, of) == pytest.approx(found, rel=0.02)


def test_an_encoder_decoder_keeps_both_stacks() -> None:
    config = ModelConfig.model_validate({**BASE, "kind": "encoder-decoder", "num_encoder_layers": 2, "mlp": "relu2"})
    model = EncoderDecoder(config)
    init_weights(model, seed=0)
    tokens_BT = torch.randint(0, 64, (ROWS, TOKENS))
    of = Pass(ROWS, TOKENS, 4, 4, is_fused=False, has_dropout=False, is_tiled=library() is not None)
    decoder = config.num_hidden_layers * block_bytes(config, of, cross_attention=True)
    encoder = config.num_encoder_layers * block_bytes(config, of)
    found = kept_bytes(model, tokens_BT, tokens_BT.clone())
    assert decoder + encoder + 2 * ends_bytes(config, of) == pytest.approx(found, rel=0.05)


def test_a_gpt_by_hand_against_the_papers_count() -> None:
    """arXiv 2205.05198, eq. 1: s·b·h·(34 + 5 a·s/h) bytes, of which dropout's masks and outputs take 2 + 3 a·s/h.

    The rest, 32 + 2 a·s/h in units of D bytes per token: norms 2 + 2, inputs of the first products 2 + 2, Q, K and V 6,
    attention's output 2, the MLP 2 · 4 · 2 = 16; and a bf16 copy of the weights. PyTorch's norms keep two more numbers.
    """
    config = ModelConfig.model_validate({**GPT2, "hidden_size": 96, "intermediate_size": 384})
    of = Pass(1, TOKENS, 2, 2, is_fused=False, has_dropout=False)
    assert block_bytes(config, of) == TOKENS * (32 * 96 + 2 * 6 * TOKENS + 2 * 8)
