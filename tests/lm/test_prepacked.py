"""Prepacked weights against plain products."""

import copy

import pytest
import torch
from torch import nn

from lm.decoding import gains, prepacked
from lm.generation import generate
from lm.model import LanguageModel
from lm.sampling import Choice

needs_bf16 = pytest.mark.skipif(
    not gains(torch.zeros(1, dtype=torch.bfloat16)), reason="this CPU has no native bf16 products"
)


@needs_bf16
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, 64])
def test_products_are_those_of_the_plain_weights(bias: bool, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    model = nn.Sequential(nn.Linear(96, 200, bias=bias), nn.Linear(200, 33, bias=bias)).bfloat16().eval()
    inputs = [torch.randn(rows, 7, 96, generator=generator).bfloat16() for rows in (1, num_rows, 3 * num_rows)]
    with torch.inference_mode():
        plain = [model(x) for x in inputs]
        with prepacked(model, num_rows):
            found = [model(x) for x in inputs]
        for ours, expected in zip(found, plain, strict=True):
            torch.testing.assert_close(ours, expected, rtol=2**-7, atol=2**-7)


@needs_bf16
def test_weights_that_change_afterwards_count() -> None:
    model = nn.Sequential(nn.Linear(8, 8)).bfloat16().eval()
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    with torch.inference_mode(), prepacked(model, 2):
        assert type(model[0].forward).__name__ == "PrepackedLinear"
    with torch.inference_mode():
        model[0].weight.zero_()
        torch.testing.assert_close(model(x), model[0].bias.expand(2, 8))


@needs_bf16
def test_a_failure_puts_the_plain_weights_back() -> None:
    model = nn.Sequential(nn.Linear(8, 8)).bfloat16()
    with pytest.raises(RuntimeError, match="primitive"), prepacked(model, 2):
        model(torch.ones(2, 5, dtype=torch.bfloat16))
    assert "forward" not in vars(model[0])


def test_fp32_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    with prepacked(model, 2):
        assert "forward" not in vars(model[0])


@needs_bf16
def test_bf16_samples_do_not_depend_on_batch_mates(llama: LanguageModel) -> None:
    """The layout depends on a nominal number of rows; a few rows more or less must not change what is sampled."""
    model = copy.deepcopy(llama).bfloat16()
    prompts, seeds = [[5, 1 + number % 9, 3] for number in range(12)], list(range(12))
    together, alone = (
        generate(model, prompts, max_new_tokens=8, end_ids=(), choice=Choice(), seeds=seeds, max_rows=rows).responses
        for rows in (12, 1)
    )
    # A draw at the edge may round to the next token.
    assert sum(a == b for a, b in zip(together, alone, strict=True)) >= 11
