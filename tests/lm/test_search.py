"""Best-of-n against sampling every response separately and choosing the best by hand.

Beam search against its naive twin and, if there are enough beams for all responses, against enumerating them.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lm.config import ModelConfig
from lm.encoder import EncoderDecoder
from lm.generation import generate
from lm.model import LanguageModel, init_weights
from lm.sampling import Choice
from lm.search import Best, beam_search, best_of
from lm.source import RandomInit, load

PROMPTS = [[5], [1, 2, 4, 6, 7], [9, 9], [5]]
SEEDS = [[1, 2, 3, 4, 5], [6], [7, 8, 9, 10], [11, 12, 13]]
COMMON: dict[str, Any] = {"max_new_tokens": 9, "end_ids": [3], "choice": Choice()}


def prefers_long_and_high(prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> list[float]:
    """Ties are common, because many responses are cut off at the same length."""
    return [float(len(prompt) + len(response) + 0.5 * (max(response) > 9)) for response in responses]


def test_the_best_of_each_prompts_own_responses_is_kept(decoder: LanguageModel) -> None:
    found = best_of(decoder, PROMPTS, prefers_long_and_high, seeds=SEEDS, start_id=3, **COMMON)
    for prompt, seeds, best in zip(PROMPTS, SEEDS, found, strict=True):
        top = Best([], -1.0)
        for seed in seeds:
            (response,) = generate(decoder, [prompt], seeds=[seed], **COMMON).responses
            (score,) = prefers_long_and_high(prompt, [response])
            if score > top.score:  # a later sample never wins a tie
                top = Best(response, score)
        assert best == top


def test_of_equals_the_first_is_kept(llama: LanguageModel) -> None:
    (found,) = best_of(
        llama, [[5, 8]], lambda _, responses: [0.25] * len(responses), seeds=[range(20, 30)], start_id=3, **COMMON
    )
    assert found == Best(generate(llama, [[5, 8]], seeds=[20], **COMMON).responses[0], 0.25)


@pytest.mark.parametrize("scores", [[1.0], [1.0, float("nan")], [float("inf"), 0.0], []])
def test_scores_that_order_nothing_are_refused(llama: LanguageModel, scores: list[float]) -> None:
    with pytest.raises(ValueError, match=r"the scores of 2 responses are \[.*\]; a finite number for each"):
        best_of(llama, [[5]], lambda *_: scores, seeds=[[1, 2]], start_id=3, **COMMON)


@pytest.mark.parametrize("seeds", [[], [[1]], [[1], []], [[1], [2], [3]]])
def test_every_prompt_needs_seeds(llama: LanguageModel, seeds: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"2 prompts with \[.*\] seeds; each needs at least one"):
        best_of(llama, [[5], [6]], prefers_long_and_high, seeds=seeds, start_id=3, **COMMON)


def test_an_encoder_decoder_reads_what_is_asked() -> None:
    config = ModelConfig(
        kind="encoder-decoder", vocab_size=12, max_position_embeddings=16, hidden_size=8, num_hidden_layers=1,
        num_encoder_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=8,
    )  # fmt: skip
    model = load(RandomInit(lambda: EncoderDecoder(config), 3)).eval()
    found = best_of(model, PROMPTS, prefers_long_and_high, seeds=SEEDS, start_id=3, **COMMON)
    for asked, seeds, best in zip(PROMPTS, SEEDS, found, strict=True):
        alone = [generate(model, [[3]], seeds=[seed], sources=[asked], **COMMON).responses[0] for seed in seeds]
        scores = prefers_long_and_high(asked, alone)
        assert best == Best(alone[scores.index(max(scores))], max(scores))


END = 3


@functools.cache
@torch.no_grad()
def logprobs(model: LanguageModel, tokens: tuple[int, ...]) -> list[float]:
    found: list[float] = torch.log_softmax(model(torch.tensor([tokens]))[0, -1].double(), dim=-1).tolist()
    return found


def naive(
    model: LanguageModel, prompt: list[int], num_beams: int, max_new_tokens: int
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
        over += [(total / step, response) for total, response in ends]
        running = [c for c in candidates if c not in ends][:num_beams]
    return sorted(over, key=lambda c: -c[0])[:num_beams]


@pytest.mark.parametrize("num_beams", [1, pytest.param(3, marks=pytest.mark.nightly), 5])
def test_beam_search_equals_its_naive_twin(decoder: LanguageModel, num_beams: int) -> None:
    for prompt in ([5], [1, 2, 4, 6, 7]):
        found = beam_search(
            decoder, prompt, num_beams=num_beams, max_new_tokens=6, start_id=END, end_ids=[END]
        )  # fmt: skip
        expected = naive(decoder, prompt, num_beams, 6)
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
    found = beam_search(model, [6], num_beams=64, max_new_tokens=3, start_id=END, end_ids=[END])
    assert [h.response for h in found[:4]] == best
    assert found[0].logprob == pytest.approx(total(best[0]), abs=1e-4)


def test_one_beam_is_greedy_until_it_ends(llama: LanguageModel) -> None:
    (found,) = beam_search(llama, [5, 8], num_beams=1, max_new_tokens=8, start_id=END, end_ids=())
    tokens = [5, 8]
    for _ in range(8):
        ranked = logprobs(llama, tuple(tokens))
        tokens.append(ranked.index(max(ranked)))
    assert found.response == tokens[2:]
    assert not found.finished


def test_impossible_searches_are_refused(llama: LanguageModel) -> None:
    with pytest.raises(ValueError, match="num_beams is 0"):
        beam_search(llama, [5], num_beams=0, max_new_tokens=4, start_id=END, end_ids=[END])
    with pytest.raises(ValueError, match="prompt 0 has 40 tokens"):
        beam_search(llama, [5] * 40, num_beams=2, max_new_tokens=4, start_id=END, end_ids=[END])
