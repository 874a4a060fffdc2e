"""How sequences of different lengths become passes: which rank reads them, in which pass, in rows of what width.

All of it follows from the lengths, so that every rank could work it out, and a resumed run does the same again.
"""

import heapq
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from training.config import BatchConfig
from training.packing import Packed, PackedRows, best_fit
from training.tokens import Sequences

LEAST_WIDTH = 16
WIDTHS_PER_DOUBLING = 8


def bucket(num_tokens: int) -> int:
    """The smallest width of a row that holds so many tokens: 16, 18, 20, ..., 32, 36, 40, ..., 64, 72, ...

    Few widths mean few shapes of tensors, which allocators and compilers of GPUs have to know each.
    """
    step = LEAST_WIDTH // WIDTHS_PER_DOUBLING
    while 2 * WIDTHS_PER_DOUBLING * step < num_tokens:
        step *= 2
    return max(LEAST_WIDTH, -(-num_tokens // step) * step)


def row_width(lengths: NDArray[np.int64]) -> int:
    """The width of the rows that sequences of these lengths are packed into with the least padding.

    Widths up to twice the narrowest are tried; of equals the narrowest is taken, as attention in it costs least.
    """
    width = narrowest = bucket(int(lengths.max()))
    widths = [width]
    while width < 2 * narrowest and len(lengths) > 1:
        width = bucket(width + 1)
        widths.append(width)
    return min(widths, key=lambda width: (width * _num_rows(lengths, width), width))


def padded_tokens(lengths: Sequence[int]) -> int:
    """Tokens of the rows that sequences of these lengths are packed into, with padding."""
    found = np.array(lengths, dtype=np.int64)
    width = row_width(found)
    return width * _num_rows(found, width)


def packed_rows(sequences: Sequences, device: torch.device) -> PackedRows:
    """All sequences in rows of `row_width`; padding is token 0.

    A CPU gains nothing by few widths: there, rows are only as wide as the fullest.
    """
    packed = Packed(sequences, row_width(sequences.lengths), pad_id=0)
    rows = packed.take(np.arange(len(packed)))
    return rows.cut(int((rows.segments > 0).sum(axis=1).max())) if device.type == "cpu" else rows


def pass_tokens(batch: BatchConfig, units: Sequence[Sequence[int]], *, with_gradients: bool) -> int:
    """Tokens of a pass of one rank, padding included, over units of the batch, given as their sequences' lengths."""
    if batch.forward_tokens and not with_gradients:
        return batch.forward_tokens
    return batch.micro_batch_tokens or batch.micro_batch_size * max(padded_tokens(unit) for unit in units)


def split_passes(units: Sequence[Sequence[int]], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Places of the units in each pass of each rank: [rank][pass], ascending.

    A unit is what one pass reads together (a response; all responses of a comparison), given as the lengths of its
    sequences. A pass has at most `max_tokens` tokens, padding included, unless a single unit has more. All ranks have
    the same number of passes, as ZeRO-3 gathers weights in each, and about as many tokens; a pass may be empty, though
    no rank's first is if there are as many units as ranks.
    """
    sizes = [sum(lengths) for lengths in units]
    num_passes = max(1, math.ceil(sum(sizes) / (num_ranks * max_tokens)))
    while True:
        bins = _balanced(sizes, num_ranks * num_passes)
        if all(len(held) < 2 or padded_tokens([n for u in held for n in units[u]]) <= max_tokens for held in bins):
            return _dealt(bins, sizes, num_ranks)
        num_passes = max(num_passes + 1, round(1.02 * num_passes))


def _balanced(sizes: Sequence[int], num_bins: int) -> list[list[int]]:
    """The items in bins: from the largest on, each goes to the bin with the smallest total (Graham 1969)."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    totals = [(0, place) for place in range(num_bins)]
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        total, place = heapq.heappop(totals)
        bins[place].append(item)
        heapq.heappush(totals, (total + sizes[item], place))
    return [sorted(held) for held in bins]


def _dealt(bins: Sequence[list[int]], sizes: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
    """As many bins for each rank: round after round, the largest that are left, every other round from the last rank
    to the first.
    """
    order = sorted(range(len(bins)), key=lambda place: (-sum(sizes[item] for item in bins[place]), place))
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for number, place in enumerate(order):
        turn, rank = divmod(number, num_ranks)
        ranks[num_ranks - 1 - rank if turn % 2 else rank].append(bins[place])
    return ranks


def _num_rows(lengths: NDArray[np.int64], width: int) -> int:
    return len(best_fit(lengths.tolist(), width))
