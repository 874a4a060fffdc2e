"""Token sequences packed into rows of fixed length, and the order in which training visits rows.

Shape letters: B rows, T tokens of a row.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lm.progress import note_progress

IntArray = NDArray[np.int64]
Item = TypeVar("Item")

CHUNK_TEXTS = 1024


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

    def sequence_of_tokens(self, rows: IntArray) -> IntArray:
        """The number of each token's sequence, [B, T]; arbitrary at padding."""
        found: IntArray = np.take_along_axis(self.numbers[rows], np.maximum(self.segments[rows] - 1, 0), axis=1)
        return found


def pack(sequences: Sequence[tuple[Sequence[int], Sequence[bool]]], seq_len: int, pad_id: int) -> PackedRows:
    """Pack (tokens, counted) sequences best-fit, longest first; each lies whole in one row.

    Raises:
        ValueError: a sequence is longer than a row; the message gives its number.
    """
    for index, (tokens, _) in enumerate(sequences):
        if len(tokens) > seq_len:
            raise ValueError(f"sequence {index} has {len(tokens)} tokens; at most {seq_len} fit a row")
    order = sorted(range(len(sequences)), key=lambda index: (-len(sequences[index][0]), index))
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # free tokens -> non-empty rows with exactly that many
    free_lengths: list[int] = []  # its keys, in order
    for index in order:
        length = len(sequences[index][0])
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
    return _lay_out(sequences, rows, seq_len, pad_id)


def _lay_out(
    sequences: Sequence[tuple[Sequence[int], Sequence[bool]]],
    rows: Sequence[Sequence[int]],
    seq_len: int,
    pad_id: int,
) -> PackedRows:
    """Build rows from the sequences whose numbers they list."""
    tokens = np.full((len(rows), seq_len), pad_id, dtype=np.int64)
    segments = np.zeros_like(tokens)
    counted = np.zeros(tokens.shape, dtype=np.bool_)
    numbers = np.full((len(rows), max(map(len, rows), default=1)), -1, dtype=np.int64)
    for row, indices in enumerate(rows):
        start = 0
        numbers[row, : len(indices)] = indices
        for number, (ids, is_counted) in enumerate((sequences[index] for index in indices), start=1):
            end = start + len(ids)
            tokens[row, start:end], segments[row, start:end], counted[row, start:end] = ids, number, is_counted
            counted[row, start] = False  # nothing in its own sequence predicts a first token
            start = end
    return PackedRows(tokens, segments, counted, numbers)


def write_token_stream(texts: Iterable[list[int]], end_id: int, path: Path) -> int:
    """Write every text, each followed by an EOS token, to a flat file of int32. Returns the number of tokens.

    A thread tokenizes the next texts while these are written; tokenizing releases Python's lock.
    """
    total = 0
    with path.open("wb") as file:
        for chunk in ahead(chunks(texts)):
            tokens: list[int] = []
            for ids in chunk:
                tokens += ids
                tokens.append(end_id)
            file.write(np.array(tokens, dtype=np.int32).data)  # the errors of `tofile` do not give the system's reason
            total += len(tokens)
    return total


def stream_rows(path: Path, seq_len: int) -> NDArray[np.int32]:
    """Memory-map the stream as a [B, T] array; a last partial row is left out.

    Raises:
        ValueError: the text does not fill one row.
    """
    # An empty file cannot be mapped.
    stream = np.memmap(path, dtype=np.int32, mode="r") if path.stat().st_size else np.empty(0, dtype=np.int32)
    num_rows = len(stream) // seq_len
    if num_rows == 0:
        raise ValueError(f"{path}: {len(stream)} tokens do not fill one row of {seq_len}; more text is needed")
    rows: NDArray[np.int32] = stream[: num_rows * seq_len].reshape(num_rows, seq_len)
    return rows


def chunks(texts: Iterable[Item], size: int = CHUNK_TEXTS) -> Iterator[list[Item]]:
    """Lists of at most `size` texts, so that streams can be tokenized in parallel without loading them whole."""
    chunk: list[Item] = []
    for text in texts:
        chunk.append(text)
        if len(chunk) == size:
            note_progress()
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The same items; a thread produces the next one while this one is used. Raises what `items` raises, in order."""
    end = object()
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, items, end)
        while (item := following.result()) is not end:
            following = thread.submit(next, items, end)
            yield item  # type: ignore[misc]


class Sampler:
    """The rows of each step's global batch: one random permutation per epoch.

    A pure function of (seed, step), so a resumed run needs no cursor. Every epoch visits every row once; a batch
    may span two epochs.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int) -> None:
        if num_rows < 1:
            raise ValueError("no rows to train on; at least one was expected")
        self.num_rows, self.batch_size, self.seed = num_rows, batch_size, seed
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)

    def batch(self, step: int) -> IntArray:
        """Row numbers [batch_size] of step 0, 1, ..."""
        places = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        return np.concatenate([self._rows(epoch, places) for epoch in np.unique(places // self.num_rows)])

    def _rows(self, epoch: int, places: IntArray) -> IntArray:
        if epoch != self._epoch:
            self._epoch = int(epoch)
            self._permutation = np.random.default_rng([self.seed, self._epoch]).permutation(self.num_rows)
        inside = places[places // self.num_rows == epoch]
        rows: IntArray = self._permutation[inside % self.num_rows]
        return rows
