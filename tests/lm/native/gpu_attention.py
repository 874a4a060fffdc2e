"""Tests the kernels of `lm.native.gpu` in Triton's interpreter. Run by tests/lm/test_gpu_kernels.py."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lm.attention import OwnKeys, attend_written_out
from lm.native.gpu import SPLIT, attend_own_keys, takes_own_keys
from tests.lm.native import triton_interpreter  # noqa: F401 - bf16

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS = st.sampled_from([(1, 1), (4, 2), (14, 2), (3, 3), (17, 1)])
LENGTHS = st.one_of(st.integers(0, 40), st.sampled_from([SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 5]))


def drawn(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def twin(q: Tensor, k: Tensor, v: Tensor, mask: OwnKeys, sinks_N: Tensor | None = None) -> Tensor:
    sinks_N = None if sinks_N is None else sinks_N.double()
    return attend_written_out.plain(q.double(), k.double(), v.double(), mask.written_out, sinks_N)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    st.integers(0, 10**6), st.lists(LENGTHS, min_size=1, max_size=3), HEADS, st.sampled_from([2, 16, 20, 64]),
    st.sampled_from(DTYPES), st.sampled_from([0, 1, 7, SPLIT + 3]), st.booleans(),
)  # fmt: skip
def test_a_step_attends_to_each_rows_own_keys(
    seed: int, last: list[int], heads: tuple[int, int], head_dim: int, dtype: torch.dtype, window: int, has_sinks: bool
) -> None:
    """What lies in the cache after a row's last key is never read."""
    (N, G), B, S = heads, len(last), max(last) + 1
    last_B = torch.tensor(last)
    q = drawn(seed, B, N, 1, head_dim, dtype=dtype)
    cache = drawn(seed + 1, 2, B + 1, G, S + 3, head_dim, dtype=dtype)
    mask = OwnKeys(last_B, S, window, q)
    k, v = cache[:, :B, :, :S]
    sinks_N = drawn(seed + 2, N, dtype=dtype) if has_sinks else None
    expected = twin(q, k, v, mask, sinks_N)
    for row, column in enumerate(last):
        cache[:, row, :, column + 1 :] = math.nan
    found = attend_own_keys(q, k, v, mask, sinks_N)
    rounding = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(found.double(), expected, atol=rounding, rtol=rounding)


def test_a_row_has_the_same_bits_next_to_any_other_rows() -> None:
    """Alone, in a batch, and in a cache with more columns: one split, or several that are merged."""
    q = drawn(0, 3, 4, 1, 16, dtype=torch.bfloat16)
    k, v = drawn(1, 2, 3, 2, 3 * SPLIT, 16, dtype=torch.bfloat16)
    last = torch.tensor([SPLIT - 7, 2 * SPLIT + 30, 5])
    whole = attend_own_keys(q, k, v, OwnKeys(last, 3 * SPLIT, 0, q))
    for row, column in enumerate(last.tolist()):
        own = slice(row, row + 1)
        S = column + 1
        alone = attend_own_keys(q[own], k[own, :, :S], v[own, :, :S], OwnKeys(last[own], S, 0, q))
        assert torch.equal(alone, whole[own])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [3, SPLIT + 1])
def test_scores_that_are_not_finite(value: float, at: int) -> None:
    """As in the equation: NaN where a score is NaN or +inf; a score of -inf has no weight."""
    q = torch.ones(2, 1, 1, 4)
    k, v = drawn(1, 2, 2, 1, SPLIT + 9, 4, dtype=torch.float32)
    k[0, 0, at] = value
    mask = OwnKeys(torch.tensor([SPLIT + 8, 30]), SPLIT + 9, 0, q)
    found, expected = attend_own_keys(q, k, v, mask), twin(q, k, v, mask)
    assert bool(found[0].isnan().all()) == (value != -math.inf)
    torch.testing.assert_close(found.double(), expected, equal_nan=True, atol=1e-5, rtol=1e-5)


def test_cpu_tensors_are_left_to_others() -> None:
    q, k = torch.zeros(2, 4, 1, 8), torch.zeros(2, 2, 5, 8)
    assert not takes_own_keys(q, k, k, OwnKeys(torch.tensor([1, 2]), 5, 0, q))
