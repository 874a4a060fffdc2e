"""In-context evaluation against loops over one example at a time."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from evaluation.few_shot import Example, evaluate_few_shot, few_shot_context, read_examples
from lm.config import ModelConfig
from lm.model import LanguageModel, init_weights
from lm.tokenizer import Tokenizer
from lm.weights import load_language_model, save_model
from training.data import DataConfig

EXAMPLES = [Example(f"row {i}", f"{i} and {i}:", str(2 * i)) for i in range(7)]


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


def test_rows_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": " 1 and 1:", "completion": "2 "}, {"prompt": "a", "completion": "b\nc"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_examples(DataConfig(source=str(path), max_rows=1)) == [Example(f"{path}: line 1", "1 and 1:", "2")]
    with pytest.raises(ValueError, match=r"rows.jsonl: line 2: field 'completion' has several lines"):
        read_examples(DataConfig(source=str(path)))
