"""What pretraining writes to results.json, and its part of a run's report."""

from dataclasses import dataclass

from stages.reports.parts import StageReport, StageReporter
from stages.reports.run_folder import StageFolder
from stages.reports.stage_report import (
    GRADIENT_NORM,
    Panel,
    headline_of,
    metric_figures,
    stage_block,
    train_and_heldout,
)
from stages.reports.text import count, number, percent
from training.data import SourceRows

PANELS = (
    Panel("Loss", "nats per token", train_and_heldout("loss")),
    Panel("Next sentence", "pairs told right", train_and_heldout("next_sentence_accuracy"), is_share=True),
    GRADIENT_NORM,
)


@dataclass(frozen=True)
class PretrainResults:
    """Losses in nats per token. `heldout_accuracy` is on hidden words (masked models only); bits per byte are given for
    decoders only. With next-sentence prediction, `heldout_loss` is that of the hidden words alone.
    """

    heldout_loss: float
    num_parameters: int
    vocab_size: int
    train_tokens: int
    trained_tokens: int
    heldout_accuracy: float | None = None
    heldout_next_sentence_accuracy: float | None = None  # of pairs of texts, half of which belong together
    heldout_bits_per_byte: float | None = None
    sources: tuple[SourceRows, ...] = ()  # of the texts, if rows are unusual


def report(stage: StageFolder) -> StageReport:
    figures = metric_figures(stage, PANELS)
    results = stage.results(PretrainResults)
    if results is None:
        return StageReport((stage_block(stage, (), figures),))
    facts = [
        ("Parameters", count(results.num_parameters)),
        ("Vocabulary", count(results.vocab_size)),
        ("Tokens of text", count(results.train_tokens)),
        ("Tokens trained on", count(results.trained_tokens)),
        ("Held-out loss", number(results.heldout_loss)),
    ]
    if results.heldout_accuracy is not None:
        facts.append(("Hidden words found", percent(results.heldout_accuracy)))
    if results.heldout_next_sentence_accuracy is not None:
        facts.append(("Next sentences told from random ones", percent(results.heldout_next_sentence_accuracy)))
    facts += [rows.fact for rows in results.sources]
    bits = results.heldout_bits_per_byte
    if bits is None:
        return StageReport((stage_block(stage, facts, figures),))
    facts.append(("Bits per byte", number(bits)))
    field, detail = "heldout_bits_per_byte", "pretraining, held-out text"
    return StageReport(
        (stage_block(stage, facts, figures),),
        headlines=(headline_of(stage, field, "Bits per byte", bits, number(bits), detail),),
        sentence=f"Pretraining reaches {number(bits)} bits per byte on held-out text.",
    )


REPORTER = StageReporter("Pretraining", "A tokenizer and a language model, from raw text.", report)
