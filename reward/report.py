"""What training a reward model writes to results.json, and its part of a run's report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan

from preferences.statistics.estimates import Interval, Share
from stages.reports.parts import Headline, StageReport, StageReporter
from stages.reports.plots import Measured, interval_figure
from stages.reports.run_folder import StageFolder
from stages.reports.stage_report import (
    Panel,
    fields_under,
    headline_of,
    headline_of_share,
    metric_figures,
    stage_block,
    train_and_heldout,
)
from stages.reports.text import count, count_of, label, number, percent
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

    heldout_accuracy: float
    heldout_pairs: int
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

    heldout_accuracy: float
    heldout_pairs: int
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


@dataclass(frozen=True)
class StepBin:
    """Steps with similar scores: their mean score, and the share of them that is right."""

    mean_chance: float
    right_share: float
    num_steps: int


@dataclass(frozen=True)
class StepResults:
    """Results of a reward model that scores steps, on the labelled steps of problems that training did not see.

    `first_error`: among responses with a wrong step, how often the first score below ½ is that of the first wrong step;
    `first_error_by_chance` is how often a step drawn at random would be it. `no_error`: among the others, how often no
    score is below ½. `log_loss` is in nats per step. `overconfidence` is the mean score minus the share of right steps.
    """

    step_separator: str
    train_responses: int
    train_steps: int
    heldout_responses: int
    heldout_steps: int
    heldout_problems: int
    right_share: float
    step_accuracy: Interval
    auc: Interval
    first_error: Interval
    first_error_by_chance: float
    num_with_error: int
    no_error: Interval
    num_without_error: int
    log_loss: Interval
    overconfidence: Interval
    calibration_error: float
    bins: tuple[StepBin, ...]
    overlong: Overlong | None = None  # of the responses
    sources: tuple[SourceRows, ...] = ()


STEP_PANELS = (
    Panel("Loss", "nats per step", train_and_heldout("loss")),
    Panel("Accuracy", "steps judged as their labels say", train_and_heldout("accuracy"), is_share=True),
)


def _report_of_steps(stage: StageFolder, results: StepResults) -> StageReport:
    error, guess = results.first_error, results.first_error_by_chance
    spans = {
        "Step accuracy": (results.step_accuracy, f"of {count_of(results.heldout_steps, 'step')}"),
        "First error found": (error, f"of {results.num_with_error:,}; by chance {percent(guess)}"),
        "No error found where there is none": (results.no_error, f"of {results.num_without_error:,}"),
        "Right above wrong steps (AUC)": (results.auc, ""),
    }
    facts = [
        ("Responses, train", count(results.train_responses)),
        ("Labelled steps, train", count(results.train_steps)),
        ("Held-out problems", count(results.heldout_problems)),
        ("Right steps, held-out", percent(results.right_share)),
        *((name, f"{percent(of.mean)} ({percent(of.low)} to {percent(of.high)}) {more}".strip())
          for name, (of, more) in spans.items() if isfinite(of.mean)),
        ("Log loss, nats per step", number(results.log_loss.mean, 4)),
        ("Mean score minus share of right steps", number(results.overconfidence.mean, 3)),
        ("Calibration error", number(results.calibration_error, 3)),
    ]  # fmt: skip
    if results.overlong:
        facts.append(("Responses read", str(results.overlong)))
    facts += [rows.fact for rows in results.sources]
    sentence = (
        f"The reward model finds the first wrong step of {percent(error.mean)} of the"
        f" {count_of(results.num_with_error, 'held-out response')} that have one."
    )
    headlines = [headline_of_share(
        stage, "first_error", "First error found", (error.mean, error.low, error.high), f"by chance {percent(guess)}"
    )] if isfinite(error.mean) else []  # fmt: skip
    block = stage_block(stage, facts, metric_figures(stage, STEP_PANELS))
    return StageReport((block,), headlines=tuple(headlines), sentence=sentence if headlines else "")


def report(stage: StageFolder) -> StageReport:
    steps = stage.results(StepResults) if "step_separator" in stage.raw_results else None
    if steps is not None:
        return _report_of_steps(stage, steps)
    figures = metric_figures(stage, (*PANELS, *_objective_panels(stage)))
    results = stage.results(RewardResults)
    if results is None:
        return StageReport((stage_block(stage, (), figures),))
    rows = _agreement(results)
    if rows:
        title, unit = "Reward model's agreement", "pairs of responses ordered alike; chance is 50%"
        figures.append(interval_figure(rows, title=title, unit=unit, name="reward-agreement", is_share=True))
    accuracy, pairs = results.heldout_accuracy, count_of(results.heldout_pairs, "held-out pair")
    sentence = f"The reward model orders {percent(accuracy)} of {pairs} as the labelers did."
    return StageReport(
        (stage_block(stage, _facts(results), figures),),
        headlines=_headlines(stage, results),
        sentence=sentence if isfinite(accuracy) else "",
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
        ("Held-out pairs", count(results.heldout_pairs)),
        ("Held-out accuracy", percent(results.heldout_accuracy)),
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
        text = f"{percent(own.heldout_accuracy)} of {count_of(own.heldout_pairs, 'pair')}"
        facts.append((f"Held-out accuracy, {label(name)}", text))
    return facts


def _agreement(results: RewardResults) -> Sequence[Measured]:
    """Returns how often the reward model orders two responses as others do."""
    labelers = Share(results.heldout_accuracy, nan, nan, results.heldout_pairs, results.heldout_comparisons)
    shares = (
        ("labelers", "o", labelers),
        ("gold", "s", results.gold_accuracy),
        ("people", "D", results.human_pairs_accuracy),
    )
    return [
        Measured(f"Reward model, {name}", "heldout", marker, share)
        for name, marker, share in shares
        if share is not None and isfinite(share.mean)
    ]  # fmt: skip


def _headlines(stage: StageFolder, results: RewardResults) -> tuple[Headline, ...]:
    headlines, accuracy = [], results.heldout_accuracy
    if isfinite(accuracy):
        detail = f"of {count_of(results.heldout_pairs, 'held-out pair')}, ordered as labelers did"
        title = "Reward model accuracy"
        headlines.append(headline_of(stage, "heldout_accuracy", title, accuracy, percent(accuracy), detail))
    for name, title, share in (
        ("gold_accuracy", "Reward model, gold", results.gold_accuracy),
        ("human_pairs_accuracy", "Reward model, people", results.human_pairs_accuracy),
    ):
        if share is not None and isfinite(share.mean):
            span = (share.mean, share.low, share.high)
            headlines.append(headline_of_share(stage, name, title, span, count_of(share.num_pairs, "pair")))
    return tuple(headlines)


REPORTER = StageReporter(
    "Reward model", "A language model with a scalar head learns to order responses as the labelers did.", report
)
