"""Next-token losses against a loop over tokens."""

import math

import numpy as np
import pytest
import torch

from lm.config import ModelConfig
from lm.model import LanguageModel, init_weights
from training.objectives import CausalLMObjective, PackedObjective
from training.packing import pack

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tiny_config: ModelConfig) -> LanguageModel:
    model = LanguageModel(tiny_config)
    init_weights(model, 2)
    return model.eval()


@torch.no_grad()
def looped_loss(model: LanguageModel, tokens: list[int], counted: list[bool]) -> float:
    """-Σ log p of the counted tokens of one sequence, with one forward pass over the preceding tokens per token."""
    total = 0.0
    for t in range(1, len(tokens)):
        if counted[t]:
            logits = model(torch.tensor([tokens[:t]]))[0, -1].double().tolist()
            total += math.log(sum(math.exp(x) for x in logits)) - logits[tokens[t]]
    return total


def test_stream_loss_equals_a_loop(model: LanguageModel) -> None:
    rows = np.random.default_rng(0).integers(0, 288, (5, 6)).astype(np.int32)
    objective = CausalLMObjective(rows)
    chosen = np.array([3, 0])
    loss, extra = objective.loss(model, chosen, CPU)
    expected = sum(looped_loss(model, rows[i].tolist(), [True] * 6) for i in chosen)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    assert not extra
    assert (len(objective), objective.count(chosen), objective.num_tokens(chosen)) == (5, 10, 10)


def test_packed_loss_equals_a_loop_over_sequences(model: LanguageModel) -> None:
    generator = np.random.default_rng(1)
    sequences = [
        (generator.integers(0, 288, length).tolist(), (generator.random(length) < 0.6).tolist())
        for length in (7, 3, 5, 1, 2, 9, 4)
    ]
    objective = PackedObjective(pack(sequences, 10, pad_id=0))
    everything = np.arange(len(objective))
    loss, extra = objective.loss(model, everything, CPU)
    assert float(loss.detach()) == pytest.approx(sum(looped_loss(model, *sequence) for sequence in sequences), rel=1e-5)
    assert not extra
    assert objective.count(everything) == sum(sum(counted[1:]) for _, counted in sequences)
    assert objective.num_tokens(everything) == sum(len(tokens) for tokens, _ in sequences)


def test_a_row_without_counted_tokens_adds_nothing_and_can_be_differentiated(model: LanguageModel) -> None:
    objective = PackedObjective(pack([([1, 2, 3], [False] * 3)], 4, pad_id=0))
    loss, _ = objective.loss(model, np.array([0]), CPU)
    assert float(loss.detach()) == 0.0
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    assert all(gradient is None or not gradient.any() for gradient in gradients)
