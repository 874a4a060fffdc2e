"""Tests the Triton kernels against naive twins in Triton's interpreter (run by tests/lm/test_gpu_kernels.py)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lm.native.gpu import BLOCK, sample, supports, token_logprobs
from lm.sampling import logprobs_of_rows
from lm.sampling import sample as plain_sample
from tests.lm.native import triton_interpreter  # noqa: F401 - bf16

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = st.one_of(st.integers(1, 300), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 17]))
TEMPERATURES = st.sampled_from([1.0, 0.7, 3.0])


def drawn_logits(seed: int, rows: int, width: int, dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, width, generator=generator)
    return logits.to(dtype), torch.randint(width, (rows,), generator=generator)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.integers(0, 10**6), st.integers(0, 5), WIDTHS, st.integers(0, 70), TEMPERATURES, st.sampled_from(DTYPES))
def test_logprobs_and_their_gradients(
    seed: int, rows: int, width: int, padding: int, temperature: float, dtype: torch.dtype
) -> None:
    """Includes a padded head, whose gradient is 0 in the padding."""
    logits, tokens = drawn_logits(seed, rows, width + padding, dtype, 4.0)
    tokens = tokens % width
    weights = torch.randn(rows, generator=torch.Generator().manual_seed(seed))
    exact = logits.double().requires_grad_()
    expected = torch.log_softmax(exact[:, :width] / temperature, dim=1).gather(1, tokens[:, None])[:, 0]
    (gradient,) = torch.autograd.grad((expected * weights).sum(), exact)
    own = logits.clone().requires_grad_()
    found = token_logprobs((own * 1)[:, :width], tokens, temperature)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected.detach(), atol=2e-5, rtol=1e-5)
    found.backward(weights)
    assert own.grad is not None
    rounding = {torch.float32: 4e-6, torch.bfloat16: 0.01, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(own.grad.double(), gradient, atol=rounding, rtol=rounding)
    assert not own.grad[:, width:].any()


def test_values_that_are_not_finite() -> None:
    logits = torch.zeros(5, BLOCK + 5)
    logits[0, 3] = math.nan
    logits[1, BLOCK + 1] = math.inf
    logits[2, :BLOCK] = -math.inf  # a whole block without probability
    logits[3, 4] = -math.inf
    logits[4] = -math.inf
    tokens = torch.tensor([0, 0, BLOCK + 2, 4, 0])
    found, expected = token_logprobs(logits, tokens, 1.0), logprobs_of_rows.plain(logits, tokens, 1.0)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert found.isnan().tolist() == [True, False, False, False, True]


def test_the_gradient_takes_the_memory_of_the_logits_and_says_so() -> None:
    own, tokens = torch.randn(3, 40, requires_grad=True), torch.tensor([1, 2, 3])
    logits = own * 1
    place, squares = logits.data_ptr(), logits**2  # the gradient of `squares` needs the logits
    found = token_logprobs(logits, tokens, 1.0)
    (gradient,) = torch.autograd.grad(found.sum(), logits, retain_graph=True)
    assert gradient.data_ptr() == place
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.sum().backward()


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 6), WIDTHS, TEMPERATURES, st.sampled_from(DTYPES))
def test_a_draw_inverts_the_cumulative_distribution(
    seed: int, rows: int, width: int, temperature: float, dtype: torch.dtype
) -> None:
    logits, _ = drawn_logits(seed, rows, width, dtype, 3.0)
    uniforms = torch.rand(rows, generator=torch.Generator().manual_seed(seed + 1))
    tokens, logprobs = sample(logits, uniforms, temperature)
    probs = torch.softmax(logits.double() / temperature, dim=1)
    ends = probs.cumsum(dim=1).gather(1, tokens[:, None])[:, 0]
    chosen = probs.gather(1, tokens[:, None])[:, 0]
    assert bool((ends - chosen - 1e-6 <= uniforms).all())
    assert bool((uniforms <= ends + 1e-6).all())
    torch.testing.assert_close(logprobs.double(), chosen.log(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("uniform", [0.0, 0.3, 0.99999994])
def test_a_draw_never_takes_a_token_without_probability(uniform: float) -> None:
    logits = torch.full((2, 2 * BLOCK + 3), -math.inf)
    logits[0, BLOCK + 7] = 1.0
    logits[1, [2, 2 * BLOCK]] = 0.0
    tokens, logprobs = sample(logits, torch.full((2,), uniform), 1.0)
    assert tokens.tolist() == [BLOCK + 7, 2 if uniform < 0.5 else 2 * BLOCK]
    assert logprobs.tolist() == pytest.approx([0.0, math.log(0.5)])
    assert torch.equal(tokens, plain_sample.plain(logits, torch.full((2,), uniform), 1.0)[0])


def test_logits_that_are_not_numbers_are_reported_as_before() -> None:
    logits = torch.full((1, 10), math.nan)
    for draw in (sample, plain_sample.plain):
        token, logprob = draw(logits, torch.tensor([0.5]), 1.0)
        assert (int(token), math.isnan(float(logprob))) == (9, True)


def test_cpu_tensors_are_left_to_others() -> None:
    assert not supports(torch.zeros(2, 3))
