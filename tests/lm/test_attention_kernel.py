"""The attention kernel against the equation in double precision."""

import math

import pytest
import torch
from torch import Tensor

from lm.attention import attend, attention_mask
from lm.native import install
from lm.native.kernels import library

pytestmark = pytest.mark.skipif(library() is None, reason="needs a compiler")

TYPES = [torch.float32, torch.bfloat16]
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}

SEGMENTS = torch.tensor([[1] * 40 + [2] * 27 + [0] * 3, [1] * 3 + [2] * 1 + [3] * 66])


def written_out(q: Tensor, k: Tensor, v: Tensor, mask_BTS: Tensor | None) -> Tensor:
    """Attention [B, N, T, H] by the equation; heads that share keys and values get copies of them."""
    shared = q.shape[1] // k.shape[1]
    if mask_BTS is None:
        mask_BTS = torch.ones(1, q.shape[2], k.shape[2], dtype=torch.bool).tril()
    scores = q @ k.repeat_interleave(shared, dim=1).transpose(2, 3) / math.sqrt(q.shape[3])
    weights = scores.masked_fill(~mask_BTS[:, None], -math.inf).softmax(dim=-1)
    return weights @ v.repeat_interleave(shared, dim=1)


@pytest.fixture(params=TYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    given: torch.dtype = request.param
    return given


def drawn(dtype: torch.dtype, B: int, T: int, S: int, N: int, G: int, H: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns q, k, v and a gradient of the result."""
    generator = torch.Generator().manual_seed(T * S + H)
    shapes = (B, N, T, H), (B, G, S, H), (B, G, S, H), (B, N, T, H)
    q, k, v, gradient = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v, gradient


def check(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, mask: Tensor | None) -> None:
    """Results and gradients are as close to the exact values as intermediate numbers of their type allow."""
    close = CLOSE[q.dtype]
    narrow, wide = ([x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)] for dtype in (q.dtype, torch.float64))
    assert install.takes_attention(*narrow, mask)
    found, expected = attend(*narrow, mask), written_out(*wide, mask)
    torch.testing.assert_close(found.double(), expected, rtol=close, atol=close)
    found.backward(gradient)
    expected.backward(gradient.double())
    for ours, theirs in zip(narrow, wide, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        error = (ours.grad.double() - theirs.grad).norm()
        # If a query sees only one key, its true gradient is 0; what remains is rounding error of terms that cancel.
        assert error <= close * (theirs.grad.norm() + 0.2 * gradient.double().norm())


# Lengths below, at and above a panel of 32; head dims that do not fill a panel; shared keys and values.
@pytest.mark.parametrize("sizes", [(2, 1, 1), (3, 32, 32), (2, 37, 37), (1, 96, 96), (1, 257, 257)])
@pytest.mark.parametrize("heads", [(4, 4, 64), (4, 2, 24), (3, 1, 80), (2, 2, 128)])
def test_plainly_causal(dtype: torch.dtype, sizes: tuple[int, int, int], heads: tuple[int, int, int]) -> None:
    check(*drawn(dtype, *sizes, *heads), None)


@pytest.mark.parametrize("causal", [True, False])
def test_packed_rows(dtype: torch.dtype, causal: bool) -> None:
    check(*drawn(dtype, 2, 70, 70, 4, 2, 32), attention_mask(SEGMENTS, causal=causal))


@pytest.mark.parametrize("rows", [1, 3])
def test_any_mask_and_keys_of_another_length(dtype: torch.dtype, rows: int) -> None:
    mask = torch.rand((rows, 33, 101), generator=torch.Generator().manual_seed(0)) < 0.3
    mask[:, :, 5] = True  # at least one token is visible to all queries
    mask[:, 3:9, 40:] = False  # some rows have panels that no query sees
    mask[:, :, 64:96] = False
    check(*drawn(dtype, 3, 33, 101, 4, 4, 64), mask)


def test_scores_far_apart_neither_overflow_nor_lose_the_rest(dtype: torch.dtype) -> None:
    q, k, v, gradient = drawn(dtype, 1, 40, 40, 2, 2, 64)
    inputs = [x.requires_grad_() for x in (30 * q, 30 * k, v)]
    found = attend(*inputs, None)
    torch.testing.assert_close(
        found.double(), written_out(*(x.double() for x in inputs), None), rtol=CLOSE[dtype], atol=CLOSE[dtype]
    )
    found.backward(gradient)
    assert all(x.grad is not None and torch.isfinite(x.grad).all() for x in inputs)


def test_views_are_taken_as_they_lie(dtype: torch.dtype) -> None:
    """The inputs are strided: heads are slices of one product's output, and keys come from a cache with free space."""
    q, k, v, gradient = drawn(dtype, 2, 45, 45, 4, 2, 32)
    roomy = torch.full((2, 2, 60, 32), math.nan, dtype=dtype)
    roomy[:, :, :45] = k
    expected = attend(q, k, v, None)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(attend(turned, roomy[:, :, :45], v, None), expected)
    check(turned, roomy[:, :, :45], v, gradient, None)


def test_a_rows_result_does_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    """PPO divides probabilities from passes over batches of different sizes, with and without gradients."""
    q, k, v, _ = drawn(dtype, 3, 50, 50, 4, 2, 64)
    together = attend(*(x.clone().requires_grad_() for x in (q, k, v)), None)
    with torch.no_grad():
        assert torch.equal(attend(q[1:2], k[1:2], v[1:2], None), together[1:2])
    mask = torch.ones(1, 50, 50, dtype=torch.bool).tril()
    assert torch.equal(attend(q, k, v, mask), together)


def test_results_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    q, k, v, gradient = drawn(dtype, 4, 64, 64, 4, 2, 32)
    threads, found = torch.get_num_threads(), []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        y = attend(*inputs, None)
        y.backward(gradient)
        found.append([y, *(x.grad for x in inputs)])
    torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_keys_that_some_panels_of_queries_skip(dtype: torch.dtype) -> None:
    """The gradient takes panels of 32 queries in chunks of four: 0 to 3, 4 to 7, 8 and 9."""
    mask_BTS = torch.rand((2, 290, 101), generator=torch.Generator().manual_seed(0)) < 0.3
    mask_BTS[:, :, 5] = True
    for panel in (1, 2, 5, 8):  # so panels 0 and 3; 4, 6 and 7; 9 attend to these
        mask_BTS[:, 32 * panel : 32 * (panel + 1), 32:64] = False
    mask_BTS[:, 128:256, 64:96] = False  # none of the second chunk
    check(*drawn(dtype, 2, 290, 101, 4, 2, 40), mask_BTS)


def test_a_panel_of_queries_without_keys(dtype: torch.dtype) -> None:
    """They have no result (NaN, as PyTorch's softmax) and no gradient; the others' are as without them."""
    q, k, v, gradient = drawn(dtype, 1, 96, 96, 4, 2, 40)
    mask_BTS = torch.ones(1, 96, 96, dtype=torch.bool).tril()
    mask_BTS[:, 32:64] = False
    kept = [*range(32), *range(64, 96)]
    narrow, wide = ([x.to(kind, copy=True).requires_grad_() for x in (q, k, v)] for kind in (dtype, torch.float64))
    found = attend(*narrow, mask_BTS)
    expected = written_out(wide[0][:, :, kept], wide[1], wide[2], mask_BTS[:, kept])
    assert found[:, :, 32:64].isnan().all()
    torch.testing.assert_close(found[:, :, kept].double(), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    found[:, :, kept].backward(gradient[:, :, kept])
    expected.backward(gradient[:, :, kept].double())
    for ours, theirs in zip(narrow, wide, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert (ours.grad.double() - theirs.grad).norm() <= CLOSE[dtype] * theirs.grad.norm()
