"""Generation against a naive twin that recomputes everything for each token and each sequence alone."""

import bisect
import itertools

import numpy as np
import pytest
import torch

from lm.config import ModelConfig
from lm.generation import generate
from lm.model import LanguageModel, initialise

END = 3


@pytest.fixture(scope="module", params=["swiglu", "relu2"])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    config = ModelConfig(
        vocab_size=12, context_tokens=40, width=16, num_layers=2, num_heads=4, num_kv_heads=2, mlp_width=24,
        mlp=request.param, tie_embeddings=False,
    )  # fmt: skip
    model = LanguageModel(config)
    initialise(model, seed=5)
    return model.eval()


@torch.no_grad()
def naive(
    model: LanguageModel, prompt: list[int], max_new_tokens: int, temperature: float, seed: int
) -> tuple[list[int], bool]:
    """One sequence, no cache, no padding: invert the cumulative distribution at the seed's uniform draws."""
    uniforms = np.random.Generator(np.random.Philox(key=seed)).random(max_new_tokens, dtype=np.float32)
    tokens = list(prompt)
    for uniform in uniforms:
        logits = model(torch.tensor([tokens]))[0, -1].double()
        if temperature == 0:
            token = max(range(len(logits)), key=lambda i: float(logits[i]))
        else:
            weights = ((logits - logits.max()) / temperature).exp().tolist()
            token = bisect.bisect_right(list(itertools.accumulate(weights)), float(uniform) * sum(weights))
        tokens.append(token)
        if token == END:
            return tokens[len(prompt) :], True
    return tokens[len(prompt) :], False


PROMPTS = [[5], [1, 2, 4, 6, 7], [9, 9], [0, 11, 10], [3, 3, 8], [7, 1, 0, 2, 5, 5, 6, 4]]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_generation_equals_its_naive_twin(model: LanguageModel, temperature: float) -> None:
    seeds = [101, 7, 7, 2**62, 55, 9]
    found = generate(model, PROMPTS, max_new_tokens=14, end_id=END, temperature=temperature, seeds=seeds)
    expected = [naive(model, p, 14, temperature, s) for p, s in zip(PROMPTS, seeds, strict=True)]
    assert found.responses == [response for response, _ in expected]
    assert found.finished == [finished for _, finished in expected]
    if temperature == 1.0:  # the case that this test is about: rows leave the batch at different steps
        assert len({len(response) for response, _ in expected}) > 2
        assert any(found.finished)


def test_a_sample_does_not_depend_on_its_batch_mates(model: LanguageModel) -> None:
    seeds = list(range(20, 26))
    together = generate(model, PROMPTS, max_new_tokens=12, end_id=END, temperature=1.0, seeds=seeds)
    for index, (prompt, seed) in enumerate(zip(PROMPTS, seeds, strict=True)):
        alone = generate(model, [prompt], max_new_tokens=12, end_id=END, temperature=1.0, seeds=[seed])
        assert alone.responses[0] == together.responses[index]
    order = [4, 0, 5, 2]
    prompts, their_seeds = [PROMPTS[i] for i in order], [seeds[i] for i in order]
    some = generate(model, prompts, max_new_tokens=12, end_id=END, temperature=1.0, seeds=their_seeds)
    assert some.responses == [together.responses[i] for i in order]


def test_samples_follow_the_distribution(model: LanguageModel) -> None:
    num_samples, temperature = 4000, 1.5
    with torch.no_grad():
        probabilities = torch.softmax(model(torch.tensor([[5, 8]]))[0, -1] / temperature, dim=-1).tolist()
    found = generate(
        model, [[5, 8]] * num_samples, max_new_tokens=1, end_id=END, temperature=temperature, seeds=range(num_samples)
    )
    counts = np.bincount([response[0] for response in found.responses], minlength=12)
    for token, probability in enumerate(probabilities):
        deviation = (probability * (1 - probability) / num_samples) ** 0.5
        assert abs(counts[token] / num_samples - probability) < 5 * deviation, token


def test_generation_under_bf16_autocast_runs(model: LanguageModel) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = generate(model, PROMPTS, max_new_tokens=6, end_id=END, temperature=1.0, seeds=range(6))
    assert all(0 < len(response) <= 6 for response in found.responses)


def test_prompts_without_room_are_refused(model: LanguageModel) -> None:
    with pytest.raises(ValueError, match=r"prompt 1 has 31 tokens; 1 to 30 were expected"):
        generate(model, [[1], [1] * 31], max_new_tokens=10, end_id=END, temperature=1.0, seeds=[0, 1])
    with pytest.raises(ValueError, match=r"prompt 0 has 0 tokens"):
        generate(model, [[]], max_new_tokens=10, end_id=END, temperature=1.0, seeds=[0])
    full = generate(model, [[1] * 30], max_new_tokens=10, end_id=-1, temperature=1.0, seeds=[0])
    assert len(full.responses[0]) == 10
    assert not full.finished[0]
