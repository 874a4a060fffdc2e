"""Heads with padded rows against heads without: logits, log-probs, gradients."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lm.encoder import MaskedLanguageModel
from lm.layers import Head, align_heads, padded_rows
from lm.model import LanguageModel
from lm.sampling import token_logprobs
from lm.source import RandomInit, load
from tests.gpu.models import shape, tokens

GPU = torch.device("cuda")  # only its name is used
V, P = 500, 512
CONFIG = shape(
    vocab_size=V,
    hidden_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=48,
    tie_word_embeddings=False,
)
BERT = CONFIG.model_copy(update={"kind": "encoder", "positions": "learned", "norm": "layer", "mlp": "gelu"})
MODELS: dict[str, Callable[[], nn.Module]] = {
    "untied": partial(LanguageModel, CONFIG),
    "tied": partial(LanguageModel, CONFIG.model_copy(update={"tie_word_embeddings": True})),
    "masked words, with a bias": partial(MaskedLanguageModel, BERT),
}
TOKENS_BT = torch.from_numpy(tokens(3, 20).astype(np.int64)) % V


def passes(model: nn.Module, selected_BT: Tensor | None, *, autocast: bool) -> dict[str, Tensor]:
    """Returns the logits, log-probs and all gradients of their sum."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(TOKENS_BT, None, selected_BT)
    targets = TOKENS_BT if selected_BT is None else TOKENS_BT[selected_BT]
    logprobs = token_logprobs(logits, targets, 0.7)
    logprobs.sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), "logprobs": logprobs.detach(), **gradients}


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("selects", [False, True], ids=["all", "selected"])
@pytest.mark.parametrize("name", MODELS)
def test_a_padded_head_gives_the_same_numbers(name: str, selects: bool, autocast: bool) -> None:
    selected_BT = (TOKENS_BT % 3 == 0) if selects else None
    plain, padded = (load(RandomInit(MODELS[name], seed=0)) for _ in range(2))
    align_heads(padded, GPU)
    expected, found = (passes(model, selected_BT, autocast=autocast) for model in (plain, padded))
    assert found.keys() == expected.keys()
    assert found["logits"].shape[-1] == V
    for key, value in found.items():
        assert value.shape == expected[key].shape
        assert value.dtype == expected[key].dtype
        torch.testing.assert_close(value, expected[key], atol=0.03 if autocast else 2e-5, rtol=0.02, msg=key)
    assert padded.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(weight, plain.state_dict()[key]) for key, weight in padded.state_dict().items())


def test_the_gradient_goes_to_the_product_as_it_is() -> None:
    """Rows are aligned, the padding is 0, and no slice is copied back into a table of zeros."""
    head = Head(8, V, bias=False)
    head.row_multiple = 64
    logits_BTV = head(torch.randn(2, 3, 8))
    assert logits_BTV.stride() == (3 * P, P, 1)
    heard: list[Tensor] = []
    assert logits_BTV._base is not None
    logits_BTV._base.register_hook(heard.append)
    total = token_logprobs(logits_BTV, torch.tensor([[0, V - 1, 7]] * 2)).sum()
    names, nodes = set(), [total.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None:
            names.add(node.name())
            nodes += [following for following, _ in node.next_functions]
    assert "SliceBackward0" not in names
    total.backward()
    assert heard[0].reshape(-1, P)[:, V:].count_nonzero() == 0
    assert heard[0].reshape(-1, P).sum(dim=1) == pytest.approx(torch.zeros(6), abs=1e-5)


def test_only_the_whole_of_a_padded_product_is_taken_as_one() -> None:
    whole = torch.randn(6, P)
    assert padded_rows(whole[:, :V]).shape == (6, P)
    for other in (whole[:, 1:V], whole[1:, :V], whole[:, :V].clone(), whole, torch.randn(V, 6).T):
        assert padded_rows(other) is other


def test_a_cpu_pads_nothing_and_neither_does_a_vocabulary_that_fits() -> None:
    model = load(RandomInit(MODELS["untied"], seed=0))
    align_heads(model, torch.device("cpu"))
    assert model.head.row_multiple == 1
    head = Head(8, 128, bias=False)
    align_heads(head, GPU)
    assert head(torch.randn(2, 8)).is_contiguous()
