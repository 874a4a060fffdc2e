"""What stages build their part of a run's report of."""

from math import isfinite

from stages.reports.parts import Headline
from stages.reports.stage_folder import StageFolder
from stages.reports.text import percent, share_ends


def headline_of_share(
    stage: StageFolder, field: str, title: str, share: tuple[float, float, float], detail: str = ""
) -> Headline:
    """A share, as (mean, low, high), that stands at `field` of a stage's results. Its interval is drawn."""
    mean, low, high = share
    file, source = f"{stage.name}/results.json", f"{field}.mean"
    has_interval = isfinite(low) and isfinite(high)
    ends = f"95% interval {share_ends(low, high)}" if has_interval else "no interval"
    text = ", ".join(part for part in (ends, detail) if part)
    bar = (low, mean, high) if has_interval else None
    return Headline(f"{stage.name}.{source}", file, source, mean, title, percent(mean), text, bar)


def headline_of(stage: StageFolder, field: str, title: str, value: float, text: str, detail: str) -> Headline:
    """A number that stands at `field` of a stage's results."""
    return Headline(f"{stage.name}.{field}", f"{stage.name}/results.json", field, value, title, text, detail)
