"""What rejection sampling writes to results.json, and its part of a run's report."""

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
from stages.reports.text import count, number
from training.data import Overlong, SourceRows

PANELS = (Panel("Loss", "nats per token of the best samples", train_and_heldout("loss")), GRADIENT_NORM)


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


def report(stage: StageFolder) -> StageReport:
    figures, results = metric_figures(stage, PANELS), stage.results(RejectionResults)
    if results is None:
        return StageReport((stage_block(stage, (), figures),))
    chosen = results.chosen
    kept, before = number(chosen.kept_score), number(chosen.sample_score)
    detail = f"by the reward model, {before} over all samples"
    return StageReport(
        (stage_block(stage, _facts(results), figures),),
        headlines=(headline_of(stage, "chosen.kept_score", "Kept samples' score", chosen.kept_score, kept, detail),),
        sentence=f"Rejection sampling learns from the best of {chosen.num_samples} samples of each of"
        f" {count(chosen.num_kept)} prompts.",
    )


def _facts(results: RejectionResults) -> list[tuple[str, str]]:
    chosen, trained = results.chosen, results.trained
    facts = [
        ("Prompts", count(chosen.num_prompts)),
        ("Samples per prompt", count(chosen.num_samples)),
        ("Prompts with a sample to learn from", count(chosen.num_kept)),
        *_rest(chosen),
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


def _rest(chosen: Chosen) -> list[tuple[str, str]]:
    """Returns why samples were not kept, and for how many prompts there was no choice."""
    counts = (
        ("Samples that reached max_new_tokens", chosen.num_truncated),
        ("Samples without text", chosen.num_empty),
        ("Samples without a score", chosen.num_failed),
        ("Prompts whose usable samples are all one text", chosen.num_identical),
        ("Prompts with several best samples", chosen.num_tied),
    )
    return [(what, count(num)) for what, num in counts if num]


REPORTER = StageReporter(
    "Rejection sampling",
    "The policy samples several responses per prompt and learns, as in SFT, from the one that the reward model scores"
    " highest.",
    report,
)
