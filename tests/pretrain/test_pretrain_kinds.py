"""Pretraining of an encoder by hidden words and of an encoder-decoder by denoising, end to end on one CPU rank."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lm.config import ModelConfig
from lm.encoder import EncoderDecoder, MaskedLanguageModel
from lm.tokenizer import Tokenizer
from lm.weights import load_model
from pretrain.stage import PretrainConfig, prepare_tokenizer, train
from tests.rows import jsonl
from tests.token_files import pretrain_tokens
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.data import TextConfig
from training.engine import StageContext
from training.metrics import read_metrics

TEXTS = [
    f"The {animal} sleeps in the {place}." for animal in ("fox", "dog", "bird") for place in ("bush", "hand", "山")
]
SHAPE = {
    "vocab_size": 300, "max_position_embeddings": 32, "hidden_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 48, "mlp": "gelu", "mlp_bias": True, "attention_bias": "all", "positions": "learned",
    "norm": "layer", "norm_place": "post", "embedding_norm": True,
}  # fmt: skip
ENCODER = ModelConfig(kind="encoder", type_vocab_size=2, **SHAPE)
BOTH = ModelConfig(kind="encoder-decoder", num_encoder_layers=1, **SHAPE)

Finished = tuple[Path, dict[str, Any]]


def pretrain(folder: Path, model: ModelConfig, **changes: Any) -> Finished:
    for name, texts in (("train", TEXTS * 8), ("heldout", TEXTS)):
        (folder / f"{name}.jsonl").write_text(jsonl({"text": text} for text in texts))
    values: dict[str, Any] = {
        "texts": (TextConfig(source=str(folder / "train.jsonl")),),
        "heldout": (TextConfig(source=str(folder / "heldout.jsonl")),),
        "seq_len": 20,
        "num_steps": 120,
        "batch": BatchConfig(batch_size=16, micro_batch_size=8),
        "optimizer": OptimizerConfig(learning_rate=0.01, schedule="cosine", warmup_steps=5),
        "save_every_steps": 1000,
        "evaluate_every_steps": 1000,
    }
    config = PretrainConfig(**(values | changes))
    prepare_tokenizer(config, model, folder / "tokenizer")
    context = StageContext(folder / "run", 3, 1, EngineConfig(precision="fp32", trackers=()))
    context.folder.mkdir()
    train(context, config, model, folder / "tokenizer", pretrain_tokens(folder, config, folder / "tokenizer"))
    return folder / "run", json.loads((folder / "run" / "results.json").read_text())


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return pretrain(tmp_path_factory.mktemp("encoder"), ENCODER)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return pretrain(tmp_path_factory.mktemp("both"), BOTH)


def test_an_encoder_finds_hidden_words(encoder: Finished) -> None:
    folder, results = encoder
    lines = read_metrics(folder / "metrics.jsonl")
    assert lines[-1]["loss"] < lines[0]["loss"] - 2
    assert results["heldout_accuracy"] > 0.25  # one in 300 by chance
    assert results["heldout_bits_per_byte"] is None  # it reads on both sides, so its loss is that of no text


def test_an_encoder_fills_in_what_a_mask_hides(encoder: Finished) -> None:
    tokenizer = Tokenizer.load(encoder[0] / "model")
    model = load_model(encoder[0] / "model", MaskedLanguageModel).eval()
    words = tokenizer.encode(" sleeps")
    tokens = tokenizer.encode("<|end|>The fox sleeps in the bush.<|end|>")
    place = next(at for at in range(len(tokens)) if tokens[at : at + len(words)] == words)
    hidden = [*tokens[:place], tokenizer.mask_id, *tokens[place + 1 :]]
    assert int(model(torch.tensor([hidden]))[0, place].argmax()) == tokens[place]


@torch.no_grad()
def test_transformers_reads_the_encoder_and_its_tokens(encoder: Finished) -> None:
    folder = encoder[0] / "model"
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    tokens = torch.tensor([Tokenizer.load(folder).encode("The fox sleeps.")])
    ours = load_model(folder, MaskedLanguageModel).eval()(tokens)
    torch.testing.assert_close(theirs(tokens).logits, ours, atol=1e-4, rtol=0)
    assert transformers.AutoTokenizer.from_pretrained(folder).mask_token == "<|mask|>"


def test_an_encoder_decoder_writes_out_what_was_hidden(both: Finished) -> None:
    folder, results = both
    lines = read_metrics(folder / "metrics.jsonl")
    assert lines[-1]["loss"] < lines[0]["loss"] - 3
    assert results["heldout_loss"] < 1
    assert load_model(folder / "model", EncoderDecoder).config == BOTH


def test_pretraining_goes_on_from_an_encoder(encoder: Finished, tmp_path: Path) -> None:
    _, results = pretrain(tmp_path, ENCODER, init_from=str(encoder[0] / "model"), num_steps=0)
    assert results["heldout_loss"] == pytest.approx(encoder[1]["heldout_loss"], rel=1e-5)
    assert results["trained_tokens"] == 0


def test_a_random_model_is_left_to_the_next_stage(tmp_path: Path) -> None:
    folder, results = pretrain(tmp_path, BOTH, num_steps=0)
    assert results["heldout_loss"] > 5
    assert load_model(folder / "model", EncoderDecoder).config == BOTH
