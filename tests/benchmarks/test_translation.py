"""BLEU and chrF of translations, against values by hand and sacrebleu's own."""

import math
import random
from pathlib import Path

import pytest
import sacrebleu

from benchmarks.translation import TranslationResults, score_translations, translate
from lm.config import ModelConfig
from lm.encoder import EncoderDecoder
from lm.source import RandomInit, load
from lm.tokenizer import Tokenizer
from lm.weights import save_model

SHAPE = ModelConfig(
    kind="encoder-decoder", vocab_size=288, max_position_embeddings=24, hidden_size=16, num_hidden_layers=1,
    num_encoder_layers=1, num_attention_heads=2, intermediate_size=24,
)  # fmt: skip
REFERENCE, TRANSLATION = "the cat is on the mat", "the cat sat on the mat"


def scored(references: list[str], greedy: list[str], beam: list[str]) -> TranslationResults:
    return score_translations(references, greedy, beam, num_beams=4, seed=0)


def test_bleu_and_chrf_by_hand() -> None:
    found = scored([REFERENCE] * 2, [TRANSLATION] * 2, [REFERENCE] * 2)
    # 5 of 6 words, 3 of 5 pairs, 1 of 4 triples and 0 of 3 quadruples occur in the reference, in each of two sentences;
    # an order without a match counts as half a match.
    assert found.greedy.bleu.mean == pytest.approx(100 * (5 / 6 * 3 / 5 * 1 / 4 * 0.5 / 6) ** (1 / 4))
    assert (found.beam.bleu.mean, found.beam.chrf.mean, found.beam.exact_match.mean) == pytest.approx((100, 100, 1))
    # "abc" for "abd": 2 of 3 characters, 1 of 2 pairs, 0 of 1 triples; precision and recall are equal.
    found = scored(["abd"] * 2, ["abc"] * 2, ["abd"] * 2)
    assert found.greedy.chrf.mean == pytest.approx(100 * (2 / 3 + 1 / 2 + 0) / 3)


def test_too_short_a_translation_is_penalised_by_exp_of_1_minus_the_ratio_of_lengths() -> None:
    words = "one two three four five six seven eight"
    found = scored([words] * 2, [words.rsplit(" ", 2)[0]] * 2, [words] * 2)
    assert found.greedy.bleu.mean == pytest.approx(100 * math.exp(1 - 8 / 6))


def test_scores_are_sacrebleus_and_its_signatures_say_which() -> None:
    rng = random.Random(1)
    references = [" ".join(rng.choices("abcdefgh", k=9)) for _ in range(60)]
    greedy = [" ".join(rng.choice("abc") if rng.random() < 0.3 else word for word in r.split()) for r in references]
    beam = [text if rng.random() < 0.5 else reference for text, reference in zip(greedy, references, strict=True)]
    found = scored(references, greedy, beam)
    for scores, texts in ((found.greedy, greedy), (found.beam, beam)):
        assert scores.bleu.mean == pytest.approx(sacrebleu.corpus_bleu(texts, [references]).score)
        assert scores.chrf.mean == pytest.approx(sacrebleu.corpus_chrf(texts, [references]).score)
        assert scores.bleu.low < scores.bleu.mean < scores.bleu.high
    # Half the sentences are equal in both, so the paired difference is known better than either score.
    above = found.beam_above_greedy.bleu
    assert above.mean == pytest.approx(found.beam.bleu.mean - found.greedy.bleu.mean)
    assert above.low > 0
    widths = [scores.bleu.high - scores.bleu.low for scores in (found.greedy, found.beam)]
    assert above.high - above.low < sum(widths)
    assert "tok:13a" in found.signatures[0]
    assert "nc:6" in found.signatures[1]


def test_without_a_single_error_the_share_of_exact_translations_still_has_a_width() -> None:
    found = scored([REFERENCE] * 20, [REFERENCE] * 20, [REFERENCE] * 20)
    assert (found.beam.bleu.low, found.beam.bleu.high) == pytest.approx((100, 100))
    assert 0.8 < found.beam.exact_match.low < 0.9


def test_each_source_is_translated_greedily_and_by_beam_search(tmp_path: Path, masking_tokenizer: Tokenizer) -> None:
    model = load(RandomInit(lambda: EncoderDecoder(SHAPE), 1))
    save_model(tmp_path / "model", model, model.state_dict(), masking_tokenizer.with_template("plain"))
    pairs = [(f"{word} fox", word) for word in ("one", "two", "far", "in")]
    rows = translate(tmp_path / "model", pairs, num_beams=2, max_new_tokens=23)
    assert [(row["source"], row["reference"]) for row in rows] == pairs
    assert len({row["greedy"] for row in rows}) > 1
    assert [translate(tmp_path / "model", [pair], num_beams=2, max_new_tokens=23)[0] for pair in pairs] == rows
    assert [translate(tmp_path / "model", [pair], num_beams=1, max_new_tokens=23)[0]["beam"] for pair in pairs] == [
        row["greedy"] for row in rows
    ]
