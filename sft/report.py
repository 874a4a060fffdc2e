"""What supervised fine-tuning writes to results.json, and its part of a run's report."""

from dataclasses import dataclass

from preferences.statistics.estimates import Interval
from sft.translation import TranslationResults
from stages.reports.parts import Cell, Row, StageReport, StageReporter, Table
from stages.reports.run_folder import StageFolder
from stages.reports.stage_report import (
    GRADIENT_NORM,
    Panel,
    headline_of,
    metric_figures,
    stage_block,
    train_and_heldout,
)
from stages.reports.text import count, count_of, number, percent
from training.data import Overlong, SourceRows

PANELS = (Panel("Loss", "nats per response token", train_and_heldout("loss")), GRADIENT_NORM)


@dataclass(frozen=True)
class SFTResults:
    """Losses in nats per response token, before and after training. `packing_efficiency` is the share of positions
    that are not padding.
    """

    heldout_loss: float
    heldout_loss_before: float
    num_steps: int
    num_rows: int
    packing_efficiency: float
    overlong: Overlong | None = None  # of the demonstrations
    sources: tuple[SourceRows, ...] = ()  # of the demonstrations, if rows are unusual
    translation: TranslationResults | None = None


def report(stage: StageFolder) -> StageReport:
    figures = metric_figures(stage, PANELS)
    results = stage.results(SFTResults)
    if results is None:
        return StageReport((stage_block(stage, (), figures),))
    loss, before = results.heldout_loss, number(results.heldout_loss_before)
    facts = [
        ("Packed rows", count(results.num_rows)),
        ("Steps", count(results.num_steps)),
        ("Held-out loss before", before),
        ("Held-out loss after", number(loss)),
        ("Packing efficiency", percent(results.packing_efficiency)),
    ]
    if results.overlong:
        facts.append(("Demonstrations", str(results.overlong)))
    facts += [rows.fact for rows in results.sources]
    tables = () if results.translation is None else (_translations(results.translation),)
    detail = f"nats per token, {before} before"
    return StageReport(
        (stage_block(stage, facts, figures), *tables),
        headlines=(headline_of(stage, "heldout_loss", "SFT held-out loss", loss, number(loss), detail),),
        sentence=f"SFT reaches a held-out loss of {number(loss)} nats per token.",
    )


def _translations(found: TranslationResults) -> Table:
    named = {"greedy": found.greedy, f"{found.num_beams} beams": found.beam, "beams − greedy": found.beam_above_greedy}
    rows = tuple(
        Row((name,), (_cell(scores.bleu), _cell(scores.chrf), _cell(scores.exact_match, 100)))
        for name, scores in named.items()
    )
    signatures = "; ".join(found.signatures)
    caption = f"{count_of(found.num_sentences, 'held-out sentence')}, 95% intervals over sentences; {signatures}"
    columns = ("decoding", "BLEU", "chrF", "exact, %")
    return Table(caption, columns, rows, title="Translations")


def _cell(found: Interval, unit: float = 1) -> Cell:
    value, low, high = (number(unit * end) for end in (found.mean, found.low, found.high))
    return Cell(value, f"{low} to {high}")


REPORTER = StageReporter(
    "Supervised fine-tuning",
    "Demonstrations teach the model to follow instructions; the loss is on responses only.",
    report,
)
