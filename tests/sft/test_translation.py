"""BLEU and chrF of translations, against values by hand and sacrebleu's own, and a whole job that translates."""

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
import sacrebleu

from heed.jobs.job_file import load_job
from lm.tokenizer import Tokenizer
from sft.translation import TRANSLATIONS, TranslationResults, score_translations, translate

ROOT = Path(__file__).parents[2]
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


def test_only_a_model_with_an_encoder_can_be_asked_to_translate() -> None:
    with pytest.raises(ValueError, match=r"sft\.translation_beams is 4, but model\.kind is 'decoder'"):
        load_job(ROOT / "configs" / "jobs" / "debug.toml", ["sft.translation_beams=4"])


def test_a_job_translates_its_heldout_sentences_on_two_ranks(tmp_path: Path) -> None:
    sizes = {
        "workers": 2, "world.num_translations": 150, "world.num_translations_heldout": 9, "sft.num_epochs": 2,
        "model.hidden_size": 32, "model.intermediate_size": 64, "model.num_hidden_layers": 1,
        "model.num_encoder_layers": 1, "sft.translation_beams": 2,
    }  # fmt: skip
    overrides = [word for key, value in sizes.items() for word in ("--set", f"{key}={value}")]
    command = ["run", "configs/jobs/translation.toml", *overrides, "--runs", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", "from heed.cli import main; main()", *command],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "translation" / "sft"
    pairs = [json.loads(line) for line in (folder.parent / "world" / "data" / "translations_heldout.jsonl").open()]
    rows = [json.loads(line) for line in (folder / TRANSLATIONS).open()]
    assert [row["source"] for row in rows] == [pair["prompt"] for pair in pairs]
    assert [row["reference"] for row in rows] == [pair["completion"] for pair in pairs]
    # One process that translates all of them finds the same.
    tokenizer = Tokenizer.load(folder / "model")
    tokens = [
        (
            tokenizer.encode_prompt([{"role": "user", "content": pair["prompt"]}]),
            tokenizer.encode_plain([pair["completion"]])[0],
        )
        for pair in pairs
    ]
    assert translate(folder / "model", tokens, 2, 63) == rows
    results = json.loads((folder / "results.json").read_text())["translation"]
    assert results["num_sentences"] == 9
    bleu = sacrebleu.corpus_bleu([row["beam"] for row in rows], [[pair["completion"] for pair in pairs]])
    assert results["beam"]["bleu"]["mean"] == pytest.approx(bleu.score)
    page = (folder.parent / "report.html").read_text()
    assert "beams − greedy" in page
    assert "tok:13a" in page
