"""What DPO writes to results.json, and its part of a run's report."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite

from dpo.losses import DEFAULT, LOSSES, LabelResults
from preferences.statistics.estimates import Interval, Share
from reward.report import LabelerResults
from stages.reports.parts import Headline, StageReport, StageReporter
from stages.reports.run_folder import StageFolder
from stages.reports.stage_report import (
    TRAINING_PANELS,
    Panel,
    Series,
    headline_of,
    headline_of_share,
    metric_figures,
    stage_block,
    train_and_heldout,
)
from stages.reports.text import count, count_of, ends_of, number, percent
from training.data import Overlong, SourceRows


@dataclass(frozen=True)
class PairMeans:
    """Means over the untied held-out pairs, which all weigh the same: of the better response and of the worse.

    Log-probs are sums over a response in nats, before training (the reference's) and after it.
    """

    chosen_logprob_before: float
    chosen_logprob: float
    rejected_logprob_before: float
    rejected_logprob: float
    chosen_tokens: float
    rejected_tokens: float


@dataclass(frozen=True)
class DPOResults:
    """DPO's results. `heldout_accuracy` is the accuracy of implicit rewards; `margin` is the better response's implicit
    reward minus the worse's. `length_correlation` is between implicit rewards and lengths within comparisons, None if
    lengths or rewards do not differ. Of the `num_pairs` to learn from, `num_equal_pairs` have two equal responses,
    which no gradient can tell apart. `learned_nu` is set with ties = "davidson".
    """

    loss: str
    beta: float
    num_steps: int
    train_comparisons: int
    train_rankings: int
    heldout_comparisons: int
    heldout_accuracy: Share
    margin: Interval
    pairs: PairMeans | None
    length_correlation: float | None
    num_pairs: int
    num_equal_pairs: int
    learned_nu: float | None = None
    unpaired: LabelResults | None = None  # of a loss that learns from single responses
    labelers: Mapping[str, LabelerResults] = field(default_factory=dict)
    overlong: Overlong | None = None  # of the comparisons
    sources: tuple[SourceRows, ...] = ()  # of the rankings, if rows are unusual


def _both(field: str) -> tuple[Series, ...]:
    chosen, rejected = f"chosen_{field}", f"rejected_{field}"
    return (Series(chosen, "better or desirable", "ppo"), Series(rejected, "worse or undesirable", "sft"))


PANELS = (
    Panel("Loss", "per comparison", train_and_heldout("loss")),
    Panel(
        "Accuracy",
        "pairs whose implicit rewards are in the labelers' order; KTO: responses on the right side of the baseline",
        train_and_heldout("accuracy"),
        True,
    ),
    Panel("Margin", "implicit reward of the better response minus that of the worse", train_and_heldout("margin")),
    Panel("Implicit rewards", "β × log-ratio to the reference; SimPO: β × log-prob per token", _both("reward")),
    Panel("Baseline", "KTO's estimate of the KL from the reference, nats", train_and_heldout("baseline")),
    Panel("Log-probabilities", "nats per response; both may fall", _both("logprob")),
    Panel("SFT loss", "nats per token of the best responses", train_and_heldout("sft_loss")),
    *TRAINING_PANELS,
)


def title_of(loss: str) -> str:
    """Returns what reports call a policy that was trained with this `dpo.loss`."""
    return LOSSES.get(loss, DEFAULT).title


def report(stage: StageFolder) -> StageReport:
    figures = metric_figures(stage, PANELS)
    results = stage.results(DPOResults)
    if results is None:
        return StageReport((stage_block(stage, (), figures),))
    accuracy, pairs = results.heldout_accuracy.mean, count_of(results.heldout_accuracy.num_pairs, "held-out pair")
    title = title_of(results.loss)
    sentence = f"{title}'s implicit rewards order {percent(accuracy)} of {pairs} as the labelers did."
    if results.unpaired is not None:
        unpaired, right = results.unpaired, results.unpaired.heldout_accuracy
        detail = count_of(unpaired.heldout_desirable + unpaired.heldout_undesirable, "held-out label")
        span = (right.mean, right.low, right.high)
        headlines: tuple[Headline, ...] = (
            headline_of_share(stage, "unpaired.heldout_accuracy", f"{title}'s accuracy", span, detail),
        )
        sentence = f"{title} puts {percent(right.mean)} of {detail} on the right side of the baseline."
    else:
        headlines, sentence = _headlines(stage, results), sentence if isfinite(accuracy) else ""
    return StageReport((stage_block(stage, _facts(results), figures),), headlines=headlines, sentence=sentence)


def _facts(results: DPOResults) -> list[tuple[str, str]]:
    facts = [("Loss", f"{results.loss.replace('_', ' ')}, β = {results.beta:g}"), ("Steps", count(results.num_steps))]
    if results.unpaired is None:
        facts += [
            ("Comparisons, train", count(results.train_comparisons)),
            ("Rankings, train", count(results.train_rankings)),
            ("Comparisons, held-out", count(results.heldout_comparisons)),
        ]
    if results.unpaired is None or isfinite(results.heldout_accuracy.mean):
        facts += [
            ("Held-out accuracy", percent(results.heldout_accuracy.mean)),
            ("Held-out margin", f"{number(results.margin.mean)} (95% {ends_of(results.margin) or 'unknown'})"),
        ]
    if results.pairs is not None:
        means = results.pairs
        facts += [
            ("Log-prob of the better, nats", _change(means.chosen_logprob_before, means.chosen_logprob)),
            ("Log-prob of the worse, nats", _change(means.rejected_logprob_before, means.rejected_logprob)),
            (
                "Tokens of the better and the worse",
                f"{number(means.chosen_tokens, 1)} and {number(means.rejected_tokens, 1)}",
            ),
        ]
    if results.unpaired is not None:
        of_labels = results.unpaired
        facts += [
            (
                "Desirable and undesirable responses, train",
                f"{of_labels.train_desirable:,.5g} and {of_labels.train_undesirable:,.5g}",
            ),
            (
                "Desirable and undesirable labels, held-out",
                f"{count(of_labels.heldout_desirable)} and {count(of_labels.heldout_undesirable)}",
            ),
            (
                "Held-out responses on the right side of the baseline",
                f"{percent(of_labels.heldout_accuracy.mean)} (95% {ends_of(of_labels.heldout_accuracy) or 'unknown'})",
            ),
            ("Baseline (KL), nats", number(of_labels.baseline)),
        ]
    if results.length_correlation is not None:
        facts.append(("Correlation of implicit reward and length", number(results.length_correlation)))
    if results.num_equal_pairs:
        facts.append(("Pairs of equal responses", f"{count(results.num_equal_pairs)} of {count(results.num_pairs)}"))
    if results.learned_nu is not None:
        facts.append(("Odds of a tie between equal rewards", number(results.learned_nu)))
    if results.overlong:
        facts.append(("Rows read" if results.unpaired else "Comparisons read", str(results.overlong)))
    facts += [rows.fact for rows in results.sources]
    return facts


def _change(before: float, after: float) -> str:
    return f"{number(before, 1)} → {number(after, 1)}"


def _headlines(stage: StageFolder, results: DPOResults) -> tuple[Headline, ...]:
    share = results.heldout_accuracy
    if not isfinite(share.mean):
        return ()
    span, detail = (share.mean, share.low, share.high), count_of(share.num_pairs, "held-out pair")
    margin, about = results.margin.mean, "of implicit rewards on held-out pairs"
    return (
        headline_of_share(stage, "heldout_accuracy", f"{title_of(results.loss)}'s accuracy", span, detail),
        headline_of(stage, "margin.mean", f"{title_of(results.loss)}'s margin", margin, number(margin), about),
    )


def _head(stage: StageFolder) -> tuple[str, str]:
    section = stage.job.get("dpo")
    name = str(section.get("loss", "")) if isinstance(section, Mapping) else ""
    loss = LOSSES.get(name, DEFAULT)
    return loss.title, loss.summary


REPORTER = StageReporter("DPO", DEFAULT.summary, report, _head)
