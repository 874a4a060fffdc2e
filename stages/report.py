"""What the report shows of a stage that has no page of its own: the numbers of its results."""

from stages.reports.parts import Facts, StageReport, StageReporter
from stages.reports.stage_folder import StageFolder
from stages.reports.text import label, number


def plain_reporter(name: str, about: str = "") -> StageReporter:
    """Shows every number and text at the top of results.json under its own name."""
    return StageReporter(name.replace("_", " ").capitalize(), about, plain_report)


def plain_report(stage: StageFolder) -> StageReport:
    facts = tuple(
        (name.replace("_", " ").capitalize(), number(value, 3) if isinstance(value, int | float) else label(value))
        for name, value in stage.raw_results.items()
        if isinstance(value, int | float | str)
    )
    return StageReport(parts=(Facts(facts),) if facts else ())
