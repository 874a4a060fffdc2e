"""Sequences of different lengths as one array. Shape letters: B sequences, T tokens of the longest."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def pad_right(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens [B, T] followed by 0, and segments [B, T]: 1 for tokens, 0 for padding.

    Padding on the right is harmless to a causal model; an encoder needs the segments.
    """
    tokens = np.zeros((len(sequences), max(len(sequence) for sequence in sequences)), dtype=np.int64)
    segments = np.zeros_like(tokens)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
        segments[row, : len(sequence)] = 1
    return torch.from_numpy(tokens).to(device), torch.from_numpy(segments).to(device)


def pad_left(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens aligned at their right end [B, T], 0 before them; and the column of each one's first real token [B]."""
    width = max(len(sequence) for sequence in sequences)
    padded = np.zeros((len(sequences), width), dtype=np.int64)
    for row, sequence in enumerate(sequences):
        padded[row, width - len(sequence) :] = sequence
    first_real = torch.tensor([width - len(sequence) for sequence in sequences], device=device)
    return torch.from_numpy(padded).to(device), first_real


def last_tokens(segments_BT: Tensor) -> Tensor:
    """True at each sequence's last token, [B, T], for the segments of `pad_right`."""
    following_BT = torch.nn.functional.pad(segments_BT, (0, 1))[:, 1:]
    return (segments_BT > 0) & (following_BT == 0)
