"""Small models with random weights: with an output head that is the embedding, with one of its own, and a deep one."""

from pathlib import Path
from typing import Any

import pytest

from lm.config import ModelConfig
from lm.model import LanguageModel, init_weights
from lm.tokenizer import Tokenizer
from lm.weights import save_model

SENTENCE = "the cat sat on a mat and saw one red bird fly over green hills of the land that they all had known"


def small_shape(tokenizer: Tokenizer, *, tied: bool, num_layers: int = 3) -> ModelConfig:
    """With heads of 32 columns, the fewest that vLLM runs on a CPU."""
    return ModelConfig(
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=128,
        hidden_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=96,
        tie_word_embeddings=tied,
    )


def _save(folder: Path, *, tied: bool, num_layers: int = 3, **changes: Any) -> Path:
    tokenizer = Tokenizer.train([SENTENCE] * 20, 320, "chat")
    shape = small_shape(tokenizer, tied=tied, num_layers=num_layers).model_dump()
    model = LanguageModel(ModelConfig.model_validate({**shape, **changes}))
    init_weights(model, 1)
    save_model(folder, model, model.state_dict(), tokenizer)
    return folder


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save(tmp_path_factory.mktemp("deep"), tied=False, num_layers=30)


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return _save(tmp_path_factory.mktemp("mixture"), tied=False, **experts)
