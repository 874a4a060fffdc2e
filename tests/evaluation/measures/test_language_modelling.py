"""In-context evaluation and bits per byte against loops and pretraining's own metric; paired differences of the tax."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from evaluation.measures.language_modelling import (
    Example,
    Task,
    bits_and_bytes,
    evaluate_few_shot,
    few_shot_context,
    measure_tax,
    read_examples,
    text_logprobs,
    windows,
)
from lm.config import ModelConfig
from lm.model import LanguageModel, init_weights
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from pretrain.stage import bits_per_byte
from tests.models import load_language_model
from training.data import DataConfig

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "A bird in the hand is worth two in the bush, and the bush is far.",
    "Über den Wolken ist die Freiheit grenzenlos. 山高月小。",
    "The fox and the dog and the bird slept.",
]
EXAMPLES = [Example(f"row {i}", f"{i} and {i}:", str(2 * i)) for i in range(7)]
DOGS = [Example(f"row {i}", f"{i} and {i}:", f"{2 * i} dogs") for i in range(7)]


def test_a_context_shows_others_and_never_the_answer() -> None:
    seen = set()
    for index, example in enumerate(EXAMPLES):
        *shown, query = few_shot_context(EXAMPLES, index, 3, seed=1).split("\n\n")
        assert query == example.prompt
        assert len(set(shown)) == 3
        assert set(shown) < {f"{e.prompt} {e.completion}" for e in EXAMPLES if e != example}
        seen.add(tuple(shown))
    assert len(seen) > 1
    assert few_shot_context(EXAMPLES, 2, 3, seed=1) == few_shot_context(EXAMPLES, 2, 3, seed=1)
    assert few_shot_context(EXAMPLES, 2, 0, seed=1) == EXAMPLES[2].prompt


@pytest.mark.parametrize("num_shots", [0, 2])
@torch.no_grad()
def test_log_probabilities_equal_a_loop(model_folder: Path, num_shots: int) -> None:
    model, tokenizer = load_language_model(model_folder).eval(), Tokenizer.load(model_folder)
    nats, tokens = 0.0, 0
    for index, example in enumerate(EXAMPLES):
        query = tokenizer.encode(few_shot_context(EXAMPLES, index, num_shots, seed=5))
        answer = tokenizer.encode(f" {example.completion}")
        logprobs = torch.log_softmax(model(torch.tensor([[*query, *answer]]))[0].double(), dim=-1)
        nats -= sum(float(logprobs[len(query) - 1 + i, token]) for i, token in enumerate(answer))
        tokens += len(answer)
    found = evaluate_few_shot(model_folder, EXAMPLES, num_shots, seed=5)
    assert (found.num_shots, found.num_examples) == (num_shots, 7)
    assert found.nats.mean == pytest.approx(nats / tokens, abs=1e-4)
    assert found.nats.low < found.nats.mean < found.nats.high


def test_what_was_learned_is_answered_right(tmp_path: Path, tokenizer: Tokenizer, tiny_config: ModelConfig) -> None:
    """A model that memorised six lines answers six of seven."""
    model = LanguageModel(tiny_config)
    init_weights(model, 1)
    rows = [tokenizer.encode(f"{e.prompt} {e.completion}\n") for e in EXAMPLES]
    width = max(map(len, rows))
    tokens = torch.tensor([[*row, *[tokenizer.pad_id] * (width - len(row))] for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(200):
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_model(tmp_path, model, model.state_dict(), tokenizer)
    unlike = Example("row 6", EXAMPLES[6].prompt, "a dozen")
    found = evaluate_few_shot(tmp_path, [*EXAMPLES[:6], unlike], 0, seed=0)
    assert found.exact_match.mean == pytest.approx(6 / 7)
    none = evaluate_few_shot(tmp_path, [Example(e.where, e.prompt, "a dozen") for e in EXAMPLES], 0, seed=0)
    # Wilson's upper end for 0 of 7 is z² / (7 + z²): none right out of seven does not prove that none ever would be.
    expected = (0.0, 0.0, 1.959964**2 / (7 + 1.959964**2))
    assert (none.exact_match.mean, none.exact_match.low, none.exact_match.high) == pytest.approx(expected)
    assert evaluate_few_shot(tmp_path, EXAMPLES, 0, seed=0).nats.mean < 0.7


def test_what_does_not_fit_is_named(model_folder: Path) -> None:
    with pytest.raises(
        ValueError, match="7 shots need at least 8 examples, since each is solved after 7 others; 7 were given"
    ):
        evaluate_few_shot(model_folder, EXAMPLES, 7, seed=0)
    long = [*EXAMPLES[:3], Example("file: line 4", "x " * 90, "y")]
    with pytest.raises(ValueError, match=r"file: line 4: 0 examples and the prompt have \d+ tokens; .* of 96"):
        evaluate_few_shot(model_folder, long, 0, seed=0)


def test_the_shipped_grammar_examples_are_read() -> None:
    path = Path(__file__).parents[3] / "configs" / "few_shot" / "grammar.jsonl"
    examples = read_examples(DataConfig(source=str(path)))
    assert len(examples) == 20
    for example in examples:
        poor = example.prompt.removeprefix("Poor English input: ").removesuffix("\nGood English output:")
        assert example.prompt == f"Poor English input: {poor}\nGood English output:"
        assert poor != example.completion
        assert poor.endswith((".", "?"))
        assert example.completion[-1] == poor[-1]
    assert len({example.prompt for example in examples}) == 20
    shown = few_shot_context(examples, 3, 2, seed=0)
    assert shown.count("Poor English input:") == shown.count("Good English output:") == 3
    assert examples[3].completion not in shown


def test_rows_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": " 1 and 1:", "completion": "2 "}, {"prompt": "a", "completion": "b\nc"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_examples(DataConfig(source=str(path), max_rows=1)) == [Example(f"{path}: line 1", "1 and 1:", "2")]
    with pytest.raises(ValueError, match=r"rows.jsonl: line 2: field 'completion' has several lines"):
        read_examples(DataConfig(source=str(path)))


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
        loss = cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:])
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
        loss = float(cross_entropy(model(given)[0], wanted))
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
    found = measure_tax(policies, TEXTS, [Task("doubling", DOGS, 1)], seed=0)
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
        alone = evaluate_few_shot(folder, DOGS, 1, seed=0)
        assert task.exact_match[name].value.mean == alone.exact_match.mean
        answers = Tokenizer.load(folder).encode_plain([f" {e.completion}" for e in DOGS])
        total = alone.nats.mean * sum(map(len, answers)) / math.log(2)
        assert task.bits_per_byte[name].value.mean == pytest.approx(total / sum(len(e.completion) + 1 for e in DOGS))


def test_refusals(policies: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="1 policies, 1 texts, 0 tasks"):
        measure_tax({"before": policies["before"]}, ["a"], [], seed=0)
    with pytest.raises(ValueError, match="2 policies, 0 texts, 0 tasks"):
        measure_tax(policies, [], [], seed=0)
    with pytest.raises(ValueError, match="text 1 is empty"):
        measure_tax(policies, ["a", ""], [], seed=0)
    with pytest.raises(ValueError, match="7 shots need at least 8 examples"):
        measure_tax(policies, [], [Task("doubling", DOGS, 7)], seed=0)
