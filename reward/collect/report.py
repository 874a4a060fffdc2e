"""What the report of a run shows of collecting preferences."""

from math import isfinite

from reward.collect.results import CollectResults
from stages.reports.parts import StageReport, StageReporter
from stages.reports.plots import Measured, interval_figure
from stages.reports.run_folder import StageFolder
from stages.reports.stage_report import headline_of_share, stage_block
from stages.reports.text import count, count_of, label, percent


def report(stage: StageFolder) -> StageReport:
    results = stage.results(CollectResults)
    if results is None:
        return StageReport((stage_block(stage, (), ()),))
    facts = (
        ("Prompts", count(results.num_prompts)),
        ("Responses per prompt", count(results.responses_per_prompt)),
        ("Judgments", count(results.num_judgments)),
        ("Ties", percent(results.tie_share)),
        ("Labelers", ", ".join(label(name) for name in results.labelers)),
        *((("Prompts read", str(results.overlong)),) if results.overlong else ()),
        *(rows.fact for rows in results.sources),
    )
    rows = [
        Measured(name, "muted", marker, share)
        for name, marker, share in (
            ("Labelers, each other", "o", results.agreement),
            ("Labelers, gold", "s", results.gold_accuracy),
        )
        if isfinite(share.mean)
    ]
    unit = "pairs of responses ordered alike; chance is 50%"
    figures = [interval_figure(rows, title="Agreement", unit=unit, name="agreement", is_share=True)] if rows else []
    found = results.agreement
    span = (found.mean, found.low, found.high)
    headlines = (
        [headline_of_share(stage, "agreement", "Labelers agree", span, count_of(found.num_pairs, "pair"))]
        if isfinite(found.mean)
        else []
    )
    return StageReport((stage_block(stage, facts, figures),), headlines=tuple(headlines))


REPORTER = StageReporter(
    "Collecting preferences", "Labelers rank several responses of the SFT policy to each prompt.", report
)
