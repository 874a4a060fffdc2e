"""The shapes in configs/models, counted against what their papers print."""

import tomllib
from pathlib import Path

import pytest
import torch

from lm.config import ModelConfig
from lm.model import LanguageModel, count_parameters

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


def test_every_file_is_a_shape() -> None:
    files = sorted(str(path.relative_to(MODELS).with_suffix("")) for path in MODELS.rglob("*.toml"))
    assert len(files) > len(GPT3)
    for name in files:
        read(name)
