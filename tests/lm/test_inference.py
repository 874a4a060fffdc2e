"""Models that only compute: in which type, and that one place decides where."""

import re
from pathlib import Path

import pytest
import torch

from lm.config import ModelConfig
from lm.inference import inference_device, inference_dtype, load_for_inference
from lm.model import LanguageModel, ScalarModel
from lm.source import RandomInit

ROOT = Path(__file__).parents[2]
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.mark.parametrize("kind", [LanguageModel, ScalarModel])
def test_parameters_have_the_type_and_buffers_keep_theirs(
    kind: type[LanguageModel | ScalarModel], tiny_config: ModelConfig
) -> None:
    source = RandomInit(lambda: kind(tiny_config, dropout=0.5), seed=1)
    plain, rounded = load_for_inference(source), load_for_inference(source, torch.bfloat16)
    assert {p.dtype for p in plain.parameters()} == {inference_dtype()}
    assert {p.dtype for p in rounded.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in rounded.buffers()} <= {torch.float32}
    assert not any(p.requires_grad or p.device.type != inference_device().type for p in plain.parameters())
    tokens = TOKENS.to(inference_device())
    torch.testing.assert_close(rounded(tokens).float(), plain(tokens).float(), atol=0.1, rtol=0.1)
    assert torch.equal(plain(tokens), plain(tokens)), "there is dropout"


def test_tied_weights_stay_tied(tiny_config: ModelConfig) -> None:
    model = load_for_inference(RandomInit(lambda: LanguageModel(tiny_config), seed=1), torch.bfloat16)
    assert tiny_config.tie_word_embeddings
    assert model.head.weight is model.decoder.embedding.weight


@pytest.mark.parametrize("package", ["collect", "compare", "evaluation", "heed", "reward", "stages", "studies"])
def test_no_other_place_of_these_packages_chooses_a_device(package: str) -> None:
    chosen = re.compile(r"cuda\.is_available|torch\.device\(\"|load_language_model\(|load_scalar_model\(|load_model\(")
    for path in (ROOT / package).rglob("*.py"):
        found = chosen.findall(path.read_text(encoding="utf-8"))
        assert not found, f"{path.relative_to(ROOT)}: {found}; lm.inference loads models that only compute"
