"""Rotary and sinusoidal positions against the papers' equations."""

import math

import pytest
import torch

from lm.config import RopeScaling
from lm.positions import attention_sharpening, rotary_frequencies, rotary_tables, rotate, shift_matrix, sinusoids

CPU = torch.device("cpu")


def test_sinusoids_by_hand() -> None:
    found = sinusoids(torch.tensor([[0, 3]]), 4)[0]
    assert found[0].tolist() == [0.0, 1.0, 0.0, 1.0]
    expected = [math.sin(3), math.cos(3), math.sin(3 / 100), math.cos(3 / 100)]
    assert found[1].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("width", [4, 18])
@pytest.mark.parametrize("k", [1, 7, -5])
def test_a_shift_by_k_is_the_linear_map_e_of_t_plus_k_is_t_to_the_k_e_of_t(width: int, k: int) -> None:
    one = shift_matrix(1, width).double()
    shift = torch.linalg.matrix_power(one, k)  # T^k; for negative k, the power of the inverse
    torch.testing.assert_close(shift, shift_matrix(k, width).double(), atol=1e-5, rtol=0)
    t = torch.arange(8, 40)
    here, there = sinusoids(t[None], width)[0].double(), sinusoids(t[None] + k, width)[0].double()
    torch.testing.assert_close(here @ shift.T, there, atol=1e-4, rtol=0)


def test_linear_scaling_is_a_slower_clock() -> None:
    scaling = RopeScaling(rope_type="linear", factor=4)
    positions = torch.arange(12)[None]
    x = torch.randn(1, 12, 2, 8, generator=torch.Generator().manual_seed(0))
    plain = rotate(x, rotary_tables(positions / 4, 8, 100.0, None, torch.float32))
    torch.testing.assert_close(rotate(x, rotary_tables(positions, 8, 100.0, scaling, torch.float32)), plain)


def test_llama_3_keeps_fast_pairs_and_slows_slow_ones() -> None:
    # Wavelengths 2π·θ^(i/2): about 6.3, 62.8, 628 and 6283 tokens against 512 / 4 = 128 and 512 / 1.
    scaling = RopeScaling(rope_type="llama3", factor=8, original_max_position_embeddings=512)
    plain = rotary_frequencies(8, 10_000.0, None, CPU)
    ratio = (rotary_frequencies(8, 10_000.0, scaling, CPU) / plain).tolist()
    assert ratio == pytest.approx([1, 1, 1 / 8, 1 / 8])
    # A wavelength of 256 lies between: with 2 turns in 512 tokens, the share kept is (2 - 1) / (4 - 1).
    between = rotary_frequencies(4, (256 / (2 * math.pi)) ** 2, scaling, CPU)[1]
    assert float(between) == pytest.approx(2 * math.pi / 256 * (1 / 3 + 2 / 3 / 8), rel=1e-5)


def test_yarn_keeps_fast_pairs_slows_slow_ones_and_sharpens() -> None:
    scaling = RopeScaling(rope_type="yarn", factor=4, original_max_position_embeddings=512)
    plain = rotary_frequencies(64, 10_000.0, None, CPU)
    ratio = rotary_frequencies(64, 10_000.0, scaling, CPU) / plain
    turns = 512 * plain / (2 * math.pi)
    assert ratio[turns > 40].tolist() == pytest.approx([1] * int((turns > 40).sum()))
    assert ratio[turns < 0.8].tolist() == pytest.approx([0.25] * int((turns < 0.8).sum()))
    assert bool((ratio.diff() <= 1e-6).all())
    assert attention_sharpening(scaling) == pytest.approx(0.1 * math.log(4) + 1)
    q = torch.randn(1, 1, 1, 64, generator=torch.Generator().manual_seed(1))
    turned = rotate(q, rotary_tables(torch.zeros(1, 1), 64, 10_000.0, scaling, torch.float32))
    torch.testing.assert_close(turned, q * (0.1 * math.log(4) + 1))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rope_type": "llama3", "factor": 8},
        "original_max_position_embeddings is missing; 'llama3' scaling needs it"),
        ({"rope_type": "linear", "factor": 0.5}, "factor"),
        ({"rope_type": "llama3", "factor": 8, "original_max_position_embeddings": 8, "low_freq_factor": 4},
        "4.0 is not below"), ({"kind": "dynamic", "factor": 2}, "kind"),
    ],
)  # fmt: skip
def test_impossible_scalings_are_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RopeScaling.model_validate(values)
