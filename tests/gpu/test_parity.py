"""What a GPU computes is what a CPU computes: logits, gradients, log-probs, dropout, draws."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lm.dropout import Dropout, sequence_keys
from lm.model import ScalarModel
from lm.sampling import Choice, draw_uniforms, token_logprobs
from lm.source import RandomInit, load
from reward.comparisons import Comparison, Verdict
from reward.objective import AuxiliaryParameters, LearnerSource, RankingObjective
from tests.gpu.models import CPU, CUDA, SHAPES, distance, gradients, pair, shape, tokens
from training.objectives import CausalLMObjective, PackedObjective
from training.packing import pack

Loss = Callable[[Any, torch.device], torch.Tensor]


def stream_loss(model: Any, device: torch.device) -> torch.Tensor:
    return CausalLMObjective(tokens(4, 97)).loss(model, np.arange(4), device)[0]


def packed_loss(model: Any, device: torch.device) -> torch.Tensor:
    texts = [row[: 10 + 7 * number] for number, row in enumerate(tokens(8, 64))]
    rows = pack([(text.tolist(), [place > 3 for place in range(len(text))]) for text in texts], 96, 0)
    return PackedObjective(rows).loss(model, np.arange(len(rows)), device)[0]


@pytest.mark.parametrize("loss", [stream_loss, packed_loss])
@pytest.mark.parametrize("name", SHAPES)
def test_losses_and_gradients_are_the_cpus(name: str, loss: Loss) -> None:
    ours, theirs = pair(SHAPES[name])
    expected, found = loss(ours, CPU), loss(theirs, CUDA)
    assert distance(found, expected) < 1e-5
    expected.backward()
    found.backward()
    wanted = gradients(ours)
    assert max(distance(gradient, wanted[key]) for key, gradient in gradients(theirs).items()) < 1e-3


@pytest.mark.parametrize("name", SHAPES)
def test_bf16_logits_are_near(name: str) -> None:
    ours, theirs = pair(SHAPES[name], torch.bfloat16)
    rows = torch.from_numpy(tokens(4, 96).astype(np.int64))
    with torch.no_grad():
        assert distance(theirs(rows.to(CUDA)), ours(rows)) < 0.03


def test_reward_losses_and_gradients_are_the_cpus() -> None:
    """Comparisons of 2 to 4 responses with ties and ratings; Davidson's ν and the ratings' scale learn too."""
    rows = tokens(9, 24).tolist()
    verdicts = (
        Verdict((1, 2), (3.0, 1.0)),
        Verdict((1, 2, 2), (1.0, 2.0, 0.5)),
        Verdict((4, 1, 2, 3), (0.0, 1.0, 2.0, 3.0)),
    )
    ends = np.cumsum([0, 2, 3, 4])
    comparisons = [
        Comparison(
            str(k), tuple(tuple(row[: 9 + k + n]) for n, row in enumerate(rows[ends[k] : ends[k + 1]])), (verdict,)
        )
        for k, verdict in enumerate(verdicts)
    ]
    objective = RankingObjective(comparisons, "decoder", rating_coef=0.5, rating_std=(1.0,))
    source = LearnerSource(
        RandomInit(lambda: ScalarModel(shape()), seed=0), AuxiliaryParameters(log_nu=(0.1,), rating_std=(1.0,))
    )
    ours, theirs = load(source), load(source).to(CUDA)
    expected, _ = objective.loss(ours, np.arange(3), CPU)
    found, metrics = objective.loss(theirs, np.arange(3), CUDA)
    assert distance(found, expected) < 1e-4
    assert {metric.device.type for metric in metrics.values()} == {"cuda"}
    expected.backward()
    found.backward()
    wanted = gradients(ours)
    assert max(distance(gradient, wanted[key]) for key, gradient in gradients(theirs).items()) < 2e-3


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_cpus(temperature: float) -> None:
    logits = torch.randn(300, 1000, generator=torch.Generator().manual_seed(0)) * 3
    chosen = torch.arange(300) * 3
    ours, theirs = logits.clone().requires_grad_(), logits.to(CUDA).requires_grad_()
    expected = token_logprobs(ours, chosen, temperature)
    found = token_logprobs(theirs, chosen.to(CUDA), temperature)
    assert distance(found, expected) < 1e-6
    expected.sum().backward()
    found.sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert distance(theirs.grad, ours.grad) < 1e-5


def test_dropout_drops_the_same_numbers() -> None:
    x, numbers, layer = torch.ones(3, 50, 64), np.arange(3)[:, None], Dropout(0.3)
    ours = layer(x, sequence_keys(5, numbers, CPU), 2)
    theirs = layer(x.to(CUDA), sequence_keys(5, numbers, CUDA), 2)
    assert torch.equal(ours, theirs.cpu())
    assert 0.25 < float((ours == 0).float().mean()) < 0.35


@pytest.mark.parametrize("choice", [Choice(), Choice(0.7), Choice(0.0), Choice(1.0, top_k=20, top_p=0.9)], ids=str)
def test_draws_are_the_cpus(choice: Choice) -> None:
    """Where a uniform number falls next to the border of two tokens, rounding may give the other one."""
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(0)) * 2
    uniforms = torch.from_numpy(draw_uniforms(range(64), 1)[:, 0])
    ours, expected = choice.draw(logits, uniforms)
    theirs, found = choice.draw(logits.to(CUDA), uniforms.to(CUDA))
    assert (ours == theirs.cpu()).float().mean() >= 0.95
    same = ours == theirs.cpu()
    assert torch.allclose(found.cpu()[same], expected[same], atol=1e-4)


def test_no_token_of_probability_0_is_drawn() -> None:
    """A scan on a GPU need not be monotonic, and half of these tokens have probability 0."""
    rounds = 4 if torch.cuda.get_device_name().startswith("Fake") else 400
    logits = torch.randn(256, 20_000, generator=torch.Generator().manual_seed(0)) * 4
    logits[:, ::2] = -torch.inf
    held = logits.to(CUDA)
    for number in range(rounds):
        uniforms = torch.from_numpy(draw_uniforms(range(number * 256, (number + 1) * 256), 1)[:, 0]).to(CUDA)
        drawn, logprobs = Choice().draw(held, uniforms)
        assert bool((drawn % 2 == 1).all())
        assert bool(logprobs.isfinite().all())


@pytest.mark.usefixtures("real_gpu")
def test_draws_have_their_distribution() -> None:
    probabilities = torch.softmax(torch.arange(8.0) / 2, dim=0)
    uniforms = torch.from_numpy(draw_uniforms(range(1000), 1000).reshape(-1)).to(CUDA)
    drawn, _ = Choice().draw((torch.arange(8.0) / 2).to(CUDA).expand(1_000_000, 8), uniforms)
    shares = torch.bincount(drawn.cpu(), minlength=8) / 1e6
    assert (shares - probabilities).abs().max() < 5 * 0.5 / 1000  # five standard deviations of a share
