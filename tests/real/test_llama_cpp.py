"""llama.cpp reads what `heed export gguf` writes: every architecture, and a published model in three types of weights.

Its attention keeps keys and values in f16, so logits agree to about 0.2%.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from lm.config import ModelConfig
from lm.gguf_files import export_gguf
from lm.model import LanguageModel
from lm.source import RandomInit, load
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from tests.lm.test_gguf import BASE, SHAPES
from tests.models import load_language_model
from tests.real.packages import read_by_llama_cpp
from tests.real.texts import TEXTS

pytestmark = pytest.mark.long


def test_every_architecture_computes_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    jobs, expected = list[dict[str, Any]](), list[torch.Tensor]()
    for name, changes in SHAPES.items():
        config = ModelConfig(**{**BASE, **changes})
        model = load(RandomInit(lambda config=config: LanguageModel(config), 1)).eval()  # type: ignore[misc]
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        save_model(tmp_path / name, model, dict(model.state_dict()), tokenizer)
        path = tmp_path / f"{name}.gguf"
        export_gguf(tmp_path / name, path, "f32")
        tokens_BT = torch.randint(tokenizer.vocab_size, (1, 20), generator=generator)
        jobs.append({"file": str(path), "tokens": tokens_BT.tolist(), "texts": list(TEXTS[:20])})
        with torch.no_grad():
            expected.append(model(tokens_BT)[0, -1])
    for name, found, logits in zip(SHAPES, read_by_llama_cpp(jobs, tmp_path), expected, strict=True):
        difference = (torch.tensor(found["logits"][0]) - logits).abs().max() / logits.abs().max()
        assert difference < 5e-3, (name, difference)
        assert found["texts"] == tokenizer.encode_plain(TEXTS[:20]), name
        assert found["end"] == tokenizer.end_id
        assert found["template"] == tokenizer.chat_template


def test_a_published_model_computes_the_same_and_reads_the_same_tokens(short_smollm2: Path, tmp_path: Path) -> None:
    tokenizer, model = Tokenizer.load(short_smollm2), load_language_model(short_smollm2).eval()
    prompt = tokenizer.encode_prompt([{"role": "user", "content": "What is the capital of France?"}])
    jobs = []
    for kind in ("f32", "f16", "q8_0"):
        export_gguf(short_smollm2, tmp_path / f"{kind}.gguf", kind)  # type: ignore[arg-type]
        texts = list(TEXTS[:200]) if kind == "f16" else []
        jobs.append({"file": str(tmp_path / f"{kind}.gguf"), "tokens": [prompt], "texts": texts})
    with torch.no_grad():
        logits = model(torch.tensor([prompt]))[0, -1]
    for found, tolerance in zip(read_by_llama_cpp(jobs, tmp_path), (5e-3, 5e-3, 3e-2), strict=True):
        assert (torch.tensor(found["logits"][0]) - logits).abs().max() < tolerance * logits.abs().max()
        assert found["end"] == tokenizer.end_id
        if found["texts"]:
            assert found["texts"] == tokenizer.encode_plain(TEXTS[:200])
