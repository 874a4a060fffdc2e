"""What supervised fine-tuning and rejection sampling write to results.json, and their parts of a run's report."""

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

SFT_PANELS = (Panel("Loss", "nats per response token", train_and_heldout("loss")), GRADIENT_NORM)
REJECTION_PANELS = (Panel("Loss", "nats per token of the best samples", train_and_heldout("loss")), GRADIENT_NORM)


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


def sft_report(stage: StageFolder) -> StageReport:
    figures = metric_figures(stage, SFT_PANELS)
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


SFT_REPORTER = StageReporter(
    "Supervised fine-tuning",
    "Demonstrations teach the model to follow instructions; the loss is on responses only.",
    sft_report,
)


@dataclass(frozen=True)
class Chosen:
    """What was sampled and kept. Scores are the reward model's, averaged over the samples that have one
    (`sample_score`) and over those that were kept (`kept_score`).

    A sample that cannot be kept is counted once, by the first reason that applies: truncated, empty, failed. Of the
    kept prompts, `num_identical` had no choice, as all their usable samples are the same text; `num_tied` have
    different texts with the best score, and the first sample is kept.
    """

    num_prompts: int
    num_samples: int  # per prompt
    num_kept: int  # prompts with a sample to learn from
    num_truncated: int  # samples that reached max_new_tokens
    num_empty: int  # samples without text
    num_failed: int  # samples without a score
    num_identical: int
    num_tied: int
    sample_score: float
    kept_score: float


@dataclass(frozen=True)
class Trained:
    """Losses on held-out kept responses, in nats per response token."""

    num_steps: int
    heldout_loss_before: float
    heldout_loss: float


@dataclass(frozen=True)
class RejectionResults:
    """What was sampled and kept, and how training on it went."""

    chosen: Chosen
    trained: Trained
    overlong: Overlong | None = None  # of the prompts, for max_new_tokens
    overlong_kept: Overlong | None = None  # of the kept responses with their prompts, for seq_len
    sources: tuple[SourceRows, ...] = ()  # of the prompts, if rows are unusual


def rejection_report(stage: StageFolder) -> StageReport:
    figures, results = metric_figures(stage, REJECTION_PANELS), stage.results(RejectionResults)
    if results is None:
        return StageReport((stage_block(stage, (), figures),))
    chosen = results.chosen
    kept, before = number(chosen.kept_score), number(chosen.sample_score)
    detail = f"by the reward model, {before} over all samples"
    return StageReport(
        (stage_block(stage, _rejection_facts(results), figures),),
        headlines=(headline_of(stage, "chosen.kept_score", "Kept samples' score", chosen.kept_score, kept, detail),),
        sentence=f"Rejection sampling learns from the best of {chosen.num_samples} samples of each of"
        f" {count(chosen.num_kept)} prompts.",
    )


def _rejection_facts(results: RejectionResults) -> list[tuple[str, str]]:
    chosen, trained = results.chosen, results.trained
    facts = [
        ("Prompts", count(chosen.num_prompts)),
        ("Samples per prompt", count(chosen.num_samples)),
        ("Prompts with a sample to learn from", count(chosen.num_kept)),
        *_not_kept(chosen),
        ("Reward model's score, all samples", number(chosen.sample_score)),
        ("Reward model's score, kept samples", number(chosen.kept_score)),
        ("Steps", count(trained.num_steps)),
        ("Held-out loss", f"{number(trained.heldout_loss_before)} → {number(trained.heldout_loss)}"),
    ]
    if results.overlong:
        facts.append(("Prompts read", str(results.overlong)))
    facts += [rows.fact for rows in results.sources]
    if results.overlong_kept:
        facts.append(("Kept samples with their prompts", str(results.overlong_kept)))
    return facts


def _not_kept(chosen: Chosen) -> list[tuple[str, str]]:
    """Returns why samples were not kept, and for how many prompts there was no choice."""
    counts = (
        ("Samples that reached max_new_tokens", chosen.num_truncated),
        ("Samples without text", chosen.num_empty),
        ("Samples without a score", chosen.num_failed),
        ("Prompts whose usable samples are all one text", chosen.num_identical),
        ("Prompts with several best samples", chosen.num_tied),
    )
    return [(what, count(num)) for what, num in counts if num]


REJECTION_REPORTER = StageReporter(
    "Rejection sampling",
    "The policy samples several responses per prompt and learns, as in SFT, from the one that the reward model scores"
    " highest.",
    rejection_report,
)
