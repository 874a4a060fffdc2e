"""Models for inference: their dtype, and that it is decided in one place."""

import re
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lm.config import ModelConfig
from lm.model import LanguageModel, ScalarModel
from lm.source import RandomInit, inference_device, inference_dtype, load_for_inference

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


@pytest.mark.parametrize("package", ["evaluation", "heed", "reward", "sft", "stages"])
def test_no_other_place_of_these_packages_chooses_a_device(package: str) -> None:
    chosen = re.compile(r"cuda\.is_available|device\(\"cuda|load_(language_|scalar_|)model\(")
    for path in (ROOT / package).rglob("*.py"):
        found = chosen.findall(path.read_text(encoding="utf-8"))
        assert not found, f"{path.relative_to(ROOT)}: {found}; lm.source loads models that only compute"


class WatchedSource:
    """Wraps a source and records, at each tensor, how many fp32 bytes of its earlier tensors are still alive."""

    def __init__(self, source: RandomInit[LanguageModel]) -> None:
        self.build, self.source, self.alive = source.build, source, list[int]()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        given: list[weakref.ref[Tensor]] = []
        for name, tensor in self.source.tensors():
            own = tensor.clone()
            del tensor
            self.alive.append(sum(t.nbytes for t in (ref() for ref in given) if t is not None))
            given.append(weakref.ref(own))
            yield name, own
            del own


def test_loading_in_bf16_holds_one_fp32_tensor_at_a_time(tiny_config: ModelConfig) -> None:
    """On a GPU, CPU memory holds no more than that."""
    small = tiny_config.model_copy(update={"vocab_size": 64})
    source = WatchedSource(RandomInit(lambda: LanguageModel(small), seed=1))
    model = load_for_inference(source, torch.bfloat16)
    sizes = [4 * parameter.numel() for parameter in model.parameters()]
    assert len(source.alive) == len(sizes)
    assert max(source.alive) <= max(sizes), f"fp32 bytes alive at each of {len(sizes)} tensors: {source.alive}"
    assert sum(sizes) > 2 * max(sizes)
