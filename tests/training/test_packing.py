"""Packing, rows of token streams, the order of rows, and how sequences become passes of all ranks."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from training.packing import (
    Packed,
    Sampler,
    bucket,
    pack,
    packed_rows,
    padded_tokens,
    row_width,
    split_passes,
    stream_rows,
)
from training.tokens import Sequences

PAD = 0
sequences_of = st.lists(
    st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=12), min_size=1, max_size=25
)


@examples(150)
@given(drawn=sequences_of, slack=st.integers(0, 9))
def test_every_sequence_lies_whole_in_one_row_once(drawn: list[list[tuple[int, bool]]], slack: int) -> None:
    sequences = [([token for token, _ in pairs], [counts for _, counts in pairs]) for pairs in drawn]
    T = max(len(tokens) for tokens, _ in sequences) + slack
    rows = pack(sequences, T, PAD)
    assert rows.tokens.shape == rows.segments.shape == rows.counted.shape == (len(rows), T)
    found = []
    for tokens, segments, counted in zip(
        rows.tokens.tolist(), rows.segments.tolist(), rows.counted.tolist(), strict=True
    ):
        num_real = sum(segment > 0 for segment in segments)
        assert segments[num_real:] == [0] * (T - num_real)
        assert tokens[num_real:] == [PAD] * (T - num_real)
        assert not any(counted[num_real:])
        assert segments[:num_real] == sorted(segments[:num_real])
        numbers = sorted(set(segments[:num_real]))
        assert numbers == list(range(1, len(numbers) + 1))
        for number in numbers:
            places = [t for t in range(T) if segments[t] == number]
            found.append((tuple(tokens[t] for t in places), tuple(counted[t] for t in places)))
    # Nothing in its own sequence predicts a first token.
    expected = [(tuple(tokens), (False, *counts[1:])) for tokens, counts in sequences]
    assert sorted(found) == sorted(expected)
    assert len(rows) <= len(sequences)


@examples(100)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=40), slack=st.integers(0, 9))
def test_each_sequence_goes_where_least_room_is_left(lengths: list[int], slack: int) -> None:
    """Against a search over all rows, longest sequences first; among rows with equal space, the newest wins."""
    T = max(lengths) + slack
    free: list[int] = []
    opened: list[int] = []  # rows in the order in which their free space last changed
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in opened if free[row] >= length]
        if fitting:
            row = min(reversed(fitting), key=lambda row: free[row])
            opened.remove(row)
        else:
            row = len(free)
            free.append(T)
        free[row] -= length
        opened.append(row)
    rows = pack([([1] * length, [True] * length) for length in lengths], T, PAD)
    assert (rows.segments == 0).sum(axis=1).tolist() == free


def test_packing_by_hand() -> None:
    sequences = [([1, 2], [False, True]), ([3, 4, 5, 6], [True] * 4), ([7, 8], [True, True])]
    rows = pack(sequences, 5, PAD)
    assert rows.tokens.tolist() == [[3, 4, 5, 6, 0], [1, 2, 7, 8, 0]]
    assert rows.segments.tolist() == [[1, 1, 1, 1, 0], [1, 1, 2, 2, 0]]
    assert rows.counted.astype(int).tolist() == [[0, 1, 1, 1, 0], [0, 1, 0, 1, 0]]


@examples(60)
@given(drawn=sequences_of, order=st.randoms(use_true_random=False))
def test_rows_are_the_same_however_many_are_laid_out(drawn: list[list[tuple[int, bool]]], order: random.Random) -> None:
    sequences = [([token for token, _ in pairs], [counts for _, counts in pairs]) for pairs in drawn]
    whole = pack(sequences, 14, PAD)
    packed = Packed(Sequences.of(sequences), 14, PAD)
    rows = np.array(order.choices(range(len(packed)), k=5))
    taken, expected = packed.take(rows), whole.take(rows)
    for part in ("tokens", "segments", "counted"):
        assert getattr(taken, part).tolist() == getattr(expected, part).tolist()
    is_real = taken.segments > 0
    assert (taken.sequence_of_tokens()[is_real] == expected.sequence_of_tokens()[is_real]).all()
    assert packed.num_tokens(rows) == whole.num_tokens(rows) == is_real.sum()
    assert packed.num_counted(rows) == whole.num_counted(rows) == taken.counted.sum()


def test_a_sequence_longer_than_a_row_is_named() -> None:
    with pytest.raises(ValueError, match=r"sequence 1 has 4 tokens; at most 3 fit a row"):
        pack([([1], [True]), ([1] * 4, [True] * 4)], 3, PAD)


def test_a_stream_is_cut_into_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    np.array([5, 6, 1, 1, 7, 8, 9, 1], dtype=np.int32).tofile(path)
    assert stream_rows(path, 3).tolist() == [[5, 6, 1], [1, 7, 8]]  # 9, 1 do not fill a row
    assert stream_rows(path, 8).tolist() == [[5, 6, 1, 1, 7, 8, 9, 1]]
    with pytest.raises(ValueError, match=r"x\.bin: 8 tokens do not fill one row of 9"):
        stream_rows(path, 9)


def test_a_stream_without_text_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "empty.bin"
    path.touch()
    with pytest.raises(ValueError, match=r"empty\.bin: 0 tokens do not fill one row of 4"):
        stream_rows(path, 4)


@pytest.mark.parametrize(("num_rows", "batch_size"), [(10, 4), (7, 7), (3, 8), (5, 1)])
def test_every_epoch_visits_every_row_once(num_rows: int, batch_size: int) -> None:
    order = Sampler(num_rows, batch_size, seed=3)
    num_steps = 4 * num_rows
    visited = np.concatenate([order.batch(step) for step in range(num_steps)])
    assert len(visited) == num_steps * batch_size
    epochs = [visited[start : start + num_rows].tolist() for start in range(0, num_rows * 4 * batch_size, num_rows)]
    assert all(sorted(epoch) == list(range(num_rows)) for epoch in epochs)
    if num_rows >= 5:
        assert len({tuple(epoch) for epoch in epochs}) > 1, "every epoch has the same order"


def test_the_order_is_a_pure_function_of_seed_and_step() -> None:
    forwards = [Sampler(11, 4, seed=5).batch(step).tolist() for step in range(9)]
    order = Sampler(11, 4, seed=5)
    assert [order.batch(step).tolist() for step in reversed(range(9))] == forwards[::-1]
    assert [Sampler(11, 4, seed=6).batch(step).tolist() for step in range(9)] != forwards


def test_the_order_is_numpys_permutation_in_half_its_memory() -> None:
    order = Sampler(70_001, 70_001, seed=5)
    assert order.batch(3).tolist() == np.random.default_rng([5, 3]).permutation(70_001).tolist()
    assert order._permutation.nbytes == 4 * 70_001


def test_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no rows to train on"):
        Sampler(0, 4, seed=5)


def test_widths_are_few_and_at_most_an_eighth_too_wide() -> None:
    widths = [*range(16, 32, 2), *range(32, 64, 4), *range(64, 128, 8), *range(128, 257, 16)]
    assert sorted({bucket(length) for length in range(1, 257)}) == widths
    assert [bucket(length) for length in (1, 16, 17, 112, 113, 1024, 1025)] == [16, 16, 18, 112, 120, 1024, 1152]
    assert all(length <= bucket(length) <= max(16, 1.125 * length) for length in range(1, 5000))


@pytest.mark.parametrize(
    ("lengths", "width", "num_rows"),
    [
        ([7], 16, 1),
        ([50, 49, 48, 47], 52, 4),  # rows of two would gain nothing
        ([40, 20, 20, 20, 20], 40, 3),
        ([33, 33, 33, 14, 14, 14], 48, 3),  # 36 would take 5 rows of 36
        ([100] + [30] * 8, 120, 3),  # 4 of 30 in 120, while 104 would take 4 rows of 104
    ],
)
def test_rows_are_as_wide_as_wastes_least(lengths: list[int], width: int, num_rows: int) -> None:
    assert row_width(np.array(lengths)) == width
    sequences = Sequences.of(([token] * length, [True] * length) for token, length in enumerate(lengths, 1))
    rows, narrow = (packed_rows(sequences, torch.device(device)) for device in ("cuda", "cpu"))
    assert rows.tokens.shape == (num_rows, width)
    fullest = (rows.segments > 0).sum(axis=1).max()
    assert narrow.tokens.shape == (num_rows, fullest)
    assert (narrow.tokens == rows.tokens[:, :fullest]).all()
    assert padded_tokens(lengths) == num_rows * width
    assert sorted(np.unique(rows.tokens[rows.segments > 0], return_counts=True)[1]) == sorted(lengths)


def test_passes_by_hand() -> None:
    lengths = [9, 16, 4, 12, 7, 16, 3, 13]
    # Two bins: 16 + 13 + 7 + 4 and 16 + 12 + 9 + 3, each of which fits two rows of 20.
    assert split_passes([[n] for n in lengths], 2, 48) == [[[1, 2, 4, 7]], [[0, 3, 5, 6]]]
    # At most one row of 24: four bins begin with 16, 16, 13 and 12; then the smallest takes 9, 7, 4 and 3 in turn. The
    # largest (12 + 9) and the smallest (16 + 3) belong to rank 0.
    assert split_passes([[n] for n in lengths], 2, 24) == [[[0, 3], [5, 6]], [[1, 2], [4, 7]]]


def test_a_comparison_stays_whole_and_may_exceed_the_budget_alone() -> None:
    units = [[30, 30, 30], [5, 5], [6, 6]]
    assert split_passes(units, 1, 100) == [[[0], [1, 2]]]
    assert split_passes(units, 1, 40) == [[[0], [2], [1]]]


def test_equal_sequences_are_as_many_per_pass_as_rows_fit() -> None:
    (passes,) = split_passes([[50]] * 8, 1, 4 * 52)
    assert sorted(passes) == [[0, 2, 4, 6], [1, 3, 5, 7]]


units_of = st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=4), min_size=1, max_size=40)


@examples(200)
@given(units=units_of, num_ranks=st.integers(1, 5), max_tokens=st.integers(16, 600))
def test_every_unit_is_in_one_pass_within_the_budget(units: list[list[int]], num_ranks: int, max_tokens: int) -> None:
    ranks = split_passes(units, num_ranks, max_tokens)
    assert len({len(passes) for passes in ranks}) == 1
    held = [passed for passes in ranks for passed in passes]
    assert sorted(itertools.chain.from_iterable(held)) == list(range(len(units)))
    assert all(passed == sorted(passed) for passed in held)
    if len(units) >= num_ranks:
        assert all(passes[0] for passes in ranks)
    sizes = [sum(unit) for unit in units]
    for passed in held:
        lengths = [length for unit in passed for length in units[unit]]
        assert len(passed) < 2 or padded_tokens(lengths) <= max_tokens
        # No pass exceeds another by more than its own smallest unit.
        loads = [sum(sizes[unit] for unit in other) for other in held]
        assert sum(sizes[unit] for unit in passed) - min(loads) <= min((sizes[unit] for unit in passed), default=0)
    totals = [sum(sizes[unit] for passed in passes for unit in passed) for passes in ranks]
    assert max(totals) - min(totals) <= max(sizes)


def test_ragged_passes_are_nearly_full_and_ranks_nearly_equal() -> None:
    lengths = np.clip(np.random.default_rng(1).lognormal(4.5, 0.7, 256), 8, 512).astype(int).tolist()
    ranks = split_passes([[length] for length in lengths], 4, 2048)
    assert len(ranks[0]) == -(-sum(lengths) // (4 * 2048)), "not one pass more than the tokens need"
    totals = [sum(lengths[place] for passed in passes for place in passed) for passes in ranks]
    assert max(totals) < 1.01 * min(totals)
