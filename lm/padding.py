"""Sequences of different lengths as one array. Shape letters: B sequences, T tokens of the longest."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lm.transfer import upload

MAX_ROWS, MAX_TOKENS = 128, 2**15  # per pass without gradients, padding included; 3.6 GiB for 8B parameters


def batches_of(lengths: Sequence[int], max_rows: int = MAX_ROWS, max_tokens: int = MAX_TOKENS) -> list[list[int]]:
    """Split sequences, given by their lengths in order, into batches for passes without gradients.

    A batch has at most `max_rows` sequences and, padded to its longest, at most `max_tokens` tokens; a longer sequence
    is a batch of its own. Pass lengths in sorted order to minimise padding.
    """
    batches: list[list[int]] = []
    width = 0
    for row, length in enumerate(lengths):
        width = max(width, length)
        if not batches or len(batches[-1]) == max_rows or (len(batches[-1]) + 1) * width > max_tokens:
            batches.append([])
            width = length
        batches[-1].append(row)
    return batches


def batches_by_length(sequences: Sequence[Sequence[int]], max_rows: int = MAX_ROWS) -> list[list[int]]:
    """Split sequences, sorted by length, as `batches_of` does; returns their places in `sequences`."""
    order = sorted(range(len(sequences)), key=lambda place: len(sequences[place]))
    batches = batches_of([len(sequences[place]) for place in order], max_rows)
    return [[order[row] for row in batch] for batch in batches]


def pad_right(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns tokens [B, T], padded with 0 on the right, and segments [B, T]: 1 for tokens, 0 for padding.

    Padding on the right is harmless to a causal model; an encoder needs the segments.
    """
    tokens = np.zeros((len(sequences), max(len(sequence) for sequence in sequences)), dtype=np.int64)
    segments = np.zeros_like(tokens)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
        segments[row, : len(sequence)] = 1
    return upload(torch.from_numpy(tokens), device), upload(torch.from_numpy(segments), device)


def pad_left(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns tokens [B, T], padded with 0 on the left, and the column of each sequence's first token [B]."""
    width = max(len(sequence) for sequence in sequences)
    padded = np.zeros((len(sequences), width), dtype=np.int64)
    for row, sequence in enumerate(sequences):
        padded[row, width - len(sequence) :] = sequence
    first_real = torch.tensor([width - len(sequence) for sequence in sequences])
    return upload(torch.from_numpy(padded), device), upload(first_real, device)


def last_tokens(segments_BT: Tensor) -> Tensor:
    """Returns True at each sequence's last token, [B, T]. Segments number a row's sequences from 1; 0 = padding."""
    following_BT = torch.nn.functional.pad(segments_BT, (0, 1))[:, 1:]
    return (segments_BT > 0) & (following_BT != segments_BT)


def first_tokens(segments_BT: Tensor) -> Tensor:
    """Returns True at each sequence's first token, [B, T], as `last_tokens`."""
    preceding_BT = torch.nn.functional.pad(segments_BT, (1, 0))[:, :-1]
    return (segments_BT > 0) & (preceding_BT != segments_BT)
