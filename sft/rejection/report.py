"""What the report of a run shows of rejection sampling."""

from sft.rejection.results import Chosen, RejectionResults
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

PANELS = (Panel("Loss", "nats per token of the best samples", train_and_heldout("loss")), GRADIENT_NORM)


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
    """Why samples were not kept, and where there was nothing to choose."""
    found = (
        ("Samples that reached max_new_tokens", chosen.num_truncated),
        ("Samples without text", chosen.num_empty),
        ("Samples without a score", chosen.num_failed),
        ("Prompts whose usable samples are all one text", chosen.num_identical),
        ("Prompts with several best samples", chosen.num_tied),
    )
    return [(what, count(num)) for what, num in found if num]


REPORTER = StageReporter(
    "Rejection sampling",
    "The policy samples several responses per prompt and learns, as in SFT, from the one that the reward model scores"
    " highest.",
    report,
)
