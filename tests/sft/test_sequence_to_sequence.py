"""Sequence-to-sequence fine-tuning of an encoder-decoder, end to end on one CPU rank."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.parity import Case
from benchmarks.translation import translate
from lm.config import ModelConfig
from lm.encoder import EncoderDecoder
from lm.generation import generate
from lm.model import init_weights
from lm.sampling import Choice
from lm.source import load
from lm.tokenizer import Tokenizer
from lm.weights import load_model, save_model
from sft.demonstrations import Limit, demonstration_parts, split_pair
from sft.stage import SFTConfig, policy_source, train
from tests.lm.vocabularies import unigram
from tests.sft.test_sft_stage import PAIRS, write_data
from tests.token_files import sft_tokens
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.data import DataConfig
from training.engine import StageContext

CONFIG = ModelConfig(
    kind="encoder-decoder", vocab_size=288, max_position_embeddings=64, hidden_size=24, num_hidden_layers=1,
    num_encoder_layers=1,
    num_attention_heads=2, num_key_value_heads=2, intermediate_size=48, mlp="relu", norm="layer", norm_place="post",
    positions="sinusoidal", scale_embedding=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, masking_tokenizer: Tokenizer) -> Path:
    model = EncoderDecoder(CONFIG)
    init_weights(model, 2)
    folder = tmp_path_factory.mktemp("start")
    save_model(folder, model, model.state_dict(), masking_tokenizer)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, start: Path) -> tuple[Path, dict[str, Any]]:
    """The run directory and results.json."""
    folder = tmp_path_factory.mktemp("sft")
    config = SFTConfig(
        demonstrations=write_data(folder / "train.jsonl", PAIRS * 4),
        heldout=write_data(folder / "heldout.jsonl", PAIRS),
        chat_template="plain",
        seq_len=64,
        num_epochs=40.0,
        batch=BatchConfig(batch_size=4, micro_batch_size=2),
        optimizer=OptimizerConfig(learning_rate=0.01, schedule="linear", warmup_steps=5),
        save_every_steps=1000,
        evaluate_every_steps=1000,
    )
    context = StageContext(folder / "run", 3, 1, EngineConfig(precision="fp32", trackers=()))
    train(context, config, start, sft_tokens(folder, config, start, has_source=True))
    return folder / "run", json.loads((folder / "run" / "results.json").read_text())


@torch.no_grad()
@pytest.mark.parametrize("which", ["before", "after"])
def test_heldout_loss_is_the_mean_over_target_tokens(
    finished: tuple[Path, dict[str, Any]], start: Path, which: str
) -> None:
    """Pair by pair, without padding."""
    folder, results = finished
    source = start if which == "before" else folder / "model"
    tokenizer, model = Tokenizer.load(source), load_model(source, EncoderDecoder).eval()
    nats, count = 0.0, 0
    for prompt, answer in PAIRS:
        read = torch.tensor([tokenizer.encode(f"<|end|>{prompt}<|end|>")])
        written = tokenizer.encode(f"{answer}<|end|>")
        logprobs = model(read, torch.tensor([[tokenizer.end_id, *written[:-1]]]))[0].double().log_softmax(dim=-1)
        nats -= sum(float(logprobs[i, token]) for i, token in enumerate(written))
        count += len(written)
    assert results["heldout_loss_before" if which == "before" else "heldout_loss"] == pytest.approx(
        nats / count, rel=1e-5, abs=1e-6
    )


def test_it_answers_what_it_read_and_stops(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, results = finished
    assert results["num_rows"] == 12
    assert results["heldout_loss"] < 0.2
    tokenizer, model = Tokenizer.load(folder / "model"), load_model(folder / "model", EncoderDecoder).eval()
    sources = [tokenizer.encode_prompt([{"role": "user", "content": prompt}]) for prompt, _ in PAIRS]
    found = generate(
        model, [[tokenizer.end_id]] * 3, max_new_tokens=30, end_ids=tokenizer.end_ids, choice=Choice(0),
        seeds=[0, 0, 0], sources=sources,
    )  # fmt: skip
    assert [tokenizer.decode(response) for response in found.responses] == [answer for _, answer in PAIRS]
    assert found.finished == [True] * 3


def test_a_pair_is_what_comes_before_the_last_response_and_that_response() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    spoken = [False, True, False, False, True, True, True, False]
    assert split_pair(tokens, spoken) == ([1, 2, 3, 4], [5, 6, 7])
    assert split_pair(tokens[:3], [True] * 3) == ([], [1, 2, 3])


def test_source_and_target_must_fit_a_row_each(tmp_path: Path, masking_tokenizer: Tokenizer) -> None:
    long = write_data(tmp_path / "long.jsonl", [PAIRS[0], ("x" * 30, "y" * 40)])
    with pytest.raises(ValueError, match=r"long\.jsonl: line 2: source and target have 32 and 41 tokens"):
        list(demonstration_parts(masking_tokenizer, long, Limit(True, 36), 0))
    (part,) = demonstration_parts(masking_tokenizer, long, Limit(True, 41), 0)  # together they would not
    assert len(part.arrays["lengths"]) == part.num_rows == 2


def test_a_source_must_be_there(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "alone.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "assistant", "content": "Far."}]}) + "\n")
    with pytest.raises(ValueError, match=r"alone\.jsonl: line 1: nothing comes before the response"):
        list(demonstration_parts(tokenizer.with_template("plain"), (DataConfig(source=str(path)),), Limit(True, 40), 0))


def test_blocks_of_the_decoder_are_added(start: Path, tmp_path: Path) -> None:
    config = SFTConfig(
        demonstrations=write_data(tmp_path / "train.jsonl", PAIRS),
        seq_len=64,
        batch=BatchConfig(batch_size=4, micro_batch_size=2),
        optimizer=OptimizerConfig(learning_rate=0.01),
        added_layers=1,
    )
    old, new = load_model(start, EncoderDecoder), load(policy_source(start, config, seed=1))
    assert (new.config.num_encoder_layers, new.config.num_hidden_layers) == (1, 2)
    weights = new.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in old.state_dict().items())
    assert float(weights["decoder.blocks.1.cross.query.weight"].std()) > 0


def write_t5(folder: Path) -> transformers.T5Tokenizer:
    """Writes a T5 of random weights with the files that its publishers give it, and returns its tokenizer."""
    pieces = [tuple(piece) for piece in json.loads(unigram().to_str())["model"]["vocab"] if piece[0] != "<unk>"]
    specials = [(name, 0.0) for name in ("<pad>", "</s>", "<unk>")]
    tokenizer = transformers.T5Tokenizer(vocab=[*specials, *pieces], extra_ids=3)
    tokenizer.save_pretrained(folder)
    changes = {"vocab_size": len(tokenizer) + 5, "decoder_start_token_id": 0, "n_positions": 64}
    torch.manual_seed(5)
    model = Case("T5", changes, purpose="translate").random_model()
    model.get_output_embeddings().weight.data[tokenizer.eos_token_id] = 0  # so that a few steps leave it unlikely
    model.save_pretrained(folder)
    return tokenizer


@torch.no_grad()
def test_a_t5_is_tuned_and_translates_as_transformers_has_it(tmp_path: Path) -> None:
    """Sources end with the end token, and targets start after the padding token."""
    theirs_tokenizer = write_t5(tmp_path / "t5")
    config = SFTConfig.model_validate(
        {
            "demonstrations": write_data(tmp_path / "train.jsonl", PAIRS * 4), "chat_template": "plain",
            "heldout": write_data(tmp_path / "heldout.jsonl", PAIRS), "seq_len": 64, "num_epochs": 2,
            "batch": {"batch_size": 4, "micro_batch_size": 2}, "optimizer": {"learning_rate": 0.0001},
        }
    )  # fmt: skip
    context = StageContext(tmp_path / "run", 3, 1, EngineConfig(precision="fp32", trackers=()))
    with torch.enable_grad():
        train(context, config, tmp_path / "t5", sft_tokens(tmp_path, config, tmp_path / "t5", has_source=True))
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    rows = translate(tmp_path / "run" / "model", PAIRS, num_beams=2, max_new_tokens=63)
    for model, loss in (("t5", "heldout_loss_before"), ("run/model", "heldout_loss")):
        theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / model).eval()
        assert theirs.generation_config.decoder_start_token_id == 0
        nats, count = 0.0, 0
        for prompt, answer in PAIRS:
            read, labels = (theirs_tokenizer(text, return_tensors="pt").input_ids for text in (prompt, answer))
            nats += float(theirs(input_ids=read, labels=labels).loss) * labels.shape[1]
            count += labels.shape[1]
        assert results[loss] == pytest.approx(nats / count, rel=1e-4)
    assert len({row["greedy"] for row in rows} - {""}) > 1
    for (prompt, _), row in zip(PAIRS, rows, strict=True):
        read = theirs_tokenizer(prompt, return_tensors="pt").input_ids
        written = theirs.generate(input_ids=read, max_new_tokens=63, do_sample=False, num_beams=1)[0]
        assert row["greedy"] == theirs_tokenizer.decode(written, skip_special_tokens=True).strip()
