"""Ragged sequences as one array, by hand."""

import torch

from lm.padding import last_tokens, pad_left, pad_right

CPU = torch.device("cpu")
RAGGED = [[5, 6], [7], [8, 0, 4]]


def test_padding_on_the_right_comes_with_segments() -> None:
    tokens, segments = pad_right(RAGGED, CPU)
    assert tokens.tolist() == [[5, 6, 0], [7, 0, 0], [8, 0, 4]]
    assert segments.tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]
    assert last_tokens(segments).int().tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]


def test_padding_on_the_left_comes_with_the_first_columns() -> None:
    tokens, first = pad_left(RAGGED, CPU)
    assert tokens.tolist() == [[0, 5, 6], [0, 0, 7], [8, 0, 4]]
    assert first.tolist() == [1, 2, 0]
