"""Hidden words: how many, which, what stands for them; the objectives against naive versions; learning."""

import numpy as np
import pytest
import torch

from lm.config import ModelConfig
from lm.encoder import EncoderDecoder, MaskedLanguageModel
from lm.model import init_weights
from lm.tokenizer import Tokenizer
from pretrain.corruption import DenoisingObjective, HiddenWords, MaskedObjective

CPU = torch.device("cpu")
START, END, MASK, PAD = 1, 1, 2, 0
WORDS = HiddenWords(START, END, MASK, (END, PAD), vocab_size=40, seed=5)
SHAPE = {
    "vocab_size": 40,
    "max_position_embeddings": 32,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
}
ENCODER = ModelConfig(kind="encoder", num_hidden_layers=2, mlp="gelu", **SHAPE)
BOTH = ModelConfig(kind="encoder-decoder", num_hidden_layers=1, num_encoder_layers=1, mlp="gelu", **SHAPE)


@pytest.fixture
def rows() -> np.ndarray:
    drawn = np.random.default_rng(1).integers(3, 40, (6, 21)).astype(np.int32)
    drawn[:, 10] = END
    return drawn


def test_fifteen_in_a_hundred_are_chosen_and_most_of_them_masked() -> None:
    row = np.random.default_rng(2).integers(3, 40, 400)
    row[::10] = END
    fates = np.zeros(3)
    for number in range(200):
        corrupted, chosen = WORDS.mask(row, WORDS.generator(np.int64(number)))
        assert chosen.sum() == WORDS.num_masked(row) == 60
        assert not (chosen & (row == END)).any()
        assert (corrupted == row)[~chosen].all()
        masked, same = corrupted[chosen] == MASK, corrupted[chosen] == row[chosen]
        fates += [masked.mean() / 200, (~masked & ~same).mean() / 200, same.mean() / 200]
    # 12,000 fates; one replacement in 40 draws the same word or the mask.
    assert fates == pytest.approx([0.8025, 0.095, 0.1025], abs=0.015)


def test_a_row_of_ends_hides_nothing_and_a_short_one_hides_a_word() -> None:
    assert WORDS.num_masked(np.full(9, END)) == 0
    assert WORDS.num_masked(np.array([5, END])) == 1
    corrupted, chosen = WORDS.mask(np.full(9, END), WORDS.generator(np.int64(0)))
    assert (corrupted == END).all()
    assert not chosen.any()


def test_spans_hide_three_in_ten_behind_one_mask_each() -> None:
    row, spans = np.arange(3, 403), []
    for number in range(50):
        corrupted = WORDS.infill(row, WORDS.generator(np.int64(number)))
        left = corrupted[corrupted != MASK]
        assert (np.diff(left) > 0).all()  # what is left is in order
        num_hidden, num_masks = len(row) - len(left), int((corrupted == MASK).sum())
        assert num_hidden == 120
        assert not ((corrupted[1:] == MASK) & (corrupted[:-1] == MASK)).any()
        spans.append(num_hidden / num_masks)
    # Spans of 3 words on average, longer where two meet.
    assert 3.2 < np.mean(spans) < 4.6


def test_what_is_hidden_is_a_function_of_seed_and_row(rows: np.ndarray) -> None:
    first, again = (WORDS.mask(rows[0], WORDS.generator(np.int64(4)))[0].tolist() for _ in range(2))
    other = WORDS.mask(rows[0], WORDS.generator(np.int64(10)))[0].tolist()
    assert first == again != other


@torch.no_grad()
def test_the_masked_loss_is_that_of_the_chosen_words(rows: np.ndarray) -> None:
    model = MaskedLanguageModel(ENCODER).eval()
    init_weights(model, 3)
    objective = MaskedObjective(rows, WORDS, num_views=2)
    assert len(objective) == 12
    asked = np.array([1, 7, 11])
    loss, figures = objective.loss(model, asked, CPU)
    expected, count, right = 0.0, 0, 0
    for number in asked:
        row = rows[number % 6].astype(np.int64)
        corrupted, chosen = WORDS.mask(row, WORDS.generator(number))
        logprobs = model(torch.tensor([[START, *corrupted]]))[0, 1:].double().log_softmax(dim=-1)
        for place in np.flatnonzero(chosen):
            expected -= float(logprobs[place, row[place]])
            right += int(logprobs[place].argmax()) == row[place]
            count += 1
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert objective.count(asked) == count
    assert int(figures["accuracy"]) == right


@torch.no_grad()
def test_the_denoising_loss_is_that_of_the_whole_row(rows: np.ndarray) -> None:
    model = EncoderDecoder(BOTH).eval()
    init_weights(model, 3)
    objective = DenoisingObjective(rows, WORDS, num_views=2)
    asked = np.array([2, 8])
    loss, _ = objective.loss(model, asked, CPU)
    expected = 0.0
    for number in asked:
        row = rows[number % 6].astype(np.int64)
        source = torch.tensor([[START, *WORDS.infill(row, WORDS.generator(number))]])
        logprobs = model(source, torch.tensor([[END, *row[:-1]]]))[0].double().log_softmax(dim=-1)
        expected -= sum(float(logprobs[place, token]) for place, token in enumerate(row))
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert objective.count(asked) == 2 * 21


@torch.no_grad()
@pytest.mark.parametrize("kind", [MaskedObjective, DenoisingObjective])
def test_no_split_changes_the_loss(rows: np.ndarray, kind: type[MaskedObjective | DenoisingObjective]) -> None:
    objective = kind(rows, WORDS)
    model = MaskedLanguageModel(ENCODER) if kind is MaskedObjective else EncoderDecoder(BOTH)
    init_weights(model, 3)
    together = float(objective.loss(model.eval(), np.arange(8), CPU)[0])
    apart = sum(float(objective.loss(model, np.array([row]), CPU)[0]) for row in range(8))
    assert together == pytest.approx(apart, rel=1e-5)


def test_a_vocabulary_without_a_mask_token_hides_nothing(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="mask_token is missing"):
        HiddenWords.of(tokenizer, 0)
