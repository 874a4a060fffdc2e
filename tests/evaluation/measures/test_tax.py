"""Bits per byte against pretraining's own metric and against loops; paired differences."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from evaluation.few_shot import Example, evaluate_few_shot
from evaluation.measures.tax import Task, measure_tax
from evaluation.measures.text import bits_and_bytes, text_logprobs, windows
from lm.config import ModelConfig
from lm.model import LanguageModel, init_weights
from lm.tokenizer import Tokenizer
from lm.weights import load_language_model, save_model
from pretrain.stage import bits_per_byte

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "A bird in the hand is worth two in the bush, and the bush is far.",
    "Über den Wolken ist die Freiheit grenzenlos. 山高月小。",
    "The fox and the dog and the bird slept.",
]
EXAMPLES = [Example(f"row {i}", f"{i} and {i}:", f"{2 * i} dogs") for i in range(7)]


@pytest.fixture(scope="module")
def policies(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, tokenizer: Tokenizer, tiny_config: ModelConfig
) -> dict[str, Path]:
    """The tiny model, and one that was trained a little on the texts."""
    model = LanguageModel(tiny_config)
    init_weights(model, seed=7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for text in TEXTS * 3:
        tokens = torch.tensor([[tokenizer.end_id, *tokenizer.encode_plain([text])[0]]])
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("taught")
    save_model(folder, model, model.state_dict(), tokenizer)
    return {"before": model_folder, "after": folder}


@torch.no_grad()
def test_a_text_is_predicted_token_by_token(model_folder: Path) -> None:
    model, tokenizer = load_language_model(model_folder).eval(), Tokenizer.load(model_folder)
    texts = ["The dog.", "", TEXTS[2]]
    found = text_logprobs(model, tokenizer, texts)
    assert found[1] == 0.0
    for text, logprob in zip(texts, found, strict=True):
        given, total = [tokenizer.end_id], 0.0
        for token in tokenizer.encode_plain([text])[0]:
            total += float(torch.log_softmax(model(torch.tensor([given]))[0, -1].double(), -1)[token])
            given.append(token)
        assert logprob == pytest.approx(total, abs=1e-3)


def test_bits_are_those_that_pretraining_reports(model_folder: Path) -> None:
    """The stage would measure the same on a stream of one text after EOS, in one row."""
    model, tokenizer = load_language_model(model_folder).eval(), Tokenizer.load(model_folder)
    text = TEXTS[0]
    tokens = [tokenizer.end_id, *tokenizer.encode_plain([text])[0]]
    spelled = np.array([[0, *tokenizer.spelled_bytes([text])[0]]], dtype=np.int32)
    with torch.no_grad():
        given, wanted = torch.tensor([tokens[:-1]]), torch.tensor(tokens[1:])
        loss = float(torch.nn.functional.cross_entropy(model(given)[0], wanted))
    bits, num_bytes = bits_and_bytes(model, tokenizer, [text])
    assert bits[0] / num_bytes[0] == pytest.approx(bits_per_byte(loss, spelled), rel=1e-5)


def test_a_long_text_is_predicted_whole_and_once(model_folder: Path) -> None:
    pieces = list(windows(list(range(10, 21)), start_id=5, max_position_embeddings=5))
    assert pieces == [([5], [10, 11, 12, 13]), ([13], [14, 15, 16, 17]), ([16, 17], [18, 19, 20])]
    model, tokenizer = load_language_model(model_folder).eval(), Tokenizer.load(model_folder)
    long = " ".join(TEXTS) * 3
    num_tokens = len(tokenizer.encode_plain([long])[0])
    assert num_tokens > 3 * model.config.max_position_embeddings
    assert -text_logprobs(model, tokenizer, [long])[0] / num_tokens == pytest.approx(math.log(288), rel=0.3)


def test_the_tax_is_what_each_policy_measures_alone(policies: dict[str, Path]) -> None:
    found = measure_tax(policies, TEXTS, [Task("doubling", EXAMPLES, 1)], seed=0)
    assert (found.before, found.num_documents, found.num_bytes) == ("before", 4, sum(len(t.encode()) for t in TEXTS))
    for name, folder in policies.items():
        bits, num_bytes = bits_and_bytes(load_language_model(folder).eval(), Tokenizer.load(folder), TEXTS)
        assert found.bits_per_byte[name].value.mean == pytest.approx(bits.sum() / num_bytes.sum())
    change = found.bits_per_byte["after"]
    expected = change.value.mean - found.bits_per_byte["before"].value.mean
    assert change.above_before.mean == pytest.approx(expected)
    assert change.above_before.high < 0  # it was trained on these texts
    # The difference is paired, so its interval is narrower than those of either metric, whose documents differ in
    # difficulty.
    nothing = found.bits_per_byte["before"].above_before
    assert (nothing.mean, nothing.low, nothing.high) == (0, 0, 0)
    (task,) = found.tasks
    assert (task.task, task.num_shots, task.num_examples) == ("doubling", 1, 7)
    for name, folder in policies.items():
        alone = evaluate_few_shot(folder, EXAMPLES, 1, seed=0)
        assert task.exact_match[name].value.mean == alone.exact_match.mean
        answers = Tokenizer.load(folder).encode_plain([f" {e.completion}" for e in EXAMPLES])
        total = alone.nats.mean * sum(map(len, answers)) / math.log(2)
        assert task.bits_per_byte[name].value.mean == pytest.approx(
            total / sum(len(e.completion) + 1 for e in EXAMPLES)
        )


def test_refusals(policies: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="1 policies, 1 texts, 0 tasks"):
        measure_tax({"before": policies["before"]}, ["a"], [], seed=0)
    with pytest.raises(ValueError, match="2 policies, 0 texts, 0 tasks"):
        measure_tax(policies, [], [], seed=0)
    with pytest.raises(ValueError, match="text 1 is empty"):
        measure_tax(policies, ["a", ""], [], seed=0)
    with pytest.raises(ValueError, match="7 shots need at least 8 examples"):
        measure_tax(policies, [], [Task("doubling", EXAMPLES, 7)], seed=0)
