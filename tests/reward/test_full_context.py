"""A truncated response that fills the context leaves no room for EOS, where scores are read."""

import math

import pytest
import torch

from lm.config import ModelConfig
from lm.model import ScalarModel, init_weights
from lm.tokenizer import Tokenizer
from reward.scoring import RewardModel

CONTEXT = 32
ASKED = [{"role": "user", "content": "Where is the dog?"}]


def judge(tokenizer: Tokenizer, max_position_embeddings: int, **shape: object) -> RewardModel:
    base = {
        "vocab_size": 288,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 24,
    }
    config = ModelConfig.model_validate({**base, "max_position_embeddings": max_position_embeddings, **shape})
    network = ScalarModel(config)
    init_weights(network, 5)
    return RewardModel(network.eval(), tokenizer, {"score": 1.0})


def full(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    prompt = tokenizer.encode_prompt(ASKED)
    return prompt, torch.randint(5, 280, (CONTEXT - len(prompt),), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("shape", [{}, {"sliding_window": (8, 0)}, {"positions": "sinusoidal"}], ids=str)
def test_a_full_context_is_scored_as_in_a_longer_one(tokenizer: Tokenizer, shape: dict[str, object]) -> None:
    prompt, response = full(tokenizer)
    small, large = judge(tokenizer, CONTEXT, **shape), judge(tokenizer, 2 * CONTEXT, **shape)
    (score,) = small.score(tokenizer, [ASKED], [prompt], [response])
    assert math.isfinite(score)
    assert [score] == large.score(tokenizer, [ASKED], [prompt], [response])
    assert [score] == large.score_sequences([[*prompt, *response, tokenizer.end_id]])


def test_where_positions_end_with_the_context_the_last_token_gives_way(tokenizer: Tokenizer) -> None:
    prompt, response = full(tokenizer)
    learned = judge(tokenizer, CONTEXT, positions="learned")
    expected = learned.score_sequences([[*prompt, *response[:-1], tokenizer.end_id]])
    assert learned.score(tokenizer, [ASKED], [prompt], [response]) == expected
    assert math.isfinite(expected[0])
    # A finished response fills the context with its EOS, and a shorter one keeps all of its tokens.
    ended = [*response[:-1], tokenizer.end_id]
    assert learned.score(tokenizer, [ASKED], [prompt], [ended]) == expected
    (read,) = learned.encoded(tokenizer, [ASKED], [prompt], [response[:-1]])
    assert [*read] == [*prompt, *ended]


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_what_is_longer_has_no_score(tokenizer: Tokenizer, positions: str) -> None:
    prompt, response = full(tokenizer)
    (score,) = judge(tokenizer, CONTEXT, positions=positions).score(tokenizer, [ASKED], [prompt], [[*response, 7, 8]])
    assert math.isnan(score)
