"""Ragged sequences as one array, by hand."""

import torch

from lm.transfer import batches_by_length, batches_of, first_tokens, last_tokens, pad_left, pad_right

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


def test_batches_keep_to_the_rows_and_to_the_padded_tokens() -> None:
    assert batches_of([1, 1, 2, 3, 9, 9, 30, 2], max_rows=3, max_tokens=18) == [[0, 1, 2], [3, 4], [5], [6], [7]]
    assert batches_of([]) == []
    sequences = [[0] * length for length in (5, 1, 3, 2)]
    assert batches_by_length(sequences, max_rows=3) == [[1, 3, 2], [0]]


def test_ends_of_packed_sequences_by_hand() -> None:
    segments = torch.tensor([[1, 1, 2, 3, 3, 0], [1, 1, 1, 1, 1, 1]])
    assert first_tokens(segments).int().tolist() == [[1, 0, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0]]
    assert last_tokens(segments).int().tolist() == [[0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 1]]
