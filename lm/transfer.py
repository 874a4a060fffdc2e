"""Batches on a device: sequences of different lengths as one array, and copies between CPU memory and the device.

Shape letters: B batch or sequences, T tokens of the longest, D model width, C chosen positions.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from CPU memory to the device without waiting; one already on the device is returned as it is.

    Copies to a GPU go through pinned memory. A copy from other memory begins only when everything queued before it is
    done, and the CPU waits for it.
    """
    is_copied = values.is_cpu and device.type == "cuda"
    return values.pin_memory().to(device, non_blocking=True) if is_copied else values.to(device)


def uploaded(values: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies several tensors as `upload` does."""
    return {name: upload(value, device) for name, value in values.items()}


def at_positions(values_BTD: Tensor, selected_BT: Tensor) -> Tensor:
    """Returns `values_BTD[selected_BT]`, [C, D], or the values at places [C] of the flattened rows, by their type.

    With a mask in CPU memory or with places on the device, the CPU need not wait for a GPU.
    """
    if selected_BT.dtype == torch.int64:
        return values_BTD.flatten(0, 1).index_select(0, selected_BT)
    if selected_BT.device == values_BTD.device:
        return values_BTD[selected_BT]
    places_C = upload(selected_BT.flatten().nonzero()[:, 0], values_BTD.device)
    return values_BTD.flatten(0, 1).index_select(0, places_C)


def spread(values_C: Tensor, mask_BT: Tensor) -> Tensor:
    """Returns [B, T] with the values where the mask (in CPU memory) is True, row by row, and 0 elsewhere."""
    places_C = upload(mask_BT.flatten().nonzero()[:, 0], values_C.device)
    return values_C.new_zeros(mask_BT.numel()).scatter(0, places_C, values_C).view(mask_BT.shape)


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
