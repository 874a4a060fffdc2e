"""Log-probabilities and entropy by hand."""

import math

import pytest
import torch

from lm import sampling
from lm.sampling import token_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_token_logprobs_by_hand(temperature: float) -> None:
    logits = [[0.0, 1.0, 2.0], [3.0, -1.0, 0.5]]
    tokens = [2, 1]
    expected = [
        row[token] / temperature - math.log(sum(math.exp(x / temperature) for x in row))
        for row, token in zip(logits, tokens, strict=True)
    ]
    found = token_logprobs(torch.tensor(logits), torch.tensor(tokens), temperature)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_token_logprobs_keeps_leading_dimensions_and_computes_in_fp32() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens = torch.tensor([[0, 4, 2], [1, 1, 3]])
    found = token_logprobs(logits, tokens)
    assert found.shape == (2, 3)
    assert found.dtype == torch.float32
    for b in range(2):
        for t in range(3):
            row = [float(x) for x in logits[b, t]]
            expected = row[tokens[b, t]] - math.log(sum(math.exp(x) for x in row))
            assert float(found[b, t]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("part", [1, 7, 13, 100])
def test_parts_give_the_values_and_gradients_of_the_whole(
    temperature: float, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sampling.PART_NUMBERS, "cpu", part)
    generator = torch.Generator().manual_seed(part)
    logits = (4 * torch.randn(2, 5, 6, generator=generator)).requires_grad_()
    tokens = torch.randint(6, (2, 5), generator=generator)
    weights = torch.randn(2, 5, generator=generator)
    plain = torch.log_softmax(logits / temperature, dim=-1).gather(-1, tokens[..., None])[..., 0]
    (expected,) = torch.autograd.grad((plain * weights).sum(), logits)
    found = token_logprobs(logits, tokens, temperature)
    (gradient,) = torch.autograd.grad((found * weights).sum(), logits)
    torch.testing.assert_close(found, plain)
    torch.testing.assert_close(gradient, expected)
