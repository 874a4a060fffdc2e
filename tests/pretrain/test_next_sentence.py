"""Next-sentence prediction: pairs, the loss by hand, the head in files, an encoder that learns it, and mistakes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from benchmarks.parity import CASES
from heed.jobs.job_file import load_job
from lm.encoder import MaskedLanguageModel, NextSentenceModel, SequenceClassifier
from lm.model import init_weights
from lm.source import load
from lm.tokenizer import Tokenizer
from lm.weights import WithNewHead, load_model, purpose_of, save_model
from pretrain.corruption import HiddenWords, NextSentenceObjective
from tests.pretrain.test_pretrain_kinds import ENCODER, pretrain
from training.metrics import read_metrics

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
START, END, MASK, PAD = 3, 1, 2, 0
WORDS = HiddenWords(START, END, MASK, (END, START, PAD), vocab_size=300, seed=5)
ROWS = np.random.default_rng(1).integers(4, 300, (30, 13)).astype(np.int32)
OBJECTIVE = NextSentenceObjective(ROWS, WORDS, num_views=10)


def test_half_of_the_pairs_belong_together() -> None:
    """Of 300 pairs; the second text of the others begins no first one's row, and is itself a second one."""
    pairs_BT, is_random_B = OBJECTIVE.pairs(np.arange(300))
    assert len(OBJECTIVE) == 300
    assert 0.42 < is_random_B.mean() < 0.58
    seconds = {tuple(row[6:12]) for row in ROWS.tolist()}
    for number, (pair, is_random) in enumerate(zip(pairs_BT.tolist(), is_random_B, strict=True)):
        row = ROWS[number % 30].tolist()
        assert pair[:6] == row[:6]
        assert (pair[6:] == row[6:12]) == (not is_random)
        assert tuple(pair[6:]) in seconds
    assert OBJECTIVE.pairs(np.array([7]))[0].tolist() == pairs_BT[7:8].tolist()  # whatever else is in the batch


def test_pairs_have_berts_marks_and_token_types() -> None:
    rows = np.arange(5)
    tokens, types, selected, words, _ = OBJECTIVE.batch(rows, CPU)
    assert tokens.shape == (5, 15)
    assert OBJECTIVE.num_tokens(rows) == 75
    assert (tokens[:, 0] == START).all()
    assert (tokens[:, [7, 14]] == END).all()
    assert types.tolist() == [[0] * 8 + [1] * 7] * 5
    assert not selected[:, [0, 7, 14]].any()
    assert int(selected.sum()) == OBJECTIVE.count(rows) == 5 * 2  # 15% of 12 words
    assert (tokens[selected] == MASK).float().mean() > 0.4
    whole = tokens.clone()
    whole[selected] = words
    texts = torch.cat([whole[:, 1:7], whole[:, 8:14]], dim=1)
    assert texts.tolist() == OBJECTIVE.pairs(rows)[0].tolist()


@torch.no_grad()
def test_the_loss_is_that_of_the_words_and_that_of_the_pairs() -> None:
    """Divided by the count, it is BERT's sum of two means."""
    model = NextSentenceModel(ENCODER)
    init_weights(model, 2)
    rows = np.array([4, 11, 20])
    loss, metrics = OBJECTIVE.loss(model, rows, CPU)
    tokens, types, selected, words, is_random = OBJECTIVE.batch(rows, CPU)
    logits, follows = model(tokens, None, selected, types)
    word_losses = [-float(torch.log_softmax(of_word, 0)[word]) for of_word, word in zip(logits, words, strict=True)]
    pair_losses = [
        -float(torch.log_softmax(of_pair, 0)[kind]) for of_pair, kind in zip(follows, is_random, strict=True)
    ]
    assert float(loss) / OBJECTIVE.count(rows) == pytest.approx(np.mean(word_losses) + np.mean(pair_losses), rel=1e-5)
    assert float(metrics["masked_loss"]) == pytest.approx(sum(word_losses), rel=1e-5)
    assert metrics["next_sentence_loss"].tolist() == pytest.approx([sum(pair_losses), 3], rel=1e-5)
    right = sum(int(of_pair.argmax()) == int(kind) for of_pair, kind in zip(follows, is_random, strict=True))
    assert metrics["next_sentence_accuracy"].tolist() == [right, 3]


@torch.no_grad()
def test_the_head_is_read_and_written_as_transformers_does(tmp_path: Path, masking_tokenizer: Tokenizer) -> None:
    theirs = transformers.BertForPreTraining(CASES["bert, masked words"].config()).eval()
    for parameter in theirs.parameters():
        parameter.normal_(std=0.3)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs", NextSentenceModel).eval()
    tokens = torch.randint(5, 200, (2, 9), generator=torch.Generator().manual_seed(1))
    types, selected = (torch.arange(9) > 4).long().expand(2, 9), torch.ones(2, 9, dtype=torch.bool)
    words, follows = ours(tokens, None, selected, types)
    expected = theirs(tokens, token_type_ids=types)
    torch.testing.assert_close(follows, expected.seq_relationship_logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(words, expected.prediction_logits.flatten(0, 1), atol=1e-4, rtol=1e-4)
    save_model(tmp_path / "ours", ours, ours.state_dict(), masking_tokenizer)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"] == ["BertForPreTraining"]
    again = transformers.BertForPreTraining.from_pretrained(tmp_path / "ours").eval()
    torch.testing.assert_close(
        again(tokens, token_type_ids=types).seq_relationship_logits, follows, atol=1e-4, rtol=1e-4
    )
    # Without its second head it is a masked language model, as before; and a classifier takes its pooler over.
    assert purpose_of(tmp_path / "ours") == "masked"
    plain = load_model(tmp_path / "ours", MaskedLanguageModel).eval()
    torch.testing.assert_close(plain(tokens, None, None, types).flatten(0, 1), words, atol=1e-5, rtol=1e-5)
    classifier = load(
        WithNewHead(tmp_path / "ours", MaskedLanguageModel, lambda c: SequenceClassifier(c, ["a", "b"]), 1)
    )
    assert torch.equal(classifier.pooler.weight, ours.pooler.weight)


def test_a_masked_model_without_the_head_is_refused(encoder_folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"config.json: architectures is \['BertForMaskedLM'\]; \['BertForPreTraining'\]"
    ):
        load_model(encoder_folder, NextSentenceModel)


def test_an_encoder_learns_both_and_pretraining_goes_on_from_it(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    folder, results = pretrain(tmp_path / "first", ENCODER, next_sentence=True)
    lines = read_metrics(folder / "metrics.jsonl")
    assert lines[-1]["masked_loss"] < lines[0]["masked_loss"] - 2
    assert lines[-1]["loss"] == pytest.approx(lines[-1]["masked_loss"] + lines[-1]["next_sentence_loss"], rel=0.02)
    assert 0 <= lines[-1]["next_sentence_accuracy"] <= 1
    assert results["heldout_next_sentence_accuracy"] == lines[-1]["heldout_next_sentence_accuracy"]
    assert results["heldout_loss"] == pytest.approx(lines[-1]["heldout_masked_loss"])
    (tmp_path / "second").mkdir()
    again, same = pretrain(
        tmp_path / "second", ENCODER, next_sentence=True, init_from=str(folder / "model"), num_steps=0
    )
    assert same["heldout_loss"] == pytest.approx(results["heldout_loss"], rel=1e-5)
    before, after = (load_file(path / "model" / "model.safetensors") for path in (folder, again))
    assert torch.equal(before["cls.seq_relationship.weight"], after["cls.seq_relationship.weight"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.type_vocab_size=0"], r"pretrain.next_sentence with model.type_vocab_size 0; at least 2 was expected"),
        (["model.kind=decoder", "model.type_vocab_size=0", "classify=none"], r"model.kind 'decoder'; an encoder was"),
        (["pretrain.seq_len=4"], r"pretrain.seq_len is 4; next_sentence needs at least 5"),
    ],
)
def test_models_that_cannot_learn_it_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_job(ROOT / "configs" / "jobs" / "classify.toml", overrides)
