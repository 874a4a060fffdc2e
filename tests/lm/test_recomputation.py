"""Blocks that are recomputed in the backward pass give the same gradients, bit for bit, dropout included."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lm.config import ModelConfig
from lm.dropout import sequence_keys
from lm.encoder import EncoderDecoder, MaskedLanguageModel
from lm.model import LanguageModel, checkpoint_activations, freeze_all_but_last, init_weights

SHAPE = {
    "vocab_size": 40, "max_position_embeddings": 32, "hidden_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 24,
}  # fmt: skip
TOKENS = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(1))
CPU = torch.device("cpu")
LINEAR = {
    "layer_types": ("linear_attention", "full_attention"), "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_conv_kernel_dim": 3, "attn_output_gate": True,
}  # fmt: skip
KEYS = {
    "decoder": "sequence_keys_BT",
    "linear layers": "sequence_keys_BT",
    "encoder": "sequence_keys_BT",
    "encoder-decoder": "sequence_keys_B1",
}
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "decoder": (lambda: LanguageModel(ModelConfig(**SHAPE), 0.3), (TOKENS,)),
    "linear layers": (lambda: LanguageModel(ModelConfig(**SHAPE, **LINEAR), 0.3), (TOKENS,)),
    "encoder": (lambda: MaskedLanguageModel(ModelConfig(kind="encoder", mlp="gelu", **SHAPE), 0.3), (TOKENS,)),
    "encoder-decoder": (
        lambda: EncoderDecoder(ModelConfig(kind="encoder-decoder", num_encoder_layers=2, **SHAPE), 0.3),
        (TOKENS, TOKENS.flip(1)),
    ),
}


def gradients(name: str, trained_layers: int, recomputes: bool) -> tuple[Tensor, list[Tensor | None], int]:
    """Returns the loss, the gradients, and the number of forward passes through blocks."""
    build, inputs = MODELS[name]
    model, passes = build(), []
    init_weights(model, 2)
    freeze_all_but_last(model, trained_layers)
    if recomputes:
        checkpoint_activations(model)
    for module in model.modules():
        if type(module).__name__ == "Block":
            module.attention.register_forward_pre_hook(lambda *_: passes.append(1))
    loss = model(*inputs, **{KEYS[name]: sequence_keys(3, np.arange(2)[:, None], CPU)}).square().sum()
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()], len(passes)


@pytest.mark.parametrize("trained_layers", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_same_bit_for_bit(name: str, trained_layers: int) -> None:
    expected_loss, expected, num_passes = gradients(name, trained_layers, False)
    loss, found, num_again = gradients(name, trained_layers, True)
    assert num_again > num_passes
    assert torch.equal(loss, expected_loss)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


def test_nothing_is_computed_again_without_gradients() -> None:
    build, inputs = MODELS["decoder"]
    model = build().eval()
    expected = model(*inputs).detach()
    checkpoint_activations(model)
    with torch.no_grad():
        assert torch.equal(model(*inputs), expected)
