"""Token sequences packed into rows, the order in which training visits rows, and how a batch is split into passes.

The lengths alone decide which rank reads a sequence, in which pass, and how wide its row is. So every rank can compute
the split for itself, and a resumed run repeats it.

Shape letters: B rows, T tokens of a row, S sequences of a row.
"""

import heapq
import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from training.config import BatchConfig
from training.tokens import Sequences, map_array

IntArray = NDArray[np.int64]

# Row widths (`bucket`).
LEAST_WIDTH = 16
WIDTHS_PER_DOUBLING = 8


@dataclass(frozen=True)
class PackedRows:
    """Rows of packed sequences, [B, T] each.

    `segments` numbers the sequences of a row from 1; 0 = padding. `counted` is True for tokens whose prediction counts
    in the loss; a token at t is predicted from the one at t - 1 of the same sequence. `numbers` [B, S] identifies a
    row's first, second, ... sequence, so that a sequence is the same wherever it is packed; -1 = none.
    """

    tokens: IntArray
    segments: IntArray
    counted: NDArray[np.bool_]
    numbers: IntArray

    def __len__(self) -> int:
        return len(self.tokens)

    def sequence_of_tokens(self) -> IntArray:
        """The number of each token's sequence, [B, T]; arbitrary at padding."""
        sequences: IntArray = np.take_along_axis(self.numbers, np.maximum(self.segments - 1, 0), axis=1)
        return sequences

    def num_tokens(self, rows: IntArray) -> int:
        """Tokens of these rows, without padding."""
        return int((self.segments[rows] > 0).sum())

    def num_counted(self, rows: IntArray) -> int:
        """Tokens of these rows that count in the loss."""
        return int(self.counted[rows].sum())

    def take(self, rows: IntArray) -> "PackedRows":
        """These rows."""
        return PackedRows(self.tokens[rows], self.segments[rows], self.counted[rows], self.numbers[rows])

    def cut(self, num_tokens: int) -> "PackedRows":
        """The first tokens of each row; what is left out must be padding."""
        first = np.s_[:, :num_tokens]
        return PackedRows(self.tokens[first], self.segments[first], self.counted[first], self.numbers)


class Packed:
    """Rows of packed sequences, laid out on demand, since the sequences may be in a memory-mapped file.

    Sequences are packed best-fit, longest first, and never split across rows. Memory: 8 bytes per sequence and 16 per
    row, in addition to `sequences`.

    Raises:
        ValueError: a sequence is longer than a row; the message gives its number.
    """

    def __init__(self, sequences: Sequences, seq_len: int, pad_id: int) -> None:
        self.sequences, self.seq_len, self.pad_id = sequences, seq_len, pad_id
        rows = best_fit(sequences.lengths.tolist(), seq_len)
        sizes = np.array([len(row) for row in rows], dtype=np.int64)
        self._ends: IntArray = np.cumsum(sizes)
        self._members = np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int64, count=len(sequences))
        starts = self._ends - sizes
        self._num_tokens = _sums(sequences.lengths[self._members], starts)
        self._num_counted = _sums(sequences.num_counted[self._members], starts)

    def __len__(self) -> int:
        return len(self._ends)

    def num_tokens(self, rows: IntArray) -> int:
        """Tokens of these rows, without padding."""
        return int(self._num_tokens[rows].sum(dtype=np.int64))

    def num_counted(self, rows: IntArray) -> int:
        """Tokens of these rows that count in the loss."""
        return int(self._num_counted[rows].sum(dtype=np.int64))

    def take(self, rows: IntArray) -> PackedRows:
        """Lay these rows out."""
        firsts = np.where(rows > 0, self._ends[rows - 1], 0)
        sizes = self._ends[rows] - firsts
        numbers_of_all = self._members[_ranges(firsts, sizes)]
        lengths = self.sequences.lengths_of(numbers_of_all)
        read = _ranges(self.sequences.ends[numbers_of_all] - lengths, lengths)
        written = _ranges(np.arange(len(rows)) * self.seq_len, self._num_tokens[rows].astype(np.int64))
        tokens = np.full((len(rows), self.seq_len), self.pad_id, dtype=np.int64)
        segments, counted = np.zeros_like(tokens), np.zeros(tokens.shape, dtype=np.bool_)
        tokens.flat[written] = self.sequences.tokens[read]
        segments.flat[written] = np.repeat(_ranges(np.ones_like(sizes), sizes), lengths)
        counted.flat[written] = self.sequences.counted[read]
        begins = np.cumsum(lengths) - lengths
        counted.flat[written[begins[lengths > 0]]] = False  # nothing in its own sequence predicts a first token
        numbers = np.full((len(rows), max(1, int(sizes.max(initial=1)))), -1, dtype=np.int64)
        numbers.flat[_ranges(np.arange(len(rows)) * numbers.shape[1], sizes)] = numbers_of_all
        return PackedRows(tokens, segments, counted, numbers)


def pack(sequences: Sequence[tuple[Sequence[int], Sequence[bool]]], seq_len: int, pad_id: int) -> PackedRows:
    """Lay out all rows that `Packed` makes of (tokens, counted) sequences. Raises: as `Packed`."""
    packed = Packed(Sequences.of(sequences), seq_len, pad_id)
    return packed.take(np.arange(len(packed)))


def best_fit(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Return the indices of the sequences in each row, longest first. Raises: as `Packed`."""
    for index, length in enumerate(lengths):
        if length > seq_len:
            raise ValueError(f"sequence {index} has {length} tokens; at most {seq_len} fit a row")
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # free tokens -> non-empty rows with exactly that many
    free_lengths: list[int] = []  # its keys, in order
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        place = bisect_left(free_lengths, length)
        if place == len(free_lengths):
            row, free = len(rows), seq_len
            rows.append([])
        else:
            free = free_lengths[place]
            row = open_rows[free].pop()
            if not open_rows[free]:
                del open_rows[free], free_lengths[place]
        rows[row].append(index)
        if free - length not in open_rows:
            open_rows[free - length] = []
            insort(free_lengths, free - length)
        open_rows[free - length].append(row)
    return rows


def _sums(values: NDArray[Any], starts: IntArray) -> NDArray[np.int32]:
    """Sums over the values from each start to the next; no range is empty."""
    if not len(starts):
        return np.empty(0, dtype=np.int32)
    return np.add.reduceat(values, starts).astype(np.int32)


def _ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """Concatenate the integer ranges of these starts and lengths."""
    before = np.cumsum(lengths) - lengths
    places: IntArray = np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
    return places


def stream_rows(path: Path, seq_len: int) -> NDArray[np.int32]:
    """Memory-map a file of tokens (int32) as a [B, T] array; a last partial row is left out.

    Raises:
        ValueError: the text does not fill one row.
    """
    stream = map_array(path, np.int32)
    num_rows = len(stream) // seq_len
    if num_rows == 0:
        raise ValueError(f"{path}: {len(stream)} tokens do not fill one row of {seq_len}; more text is needed")
    rows: NDArray[np.int32] = stream[: num_rows * seq_len].reshape(num_rows, seq_len)
    return rows


class Sampler:
    """The rows of each step's global batch: one random permutation per epoch.

    A pure function of (seed, step), so a resumed run needs no cursor. Every epoch visits every row once; a batch
    may span two epochs.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int) -> None:
        if num_rows < 1:
            raise ValueError("no rows to train on; at least one was expected")
        self.num_rows, self.batch_size, self.seed = num_rows, batch_size, seed
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int32)

    def batch(self, step: int) -> IntArray:
        """Row numbers [batch_size] of step 0, 1, ..."""
        return self.rows(step * self.batch_size, (step + 1) * self.batch_size)

    def rows(self, start: int, stop: int) -> IntArray:
        """Row numbers of the places `start` to `stop` (exclusive) of the epochs, one after another."""
        places = np.arange(start, stop)
        of_epochs = [self._rows(epoch, places) for epoch in np.unique(places // self.num_rows)]
        return np.concatenate(of_epochs) if of_epochs else places

    def _rows(self, epoch: int, places: IntArray) -> IntArray:
        if epoch != self._epoch:
            self._epoch = int(epoch)
            # The same order as `permutation` draws, in half the memory: every rank holds the order of all rows.
            kind = np.int32 if self.num_rows <= np.iinfo(np.int32).max else np.int64
            self._permutation = np.arange(self.num_rows, dtype=kind)
            np.random.default_rng([self.seed, self._epoch]).shuffle(self._permutation)
        inside = places[places // self.num_rows == epoch]
        return self._permutation[inside % self.num_rows].astype(np.int64)


def bucket(num_tokens: int) -> int:
    """Return the smallest row width that holds `num_tokens`, out of 16, 18, 20, ..., 32, 36, 40, ..., 64, 72, ...

    Few widths mean few tensor shapes, and GPU allocators and compilers handle each shape separately.
    """
    step = LEAST_WIDTH // WIDTHS_PER_DOUBLING
    while 2 * WIDTHS_PER_DOUBLING * step < num_tokens:
        step *= 2
    return max(LEAST_WIDTH, -(-num_tokens // step) * step)


def row_width(lengths: NDArray[np.int64]) -> int:
    """Return the row width that packs sequences of these lengths with the least padding.

    It tries widths up to twice the narrowest. Ties go to the narrower width, where attention costs less.
    """
    width = narrowest = bucket(int(lengths.max()))
    widths = [width]
    while width < 2 * narrowest and len(lengths) > 1:
        width = bucket(width + 1)
        widths.append(width)
    return min(widths, key=lambda width: (width * _num_rows(lengths, width), width))


def padded_tokens(lengths: Sequence[int]) -> int:
    """Count the tokens, including padding, of the rows that sequences of these lengths are packed into."""
    row_lengths = np.array(lengths, dtype=np.int64)
    width = row_width(row_lengths)
    return width * _num_rows(row_lengths, width)


def packed_rows(sequences: Sequences, device: torch.device) -> PackedRows:
    """Pack all sequences into rows of `row_width`; padding is token 0.

    A CPU gains nothing from few widths, so its rows are only as wide as the fullest one.
    """
    packed = Packed(sequences, row_width(sequences.lengths), pad_id=0)
    rows = packed.take(np.arange(len(packed)))
    return rows.cut(int((rows.segments > 0).sum(axis=1).max())) if device.type == "cpu" else rows


def pass_tokens(batch: BatchConfig, units: Sequence[Sequence[int]], *, with_gradients: bool) -> int:
    """Return the most tokens of one rank's pass, with padding. `units` are given as their sequences' lengths."""
    if batch.forward_tokens and not with_gradients:
        return batch.forward_tokens
    return batch.micro_batch_tokens or batch.micro_batch_size * max(padded_tokens(unit) for unit in units)


def split_passes(units: Sequence[Sequence[int]], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Return the indices of the units in each pass of each rank: [rank][pass], ascending.

    A unit is what one pass reads together (a response; all responses of a comparison), given as the lengths of its
    sequences. A pass has at most `max_tokens` tokens, padding included, unless a single unit has more. All ranks have
    the same number of passes, because ZeRO-3 gathers weights in each, and about the same number of tokens. A pass may
    be empty, but no rank's first pass is if there are at least as many units as ranks.
    """
    sizes = [sum(lengths) for lengths in units]
    num_passes = max(1, math.ceil(sum(sizes) / (num_ranks * max_tokens)))
    while True:
        bins = _balanced(sizes, num_ranks * num_passes)
        if all(len(held) < 2 or padded_tokens([n for u in held for n in units[u]]) <= max_tokens for held in bins):
            return _dealt(bins, sizes, num_ranks)
        num_passes = max(num_passes + 1, round(1.02 * num_passes))


def _balanced(sizes: Sequence[int], num_bins: int) -> list[list[int]]:
    """Distribute items over bins: largest first, each into the bin with the smallest total (Graham 1969)."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    totals = [(0, place) for place in range(num_bins)]
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        total, place = heapq.heappop(totals)
        bins[place].append(item)
        heapq.heappush(totals, (total + sizes[item], place))
    return [sorted(held) for held in bins]


def _dealt(bins: Sequence[list[int]], sizes: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
    """Deal the bins to the ranks, the same number to each: largest first, in rounds of alternating rank order."""
    order = sorted(range(len(bins)), key=lambda place: (-sum(sizes[item] for item in bins[place]), place))
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for number, place in enumerate(order):
        turn, rank = divmod(number, num_ranks)
        ranks[num_ranks - 1 - rank if turn % 2 else rank].append(bins[place])
    return ranks


def _num_rows(lengths: NDArray[np.int64], width: int) -> int:
    return len(best_fit(lengths.tolist(), width))
