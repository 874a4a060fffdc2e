"""Dropout: masks are functions of names, the kernel's masks equal PyTorch's, and entries are dropped at the given
rate."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from lm.config import ModelConfig
from lm.dropout import LEVELS, Dropout, kept_columns, mix, sequence_keys, token_keys
from lm.encoder import MaskedLanguageModel, SequenceClassifier
from lm.model import LanguageModel, checkpoint_activations, init_weights
from lm.native import operators

CPU = torch.device("cpu")


def split_mix(state: int) -> int:
    """SplitMix64 with Python integers: returns the number after `state`."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_masks_are_split_mixs_numbers() -> None:
    """SplitMix64's published first outputs for the seed 1234567; a row has its counter's numbers, 16 bits per
    column."""
    assert split_mix(1234567) == 6457827717110365317
    key, width, threshold = 2**63 - 17, 11, 20_000
    columns = []
    for group in range(3):
        number = split_mix((key + group * 0x9E3779B97F4A7C15) % 2**64)
        columns += [(number >> 16 * lane) % LEVELS for lane in range(4)]
    # As signed numbers, 16 bits lie in the order 32,768 .. 65,535, 0 .. 32,767.
    expected = [(bits + LEVELS // 2) % LEVELS >= threshold for bits in columns[:width]]
    assert kept_columns(torch.tensor([key]), width, threshold)[0].tolist() == expected
    assert any(expected)
    assert not all(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 255, 256, 257, 1030])
def test_the_kernel_is_its_twin_bit_for_bit(dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(3, 5, width, generator=generator).to(dtype)
    keys = sequence_keys(11, np.arange(15).reshape(3, 5), CPU)
    dropout = Dropout(0.3)

    def run() -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        y = dropout(leaf, keys, 2)
        y.backward(torch.ones_like(y))
        assert leaf.grad is not None
        return y.detach(), leaf.grad

    if operators.library() is None:
        pytest.skip("no compiler here")
    y, gradient = run()
    monkeypatch.setattr(operators, "library", lambda: None)
    twin_y, twin_gradient = run()
    assert torch.equal(y, twin_y)
    assert torch.equal(gradient, twin_gradient)
    # Kept entries are scaled in the forward and in the backward.
    assert torch.equal(y != 0, gradient != 0)
    scale = torch.tensor(LEVELS / (LEVELS - dropout.threshold)).to(dtype)
    assert set(gradient.unique().tolist()) <= {0.0, float(scale)}


def test_the_expectation_stays_and_draws_do_not_depend_on_each_other() -> None:
    rate, D = 0.1, 4096
    keys = sequence_keys(5, np.arange(256), CPU)
    dropout = Dropout(rate)
    ones = dropout(torch.ones(256, D), keys, 0)
    share = float((ones == 0).float().mean())
    assert share == pytest.approx(rate, abs=5 * (rate * (1 - rate) / ones.numel()) ** 0.5 + 1 / LEVELS)
    assert float(ones.mean()) == pytest.approx(1, abs=0.002)
    masks = torch.stack([dropout(torch.ones(256, D), keys, site) == 0 for site in range(4)]).float()
    # Neighbouring columns, rows and sites, and columns that share 64 bits.
    pairs: list[tuple[Tensor, Tensor]] = [(masks[..., :-d], masks[..., d:]) for d in (1, 2, 3, 4, 8)]
    pairs += [(masks[:, :-1], masks[:, 1:]), (masks[:-1], masks[1:])]
    for first, second in pairs:
        together = float((first * second).mean())
        sigma = rate / first.numel() ** 0.5
        assert together == pytest.approx(rate**2, abs=6 * sigma)


def test_keys_differ_by_seed_sequence_position_part_and_site() -> None:
    keys = []
    for seed in (0, 1):
        of_sequences = sequence_keys(seed, np.arange(8)[:, None], CPU)
        for part in range(3):
            tokens = token_keys(of_sequences, torch.arange(16).expand(8, 16), part)
            keys += [mix(tokens + site) for site in range(3)]
    found = torch.stack(keys).flatten()
    assert len(found.unique()) == len(found)


SHAPE = {"vocab_size": 40, "max_position_embeddings": 32, "hidden_size": 16, "num_hidden_layers": 2,
"num_attention_heads": 2, "num_key_value_heads": 2,
         "intermediate_size": 24}  # fmt: skip
DECODER = ModelConfig(**SHAPE)
ENCODER = ModelConfig(kind="encoder", mlp="gelu", **SHAPE)
TOKENS = torch.randint(1, 40, (4, 9), generator=torch.Generator().manual_seed(1))


def key(*numbers: int) -> Tensor:
    return sequence_keys(7, np.array(numbers)[:, None], CPU)


@pytest.mark.parametrize(
    "build",
    [
        lambda: LanguageModel(DECODER, 0.2),
        lambda: MaskedLanguageModel(ENCODER, 0.2),
        lambda: SequenceClassifier(ENCODER, ["score"], 0.2),
    ],
    ids=["decoder", "masked", "classifier"],
)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_rows_result_does_not_depend_on_the_others(
    build: Callable[[], torch.nn.Module], precision: torch.dtype
) -> None:
    model = build()
    init_weights(model, 0)
    model.train()
    with torch.autocast("cpu", precision, enabled=precision == torch.bfloat16):
        together = model(TOKENS, sequence_keys_BT=key(3, 1, 4, 15))
        for row, number in enumerate((3, 1, 4, 15)):
            alone = model(TOKENS[[row]], sequence_keys_BT=key(number))
            torch.testing.assert_close(together[[row]], alone, atol=1e-5 if precision == torch.float32 else 0.1, rtol=0)
        other = model(TOKENS[[0]], sequence_keys_BT=key(5))
    assert not torch.allclose(together[[0]], other, atol=0.01)


def test_a_sequences_result_does_not_depend_on_where_it_is_packed() -> None:
    model = LanguageModel(DECODER, 0.2)
    init_weights(model, 0)
    model.train()
    first, second = TOKENS[:1], TOKENS[1:2, :5]
    apart = [model(first, sequence_keys_BT=key(3)), model(second, sequence_keys_BT=key(8))]
    for order in ((0, 1), (1, 0)):
        parts = [((first, 3), (second, 8))[place] for place in order]
        row = torch.cat([part for part, _ in parts], dim=1)
        segments = torch.cat([torch.full_like(part, place + 1) for place, (part, _) in enumerate(parts)], dim=1)
        keys = torch.cat([key(number).expand(part.shape) for part, number in parts], dim=1)
        packed = model(row, segments, sequence_keys_BT=keys)
        expected = torch.cat([apart[place] for place in order], dim=1)
        torch.testing.assert_close(packed, expected, atol=1e-5, rtol=0)


def test_padding_and_recomputation_change_no_mask() -> None:
    gradients = []
    for recomputes, padding in ((False, 0), (True, 0), (True, 4)):
        model = LanguageModel(DECODER, 0.2)
        init_weights(model, 0)
        model.train()
        if recomputes:
            checkpoint_activations(model)
        padded = torch.nn.functional.pad(TOKENS, (0, padding))
        model(padded, sequence_keys_BT=key(0, 1, 2, 3))[:, :9].square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for ours in gradients[1:]:
        torch.testing.assert_close(ours, gradients[0], atol=1e-6, rtol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_drops_what_a_cpu_drops() -> None:
    keys = sequence_keys(11, np.arange(64), CPU)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(64, 1030).to(dtype)
        dropout = Dropout(0.3)
        assert torch.equal(dropout(x.cuda(), keys.cuda(), 1).cpu(), dropout(x, keys, 1))
