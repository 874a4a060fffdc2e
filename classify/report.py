"""What the classify stage writes to results.json, and its part of a run's report."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from classify.metrics import LabelScore
from preferences.statistics.estimates import Interval
from stages.reports.parts import Cell, Part, Row, StageReport, StageReporter, Table
from stages.reports.run_folder import StageFolder
from stages.reports.stage_report import (
    GRADIENT_NORM,
    Panel,
    headline_of_share,
    metric_figures,
    stage_block,
    train_and_heldout,
)
from stages.reports.text import count, number, percent
from training.data import Overlong, SourceRows

PANELS = (
    Panel("Loss", "nats", train_and_heldout("loss")),
    Panel("Accuracy", "of texts, words or windows", train_and_heldout("accuracy"), is_share=True),
    GRADIENT_NORM,
)
TITLES = {
    "accuracy": "Accuracy",
    "macro_f1": "Macro F1",
    "f1": "F1",
    "precision": "Precision",
    "recall": "Recall",
    "exact_match": "Exact match",
    "answerable_exact_match": "Exact match, with an answer",
    "answerable_f1": "F1, with an answer",
    "unanswerable_f1": "Right that there is none",
}


@dataclass(frozen=True)
class ClassifyResults:
    """Loss in nats per text (`sequence`), tagged word (`token`) or window (`span`); `metrics` are on held-out rows,
    from 0 to 1, with 95% intervals (`classify.metrics`).
    """

    task: str
    heldout_loss: float
    heldout_loss_before: float
    num_steps: int
    num_examples: int
    num_heldout: int  # texts, sentences or questions
    labels: tuple[str, ...]
    metrics: Mapping[str, Interval]
    by_label: Mapping[str, LabelScore] = field(default_factory=dict)
    overlong: Overlong | None = None  # of the training data
    heldout_overlong: Overlong | None = None
    sources: tuple[SourceRows, ...] = ()  # of both, if rows are unusual


def report(stage: StageFolder) -> StageReport:
    figures = metric_figures(stage, PANELS)
    results = stage.results(ClassifyResults)
    if results is None:
        return StageReport((stage_block(stage, (), figures),))
    facts = [
        ("Task", results.task),
        ("Examples", count(results.num_examples)),
        ("Held-out rows", count(results.num_heldout)),
        ("Steps", count(results.num_steps)),
        ("Held-out loss before", number(results.heldout_loss_before)),
        ("Held-out loss after", number(results.heldout_loss)),
    ]
    facts += [
        (TITLES[name], f"{percent(share.mean)} ({percent(share.low)} to {percent(share.high)})")
        for name, share in results.metrics.items()
    ]
    for title, overlong in (("Training rows", results.overlong), ("Held-out rows too long", results.heldout_overlong)):
        if overlong:
            facts.append((title, str(overlong)))
    facts += [rows.fact for rows in results.sources]
    parts: list[Part] = [stage_block(stage, facts, figures)]
    if results.by_label:
        rows = tuple(
            Row((label,), tuple(map(Cell, (*map(percent, (of.precision, of.recall, of.f1)), count(of.num_gold)))))
            for label, of in results.by_label.items()
        )
        what = "type of entity" if results.task == "token" else "label"
        parts.append(Table(f"Held-out rows, by {what}", (what, "precision", "recall", "F1", "gold"), rows))
    name = "accuracy" if results.task == "sequence" else "f1"
    share = results.metrics[name]
    headline = headline_of_share(
        stage, f"metrics.{name}", f"Classifier: {TITLES[name]}", (share.mean, share.low, share.high), "held-out rows"
    )
    what = "an accuracy" if name == "accuracy" else "an F1"
    sentence = f"The classifier reaches {what} of {percent(share.mean)} on held-out rows."
    return StageReport(tuple(parts), headlines=(headline,), sentence=sentence)


REPORTER = StageReporter(
    "Classification", "An encoder is fine-tuned to label texts, to mark entities or to find answers.", report
)
