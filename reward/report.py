"""What training a reward model writes to results.json, and its part of a run's report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

from preferences.statistics.estimates import Share
from stages.reports.parts import Headline, StageReport, StageReporter
from stages.reports.plots import Measured, interval_figure
from stages.reports.run_folder import StageFolder
from stages.reports.stage_report import (
    ROUTER_PANELS,
    Panel,
    fields_under,
    headline_of_share,
    metric_figures,
    stage_block,
    train_and_heldout,
)
from stages.reports.text import count, count_of, label, number, percent, share_ends
from training.data import Overlong, SourceRows

PANELS = (
    Panel("Loss", "nats per pair", train_and_heldout("loss")),
    Panel("Accuracy", "pairs ordered as the labelers did", train_and_heldout("accuracy"), is_share=True),
)


@dataclass(frozen=True)
class TieResults:
    """Davidson's ν, fitted to training pairs, and the log-likelihood of the held-out pairs under it (nats per pair)."""

    kind: str
    nu: float
    heldout_log_likelihood: float
    low: float
    high: float
    heldout_tie_share: float
    learned_nu: float | None = None


@dataclass(frozen=True)
class LabelerResults:
    """How often other labelers agree with a labeler (NaN if nobody else judged its tasks), and its rankings' weight."""

    accuracy: float
    num_pairs: int
    weight: float


@dataclass(frozen=True)
class RatingResults:
    """Results on ratings. `heldout_explained`: the share of their variance within judgments that scores explain; 1 is
    best.
    """

    ratings_per_score: float
    heldout_explained: float | None
    heldout_judgments: int


@dataclass(frozen=True)
class ObjectiveResults:
    """Results of one objective. PPO normalises rewards by `sample_score_mean` and `sample_score_std`."""

    heldout_accuracy: Share
    heldout_comparisons: int
    train_comparisons: int
    train_rankings: int
    score_shift: float
    sample_score_mean: float
    sample_score_std: float
    ties: TieResults
    labelers: Mapping[str, LabelerResults] = field(default_factory=dict)
    ratings: RatingResults | None = None


@dataclass(frozen=True)
class RewardResults:
    """Results of a reward model. With several objectives, each has its numbers in `objectives`, since their scores have
    no common unit; with one, they are here. The last two are set if the world knows the truth.
    """

    heldout_accuracy: Share
    heldout_comparisons: int
    train_comparisons: int
    train_rankings: int
    score_shift: float | None = None
    sample_score_mean: float | None = None
    sample_score_std: float | None = None
    ties: TieResults | None = None
    labelers: Mapping[str, LabelerResults] = field(default_factory=dict)
    ratings: RatingResults | None = None
    objectives: Mapping[str, ObjectiveResults] = field(default_factory=dict)
    gold_accuracy: Share | None = None
    human_pairs_accuracy: Share | None = None
    overlong: Overlong | None = None  # of the comparisons
    sources: tuple[SourceRows, ...] = ()  # of the rankings, if rows are unusual


def report(stage: StageFolder) -> StageReport:
    figures = metric_figures(stage, (*PANELS, *_objective_panels(stage), *ROUTER_PANELS))
    results = stage.results(RewardResults)
    if results is None:
        return StageReport((stage_block(stage, (), figures),))
    rows = _agreement(results)
    if rows:
        title, unit = "Reward model's agreement", "pairs of responses ordered alike; chance is 50%"
        figures.append(interval_figure(rows, title=title, unit=unit, name="reward-agreement", is_share=True))
    accuracy = results.heldout_accuracy
    pairs = count_of(accuracy.num_pairs, "held-out pair")
    reached = f"{percent(accuracy.mean)} ({share_ends(accuracy.low, accuracy.high)})"
    sentence = f"The reward model orders {reached} of {pairs} as the labelers did."
    return StageReport(
        (stage_block(stage, _facts(results), figures),),
        headlines=_headlines(stage, results),
        sentence=sentence if isfinite(accuracy.mean) else "",
    )


def _objective_panels(stage: StageFolder) -> list[Panel]:
    """Returns a chart per objective, if a reward model has several."""
    names = fields_under(stage, "accuracy")
    series = [train_and_heldout(f"accuracy/{name}") for name in names]
    unit = "pairs of this objective"
    return [Panel(f"Accuracy, {label(n)}", unit, own, is_share=True) for n, own in zip(names, series, strict=True)]


def _facts(results: RewardResults) -> list[tuple[str, str]]:
    facts = [
        ("Comparisons, train", count(results.train_comparisons)),
        ("Rankings, train", count(results.train_rankings)),
        ("Comparisons, held-out", count(results.heldout_comparisons)),
        ("Held-out pairs", count(results.heldout_accuracy.num_pairs)),
        ("Held-out accuracy", percent(results.heldout_accuracy.mean)),
    ]
    if results.overlong:
        facts.append(("Comparisons read", str(results.overlong)))
    facts += [rows.fact for rows in results.sources]
    if results.ties is not None:
        facts.append(("Log-likelihood of wins and ties, nats per pair", number(results.ties.heldout_log_likelihood, 4)))
    if results.ratings is not None:
        facts.append(("Ratings explained, held-out", percent(results.ratings.heldout_explained)))
    if results.sample_score_mean is not None:
        facts.append(("Score of samples, mean", number(results.sample_score_mean)))
        facts.append(("Score of samples, std", number(results.sample_score_std)))
    for name, own in results.objectives.items():
        own_share = own.heldout_accuracy
        ends = share_ends(own_share.low, own_share.high)
        text = f"{percent(own_share.mean)} of {count_of(own_share.num_pairs, 'pair')} (95%: {ends})"
        facts.append((f"Held-out accuracy, {label(name)}", text))
    return facts


def _agreement(results: RewardResults) -> Sequence[Measured]:
    """Returns how often the reward model orders two responses as others do."""
    shares = (
        ("labelers", "o", results.heldout_accuracy),
        ("gold", "s", results.gold_accuracy),
        ("people", "D", results.human_pairs_accuracy),
    )
    return [
        Measured(f"Reward model, {name}", "heldout", marker, share)
        for name, marker, share in shares
        if share is not None and isfinite(share.mean)
    ]  # fmt: skip


def _headlines(stage: StageFolder, results: RewardResults) -> tuple[Headline, ...]:
    headlines = []
    for name, title, share, what in (
        ("heldout_accuracy", "Reward model accuracy", results.heldout_accuracy, "held-out pair"),
        ("gold_accuracy", "Reward model, gold", results.gold_accuracy, "pair"),
        ("human_pairs_accuracy", "Reward model, people", results.human_pairs_accuracy, "pair"),
    ):
        if share is not None and isfinite(share.mean):
            span = (share.mean, share.low, share.high)
            headlines.append(headline_of_share(stage, name, title, span, count_of(share.num_pairs, what)))
    return tuple(headlines)


REPORTER = StageReporter(
    "Reward model", "A language model with a scalar head learns to order responses as the labelers did.", report
)
