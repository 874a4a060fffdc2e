"""How sequences become passes: lengths, balance, budgets, and equally many passes on every rank."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from training.passes import bucket, packed_rows, padded_tokens, row_width, split_passes
from training.tokens import Sequences


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
