"""Pretraining end to end on one CPU rank, and its figures against independent computations."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm.config import ModelConfig
from lm.tokenizer import Tokenizer
from pretrain import stage
from pretrain.stage import PretrainConfig, bits_per_byte, prepare_tokenizer, train
from tests.models import load_language_model
from tests.rows import jsonl
from tests.token_files import pretrain_tokens
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.data import TextConfig
from training.engine import StageContext
from training.metrics import read_metrics
from training.packing import stream_rows
from training.tokens import TokenFolders

MODEL = ModelConfig(
    vocab_size=280,
    max_position_embeddings=32,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=32,
    mlp="relu2",
)
TRAIN = [
    f"The {animal} sleeps in the {place}." for animal in ("fox", "dog", "bird") for place in ("bush", "hand", "山")
]
HELDOUT = ["The bird sleeps in the hand.", "The dog über the bush sleeps.", "The fox in the hand sleeps."]


def write_config(folder: Path) -> PretrainConfig:
    for name, texts in (("train", TRAIN * 8), ("heldout", HELDOUT)):
        (folder / f"{name}.jsonl").write_text(jsonl({"text": text} for text in texts))
    return PretrainConfig(
        texts=(TextConfig(source=str(folder / "train.jsonl")),),
        heldout=(TextConfig(source=str(folder / "heldout.jsonl")),),
        seq_len=16,
        num_steps=30,
        batch=BatchConfig(batch_size=8, micro_batch_size=4),
        optimizer=OptimizerConfig(learning_rate=0.02, schedule="cosine"),
        save_every_steps=20,
        evaluate_every_steps=10,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The run directory and results.json."""
    folder = tmp_path_factory.mktemp("pretrain")
    config = write_config(folder)
    prepare_tokenizer(config, MODEL.model_copy(update={"vocab_size": 272}), folder / "tokenizer")
    context = StageContext(folder / "run", 3, 1, EngineConfig(precision="fp32"))
    context.folder.mkdir()
    train(context, config, MODEL, folder / "tokenizer", pretrain_tokens(folder, config, folder / "tokenizer"))
    return folder / "run", json.loads((folder / "run" / "results.json").read_text())


def test_the_run_directory_is_whole(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, results = finished
    names = {path.name for path in (folder / "model").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000020", "step-000030"]
    assert list(folder.rglob("events.out.tfevents*"))
    assert results["trained_tokens"] == 30 * 8 * 16
    assert results["vocab_size"] == 272
    D, M = 16, 32
    assert results["num_parameters"] == 280 * D + D * (2 + 2 * 1) * 8 + D * D + 2 * D * M + 3 * D
    stream = np.fromfile(folder.parent / "train-tokens" / "tokens.bin", dtype=np.int32)
    assert results["train_tokens"] == len(stream) // 16 * 16


def test_the_loss_falls(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, results = finished
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert lines[0]["loss"] == pytest.approx(math.log(280) + 0.5, abs=0.5)  # logits of unit variance
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    evaluated = [line["heldout_loss"] for line in lines if "heldout_loss" in line]
    assert len(evaluated) == 3
    assert evaluated[-1] == pytest.approx(results["heldout_loss"], rel=1e-6)
    assert results["heldout_loss"] < evaluated[0]


def test_the_stream_holds_the_texts(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = finished
    tokenizer = Tokenizer.load(folder / "model")
    stream = np.fromfile(folder.parent / "train-tokens" / "tokens.bin", dtype=np.int32).tolist()
    texts: list[list[int]] = [[]]
    for token in stream:
        if token == tokenizer.end_id:
            texts.append([])
        else:
            texts[-1].append(token)
    assert [tokenizer.decode(text) for text in texts] == [*(TRAIN * 8), ""]


@torch.no_grad()
def test_bits_per_byte_of_the_written_model(finished: tuple[Path, dict[str, Any]]) -> None:
    """Text by text: the nats of every predicted token, over the bytes of the text that they spell."""
    folder, results = finished
    tokenizer, model = Tokenizer.load(folder / "model"), load_language_model(folder / "model").eval()
    stream = [token for text in HELDOUT for token in [*tokenizer.encode(text), tokenizer.end_id]]
    rows = [stream[start : start + 16] for start in range(0, len(stream) - 15, 16)]
    nats, spelled = 0.0, []
    for row in rows:
        logprobs = torch.log_softmax(model(torch.tensor([row]))[0].double(), dim=-1)
        nats -= sum(float(logprobs[t, row[t + 1]]) for t in range(15))
        # Latin-1 keeps bytes that a cut in the midst of a letter left incomplete.
        spelled += [token for token in row[1:] if token != tokenizer.end_id]
    assert results["heldout_loss"] == pytest.approx(nats / (15 * len(rows)), rel=1e-5)
    num_bytes = sum(len(byte_spelling(tokenizer, token)) for token in spelled)
    assert results["heldout_bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)


def byte_spelling(tokenizer: Tokenizer, token: int) -> bytes:
    """GPT-2's table backwards: printable bytes stand for themselves, the others for U+0100 and on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return bytes(table[character] for character in tokenizer.token_text(token))


def heldout_rows(folder: Path, texts: list[str], tokenizer: Tokenizer, seq_len: int) -> tuple[Any, Any]:
    """Tokens and the bytes that they stand for, as a run writes and reads them."""
    config = write_config(folder)
    (folder / "heldout.jsonl").write_text(jsonl({"text": text} for text in texts))
    tokenizer.save(folder / "tokenizer")
    data = pretrain_tokens(folder, config, folder / "tokenizer")
    return tuple(stream_rows(data.heldout / f"{name}.bin", seq_len) for name in ("tokens", "num_bytes"))


def test_bits_per_byte_by_hand_of_a_byte_level_vocabulary(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokens, spelled = heldout_rows(tmp_path, ["The dog 山", "the b"], tokenizer, 5)
    names = [[tokenizer.token_text(token) for token in row] for row in tokens.tolist()]
    # The second row begins inside 山; " b" and the last end token fill no row.
    assert names == [["The", "Ġd", "og", "Ġ", "å"], ["±", "±", "<|end|>", "t", "he"]]
    num_bytes = (2 + 2 + 1 + 1) + (1 + 0 + 1 + 2)
    assert bits_per_byte(2.0, spelled) == pytest.approx(2.0 * 8 / (math.log(2) * num_bytes))


def test_bits_per_byte_by_hand_of_a_vocabulary_that_is_not(wordpiece: Tokenizer, tmp_path: Path) -> None:
    texts = ["The  über dogs! ", "the 山 sleeps", "☃ dog"]
    tokens, spelled = heldout_rows(tmp_path, texts, wordpiece, 5)
    names = [[wordpiece.token_text(token) for token in row] for row in tokens.tolist()]
    assert names == [["the", "uber", "dog", "##s", "!"], ["[SEP]", "the", "山", "sleep", "##s"]]  # "☃ dog" fills no row
    # "  über", " dog", "s", "! "; then "the", " 山", " sleep", "s".
    num_bytes = (2 + 5) + 4 + 1 + 2 + 3 + (1 + 3) + 6 + 1
    assert bits_per_byte(2.0, spelled) == pytest.approx(2.0 * 8 / (math.log(2) * num_bytes))


def test_the_tokenizer_learns_from_the_first_texts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "TOKENIZER_TEXTS", 20)
    config = write_config(tmp_path)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write("not json\n")  # past the twentieth text, so never read
    prepare_tokenizer(config, MODEL.model_copy(update={"vocab_size": 265}), tmp_path / "tokenizer")
    assert Tokenizer.load(tmp_path / "tokenizer").vocab_size == 265


def test_a_vocabulary_that_is_larger_than_the_models_is_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    prepare_tokenizer(config, MODEL.model_copy(update={"vocab_size": 272}), tmp_path / "tokenizer")
    context = StageContext(tmp_path / "run", 3, 1, EngineConfig(precision="fp32", trackers=()))
    context.folder.mkdir()
    shape = MODEL.model_copy(update={"vocab_size": 270})
    with pytest.raises(ValueError, match=r"model.vocab_size is 270; at least 272, the size of the tokenizer"):
        train(context, config, shape, tmp_path / "tokenizer", TokenFolders(tmp_path, tmp_path))
