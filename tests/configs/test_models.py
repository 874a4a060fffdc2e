"""The shapes in configs/models, counted against what their papers print."""

import tomllib
from pathlib import Path

import pytest
import torch

from heed.jobs.memory import count
from lm.config import ModelConfig
from lm.encoder import EncoderDecoder, MaskedLanguageModel, SequenceClassifier
from lm.families import family_of
from lm.inspection import num_unread
from lm.model import LanguageModel, count_parameters
from lm.weights import PRETRAINED, PURPOSES
from training.config import OptimizerConfig

MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"

# arXiv 2005.14165, table 2.1: parameters, layers, width, size of a head.
GPT3 = {
    "125m": (125e6, 12, 768, 64),
    "350m": (350e6, 24, 1024, 64),
    "760m": (760e6, 24, 1536, 96),
    "1.3b": (1.3e9, 24, 2048, 128),
    "2.7b": (2.7e9, 32, 2560, 80),
    "6.7b": (6.7e9, 32, 4096, 128),
    "13b": (13.0e9, 40, 5140, 128),
    "175b": (175.0e9, 96, 12288, 128),
}


def read(name: str) -> ModelConfig:
    return ModelConfig.model_validate(tomllib.loads((MODELS / f"{name}.toml").read_text()))


@pytest.mark.parametrize("size", GPT3)
def test_gpt3_has_the_papers_shape_and_number_of_parameters(size: str) -> None:
    config = read(f"gpt3-{size}")
    parameters, layers, width, head_dim = GPT3[size]
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (layers, width, head_dim)
    assert config.intermediate_size == 4 * width
    assert [config.window(layer) > 0 for layer in range(4)] == [False, True, False, True]
    with torch.device("meta"):
        found = count_parameters([LanguageModel(config)])
    # The table rounds; its 350M is the coarsest.
    assert found == pytest.approx(parameters, rel=0.02)


def test_a_mixture_has_the_papers_parameters_in_total_and_per_token() -> None:
    """Qwen3-30B-A3B (arXiv 2505.09388, and its model card): 30.5B parameters, 29.9B without embeddings, 3.3B per token
    with the embeddings of input and output."""
    config = read("Qwen/Qwen3-30B-A3B")
    assert family_of(config, "language").model_type == "qwen3_moe"
    with torch.device("meta"):
        found = count_parameters([LanguageModel(config)])
    table = config.vocab_size * config.hidden_size
    assert found == pytest.approx(30.5e9, abs=0.05e9)
    assert found - 2 * table == pytest.approx(29.9e9, abs=0.05e9)
    unread = num_unread(config, 1)
    assert found - unread == pytest.approx(3.3e9, abs=0.1e9)
    assert num_unread(config, 128) == pytest.approx(unread * (120 / 128) ** 127)


def test_gpt_oss_has_the_papers_parameters_in_total_and_per_token() -> None:
    """arXiv 2508.10925, table 1: 20.91B parameters, of which the MLPs have 19.12B, attention .64B and the two tables
    1.16B; 3.61B per token, with one of the tables."""
    config = read("openai/gpt-oss-20b")
    assert family_of(config, "language").model_type == "gpt_oss"
    with torch.device("meta"):
        model = LanguageModel(config)
    found, table = count_parameters([model]), config.vocab_size * config.hidden_size
    assert found == pytest.approx(20.91e9, abs=0.01e9)
    of_blocks = {
        kind: count_parameters([getattr(b, kind) for b in model.decoder.blocks]) for kind in ("mlp", "attention")
    }
    assert of_blocks["mlp"] == pytest.approx(19.12e9, abs=0.01e9)
    assert of_blocks["attention"] == pytest.approx(0.64e9, abs=0.01e9)
    assert found - num_unread(config, 1) - table == pytest.approx(3.61e9, abs=0.01e9)


# Layers, width, and parameters as published (rounded) of the masked language model.
BERT = {"base": (12, 768, 110e6), "large": (24, 1024, 340e6)}


@pytest.mark.parametrize("size", BERT)
def test_bert_has_the_papers_shape_and_number_of_parameters(size: str) -> None:
    config = read(f"google-bert/bert-{size}-uncased")
    layers, D, published = BERT[size]
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (layers, D, 64)
    norm = 2 * D
    block = 4 * (D * D + D) + (D * 4 * D + 4 * D) + (4 * D * D + D) + 2 * norm
    tables = 30522 * D + 512 * D + 2 * D + norm
    head = (D * D + D) + norm + 30522  # the head's matrix is the table of tokens
    assert tables + layers * block + head == {"base": 109_514_298, "large": 335_174_458}[size]
    with torch.device("meta"):
        assert count_parameters([MaskedLanguageModel(config)]) == tables + layers * block + head
        # Classification replaces the head by a pooler.
        labels = D * 2 + 2
        found = count_parameters([SequenceClassifier(config, ("no", "yes"))])
        assert found == tables + layers * block + (D * D + D) + labels
    assert found == pytest.approx(published, rel=0.02)


# Width, and parameters in the paper's table 3 (rounded).
VASWANI = {"base": (512, 65e6), "big": (1024, 213e6)}


@pytest.mark.parametrize("size", VASWANI)
def test_vaswanis_translators_have_the_papers_shape_and_number_of_parameters(size: str) -> None:
    config = read(f"vaswani-{size}")
    D, published = VASWANI[size]
    assert (config.hidden_size, config.num_hidden_layers, config.num_encoder_layers) == (D, 6, 6)
    assert (config.head_dim, config.intermediate_size) == (64, 4 * D)
    attention, mlp, norm = 4 * D * D, D * 4 * D + 4 * D + 4 * D * D + D, 2 * D
    by_hand = 37000 * D + 6 * (attention + mlp + 2 * norm) + 6 * (2 * attention + mlp + 3 * norm)
    assert by_hand == {"base": 63_045_632, "big": 214_171_648}[size]
    with torch.device("meta"):
        assert count_parameters([EncoderDecoder(config)]) == by_hand
    # "About 37,000 tokens": 3,800 more would make 65M.
    assert by_hand == pytest.approx(published, rel=0.031)


# Parameters in the published files, tied weights once, and the family in which Heed writes the shape.
PUBLISHED = {
    "google/gemma-3-1b-it": (999_885_952, "gemma3_text"),
    "allenai/OLMo-2-0425-1B-Instruct": (1_484_916_736, "olmo2"),
    "microsoft/phi-4": (14_659_507_200, "llama"),  # as it has no window and turns whole heads
    "google-t5/t5-small": (60_506_624, "t5"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_the_number_of_parameters_of_its_files(name: str) -> None:
    config, (published, family) = read(name), PUBLISHED[name]
    kind = PRETRAINED[config.kind]
    with torch.device("meta"):
        assert count_parameters([kind(config)]) == published
    assert count(config, OptimizerConfig(learning_rate=1e-3)).total == published  # what `heed plan` counts
    assert family_of(config, PURPOSES[kind]).model_type == family


def test_every_file_is_a_shape() -> None:
    files = sorted(str(path.relative_to(MODELS).with_suffix("")) for path in MODELS.rglob("*.toml"))
    assert len(files) > len(GPT3)
    for name in files:
        read(name)
