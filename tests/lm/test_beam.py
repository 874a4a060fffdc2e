"""Beam search against its naive twin and, if there are enough beams for all responses, against enumerating them."""

import functools
import itertools

import pytest
import torch

from lm.beam import beam_search
from lm.config import ModelConfig
from lm.model import LanguageModel, init_weights

END = 3


@functools.cache
@torch.no_grad()
def logprobs(model: LanguageModel, tokens: tuple[int, ...]) -> list[float]:
    found: list[float] = torch.log_softmax(model(torch.tensor([tokens]))[0, -1].double(), dim=-1).tolist()
    return found


def naive(
    model: LanguageModel, prompt: list[int], num_beams: int, max_new_tokens: int, penalty: float
) -> list[tuple[float, list[int]]]:
    """Without a cache, a batch, or early stopping."""
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    over: list[tuple[float, list[int]]] = []
    for step in range(1, max_new_tokens + 1):
        candidates = [
            (total + logprob, [*response, token])
            for total, response in running
            for token, logprob in enumerate(logprobs(model, (*prompt, *response)))
        ]
        candidates = sorted(candidates, key=lambda c: -c[0])[: 2 * num_beams]
        ends = [c for c in candidates if c[1][-1] == END or step == max_new_tokens]
        over += [(total / step**penalty, response) for total, response in ends]
        running = [c for c in candidates if c not in ends][:num_beams]
    return sorted(over, key=lambda c: -c[0])[:num_beams]


@pytest.mark.parametrize("num_beams", [1, pytest.param(3, marks=pytest.mark.long), 5])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_beam_search_equals_its_naive_twin(decoder: LanguageModel, num_beams: int, penalty: float) -> None:
    for prompt in ([5], [1, 2, 4, 6, 7]):
        found = beam_search(
            decoder, prompt, num_beams=num_beams, max_new_tokens=6, end_ids=[END], length_penalty=penalty
        )  # fmt: skip
        expected = naive(decoder, prompt, num_beams, 6, penalty)
        assert [h.response for h in found] == [response for _, response in expected]
        assert [h.score for h in found] == pytest.approx([score for score, _ in expected], abs=1e-4)
        assert [h.finished for h in found] == [response[-1] == END for _, response in expected]


def test_with_beams_enough_it_finds_the_best_of_all_responses() -> None:
    config = ModelConfig(
        vocab_size=8,
        max_position_embeddings=12,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
    )
    model = LanguageModel(config)
    init_weights(model, 2)
    model.eval()
    responses: list[list[int]] = []
    for length in (1, 2, 3):
        for tokens in itertools.product(range(8), repeat=length):
            if END not in tokens[:-1] and (tokens[-1] == END or length == 3):
                responses.append(list(tokens))

    def total(response: list[int]) -> float:
        return sum(logprobs(model, (6, *response[:i]))[token] for i, token in enumerate(response))

    best = sorted(responses, key=lambda response: -total(response) / len(response))[:4]
    found = beam_search(model, [6], num_beams=64, max_new_tokens=3, end_ids=[END])
    assert [h.response for h in found[:4]] == best
    assert found[0].logprob == pytest.approx(total(best[0]), abs=1e-4)


def test_one_beam_without_length_penalty_is_greedy_until_it_ends(llama: LanguageModel) -> None:
    (found,) = beam_search(llama, [5, 8], num_beams=1, max_new_tokens=8, end_ids=(), length_penalty=0)
    tokens = [5, 8]
    for _ in range(8):
        ranked = logprobs(llama, tuple(tokens))
        tokens.append(ranked.index(max(ranked)))
    assert found.response == tokens[2:]
    assert not found.finished


@pytest.mark.parametrize(
    ("change", "words"), [({"num_beams": 0}, "num_beams is 0"), ({"length_penalty": -1.0}, "-1.0")]
)
def test_impossible_searches_are_refused(llama: LanguageModel, change: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        beam_search(llama, [5], **{"num_beams": 2, "max_new_tokens": 4, "end_ids": [END], **change})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prompt 0 has 40 tokens"):
        beam_search(llama, [5] * 40, num_beams=2, max_new_tokens=4, end_ids=[END])
