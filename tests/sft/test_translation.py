"""BLEU and chrF of translations, against values by hand and sacrebleu's own, and a whole job that translates."""

import json
import math
import random
from pathlib import Path

import pytest
import sacrebleu

from heed.jobs.job_file import load_job
from lm.config import ModelConfig
from lm.encoder import EncoderDecoder
from lm.source import RandomInit, load
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from sft.stage import Pairs, SFTConfig, translate_heldout
from sft.translation import TRANSLATIONS, TranslationResults, score_translations, translate
from tests.token_files import sft_tokens
from training.config import EngineConfig
from training.data import DataConfig
from training.engine import StageContext
from training.tokens import Sequences

ROOT = Path(__file__).parents[2]
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


def test_only_a_model_with_an_encoder_can_be_asked_to_translate() -> None:
    with pytest.raises(ValueError, match=r"sft\.translation_beams is 4, but model\.kind is 'decoder'"):
        load_job(ROOT / "configs" / "jobs" / "debug.toml", ["sft.translation_beams=4"])


def test_each_rank_translates_its_share_and_rank_0_scores_all_in_order(
    tmp_path: Path, masking_tokenizer: Tokenizer
) -> None:
    """Three ranks one after another, in this process; rank 0 comes last and gathers what the others said."""
    (tmp_path / "pairs.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"{word} fox", "completion": word}) + "\n" for word in ["one", "two", "far", "in"]
        )
    )
    model = load(RandomInit(lambda: EncoderDecoder(SHAPE), 1))
    save_model(tmp_path / "model", model, model.state_dict(), masking_tokenizer)
    data = (DataConfig(source=str(tmp_path / "pairs.jsonl")),)
    config = SFTConfig.model_validate(
        {
            "demonstrations": data, "heldout": data, "chat_template": "plain", "seq_len": 24, "translation_beams": 2,
            "batch": {"batch_size": 2, "micro_batch_size": 2}, "optimizer": {"learning_rate": 0.1},
        }
    )  # fmt: skip
    tokens = sft_tokens(tmp_path, config, tmp_path / "model", has_source=True)
    context = StageContext(tmp_path, 3, 3, EngineConfig())
    said = list[object]()
    for rank in (2, 1, 0):
        found = translate_heldout(OneOfThree(rank, said), context, config, tokens.heldout)  # type: ignore[arg-type]
        assert (found is None) == (rank > 0)
    rows = [json.loads(line) for line in (tmp_path / TRANSLATIONS).open()]
    assert [row["source"] for row in rows] == ["one fox", "two fox", "far fox", "in fox"]
    assert [row["reference"] for row in rows] == ["one", "two", "far", "in"]
    assert len({row["greedy"] for row in rows}) > 1
    # One process that translates all of them finds the same.
    sequences = Sequences.read(tokens.heldout)
    assert translate(tmp_path / "model", list(Pairs(sequences)), 2, 23) == rows


class OneOfThree:
    """What `translate_heldout` needs of an engine. `said` is what the ranks before this one gathered."""

    world_size = 3

    def __init__(self, rank: int, said: list[object]) -> None:
        self.rank, self.said = rank, said
        self.is_main = rank == 0

    def barrier(self) -> None: ...

    def gather(self, value: object) -> list[object]:
        self.said.insert(0, value)
        return self.said
