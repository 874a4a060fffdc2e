"""Best-of-n against sampling every response separately and choosing the best by hand."""

from collections.abc import Sequence
from typing import Any

import pytest

from lm.best_of import Best, best_of
from lm.config import ModelConfig
from lm.encoder_decoder import EncoderDecoder
from lm.generation import generate
from lm.model import LanguageModel
from lm.sampling import Choice
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
    with pytest.raises(ValueError, match=r"2 prompts with \[.*\] seeds; some for each were expected"):
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
