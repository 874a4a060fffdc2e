"""Examples of attention that talks and courses work by hand, to their printed digits.

The matrix Z of the first one is printed with two wrong cells, which contradict the example's own scores and values: row
b, column 4 as 7.000 (6.998 is right) and row d, column 1 as 9.250 (8.250 is right). See docs/parity.md.
"""

import math

import pytest
import torch
from torch import Tensor

from lm.attention import Attention, attend
from lm.config import ModelConfig

INPUTS = torch.tensor([[1, 2, 3, 4], [2, 4, 1, 3], [1, 4, 3, 2], [3, 1, 2, 4]], dtype=torch.float32)
W_Q = torch.tensor([[0.5, 2, 0.5, 2], [2, 0.5, 2, 0.5]] * 2)
W_K = torch.tensor([[0.5, 1, 1.5, 2], [1, 1.5, 2, 0.5], [1.5, 2, 0.5, 1], [2, 0.5, 1, 1.5]])
W_V = 1 - torch.eye(4)
QUERIES = [[14, 11, 14, 11], [15.5, 9.5, 15.5, 9.5], [14, 11, 14, 11], [12.5, 12.5, 12.5, 12.5]]
KEYS = [[15, 12, 11, 12], [12.5, 11.5, 14.5, 11.5], [13, 14, 13, 10], [13.5, 10.5, 11.5, 14.5]]
VALUES = [[9, 8, 7, 6], [8, 6, 9, 7], [9, 6, 7, 8], [7, 9, 8, 6]]
Z = [
    [8.265, 6.398, 8.370, 6.967],
    [8.088, 6.097, 8.817, 6.998],
    [8.265, 6.398, 8.370, 6.967],
    [8.250, 7.250, 7.750, 6.75],
]
MISPRINTED = {(1, 3): 7.000, (3, 0): 9.250}  # (row, column) of Z, from 0, and what is printed there


@pytest.fixture
def attention() -> Attention:
    """One head of dimension 4 with the example's matrices and nothing after the weighted sum."""
    config = ModelConfig(
        vocab_size=8,
        max_position_embeddings=4,
        hidden_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        intermediate_size=4,
    )
    module = Attention(config)
    module.qkv.weight.data.copy_(torch.cat([W_Q, W_K, W_V]))
    module.out.weight.data.copy_(torch.eye(4))
    return module


@torch.no_grad()
def test_queries_keys_and_values_of_the_example(attention: Attention) -> None:
    q, k, v = attention.qkv(INPUTS).split(4, dim=-1)
    assert (q.tolist(), k.tolist(), v.tolist()) == (QUERIES, KEYS, VALUES)


@torch.no_grad()
def test_scores_and_weights_of_a(attention: Attention) -> None:
    q, k, _ = attention.qkv(INPUTS).split(4, dim=-1)
    scores = q[0] @ k.T
    assert scores.tolist() == [628, 631, 628, 625]
    assert (scores / 2).tolist() == [314, 315.5, 314, 312.5]
    assert (scores / 2).softmax(dim=0).tolist() == pytest.approx([0.149, 0.668, 0.149, 0.033], abs=5e-4)


@torch.no_grad()
def test_z_of_the_example(attention: Attention) -> None:
    everyone = torch.ones(1, 4, 4, dtype=torch.bool)
    found = attention(INPUTS[None], None, everyone, None, 0)[0]
    for row, expected in zip(found.tolist(), Z, strict=True):
        assert row == pytest.approx(expected, abs=5e-4)


@torch.no_grad()
def test_two_printed_cells_of_z_contradict_the_example(attention: Attention) -> None:
    """The right values follow from the printed scores and values alone; no cell of Z can exceed its column of V."""
    everyone = torch.ones(1, 4, 4, dtype=torch.bool)
    found = attention(INPUTS[None], None, everyone, None, 0)[0]
    for (row, column), printed in MISPRINTED.items():
        query, values = QUERIES[row], [value[column] for value in VALUES]
        scores = [sum(q * k for q, k in zip(query, key, strict=True)) / 2 for key in KEYS]
        powers = [math.exp(score - max(scores)) for score in scores]
        by_hand = sum(power * value for power, value in zip(powers, values, strict=True)) / sum(powers)
        assert Z[row][column] == pytest.approx(by_hand, abs=5e-4)
        assert float(found[row, column]) == pytest.approx(by_hand, abs=1e-5)
        assert abs(by_hand - printed) > 1e-3
    assert MISPRINTED[3, 0] > max(value[0] for value in VALUES)


def weights(q_T4: Tensor, k_T4: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the attention weights [T, S]: the output if the values are the unit vectors."""
    identity = torch.eye(len(k_T4))
    return attend(q_T4[None, None], k_T4[None, None], identity[None, None], mask)[0, 0]


@torch.no_grad()
def test_the_causal_mask_gives_later_words_a_weight_of_exactly_0(attention: Attention) -> None:
    q, k, _ = attention.qkv(INPUTS).split(4, dim=-1)
    found = weights(q, k, None)
    assert torch.equal(found.triu(diagonal=1), torch.zeros(4, 4))
    assert found.sum(dim=1).tolist() == pytest.approx([1] * 4)
    assert found[0].tolist() == [1, 0, 0, 0]
    assert found[1, :2].tolist() == pytest.approx((q[1] @ k[:2].T / 2).softmax(dim=0).tolist())


@pytest.mark.parametrize(
    ("spread", "printed"),
    [
        (1, [0.0900, 0.2447, 0.6652]),
        (10, [2.0611e-09, 4.5398e-05, 9.9995e-01]),
        (100, [0.0000e00, 3.7835e-44, 1.0000e00]),
    ],
)
def test_the_wider_the_scores_the_sharper_the_softmax(spread: int, printed: list[float]) -> None:
    # One query of four 1s, and keys whose products with it, divided by √4, are -spread, 0 and spread.
    keys = torch.tensor([[-spread], [0.0], [spread]]).expand(3, 4) / 2
    found = weights(torch.ones(1, 4), keys, torch.ones(1, 1, 3, dtype=torch.bool))[0]
    for value, expected in zip(found.tolist(), printed, strict=True):
        # Printed to four places: of the number if all are above 0.01, otherwise of the mantissa.
        assert value == pytest.approx(expected, rel=1e-5 if spread == 1 else 5e-5, abs=5e-5 if spread == 1 else 0)
