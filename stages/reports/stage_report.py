"""Building blocks for a stage's part of a run's report: headlines, facts, training curves, or plain numbers.

Curves and totals over training come from a stage's metrics.jsonl.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

import numpy as np

from stages.reports.parts import Columns, Facts, Figure, Headline, Key, StageReport, StageReporter
from stages.reports.plots import Floats, draw, running_mean, set_ticks, show_percent, tone
from stages.reports.run_folder import StageFolder
from stages.reports.text import count, duration, label, number, percent, share_ends

CURVE_SIZE = {"width": 340, "height": 200}
MAX_POINTS = 600  # more would only make the page heavier
SMALL = 0.01  # below it, a number is shown with significant digits
FEW_POINTS = 30  # a curve with up to this many points shows them


@dataclass(frozen=True)
class Series:
    """One field of metrics.jsonl: a curve, or dots if it is measured only now and then."""

    field: str
    name: str = "train"
    tone: str = "train"
    is_sparse: bool = False


@dataclass(frozen=True)
class Panel:
    """One chart of a stage's metrics. Shares are shown in percent."""

    title: str
    unit: str
    series: tuple[Series, ...]
    is_share: bool = False


def train_and_heldout(field: str) -> tuple[Series, Series]:
    """Return the series of a training metric, and of the same metric on held-out data, measured now and then."""
    return Series(field), Series(f"heldout_{field}", "held-out", "heldout", is_sparse=True)


ROUTER_PANELS = (  # of a mixture of experts
    Panel("Largest load of an expert", "of any layer, 1 is an even share", (Series("router_max_load"),)),
    Panel("Experts without a token", "in all layers, per step", (Series("router_dead_experts"),)),
    Panel("Entropy of routes", "of routers' scores, nats per token", (Series("router_entropy"),)),
    Panel("Balance loss of routers", "experts per token is an even load", (Series("router_aux_loss"),)),
    Panel("Z-loss of routers", "", (Series("router_z_loss"),)),
)
TRAINING_PANELS = (Panel("Gradient norm", "", (Series("gradient_norm"),)), *ROUTER_PANELS)


def stage_block(
    stage: StageFolder, facts: Sequence[tuple[str, str]], figures: Sequence[Figure], *, in_a_row: bool = False
) -> Columns:
    """Return a stage's facts, including those about training and its duration, next to its figures."""
    speeds = [line["tokens_per_second"] for line in stage.metrics if line.get("tokens_per_second") is not None]
    all_facts = [*facts]
    if stage.trained:
        all_facts.append(("Trained", stage.trained))
    if speeds:
        all_facts.append(("Tokens per second, median", count(median(speeds))))
    if any("failed_scores" in line for line in stage.metrics):
        failed = sum(line.get("failed_scores") or 0 for line in stage.metrics)
        all_facts.append(("Responses without a score", count(int(failed))))
    all_facts.append(("Time", duration(stage.seconds)))
    return Columns((Facts(tuple(all_facts), in_a_row), *figures), "grid")


def metric_figures(stage: StageFolder, panels: Sequence[Panel], x_label: str = "step", group: str = "") -> list[Figure]:
    """Return a stage's curves, without those that its metrics lack. Each group on a page needs its own name."""
    prefix = "-".join(name for name in (stage.name, group) if name)
    figures = [_curves(panel, stage, f"{prefix}-{place}", x_label) for place, panel in enumerate(panels)]
    return [figure for figure in figures if figure is not None]


def fields_under(stage: StageFolder, prefix: str) -> list[str]:
    """Return NAME of each metric called "PREFIX/NAME"."""
    fields = dict.fromkeys(field for line in stage.metrics for field in line)
    return [field.split("/", 1)[1] for field in fields if field.startswith(f"{prefix}/")]


def _points(metrics: Sequence[Mapping[str, Any]], field: str) -> tuple[Floats, Floats]:
    """Return steps and finite values of a field, thinned to at most MAX_POINTS by averaging neighbours."""
    pairs = [(line.get("step"), line.get(field)) for line in metrics]
    kept = [(x, y) for x, y in pairs if isinstance(x, int | float) and isinstance(y, int | float)]
    points = np.array(kept, dtype=np.float64).reshape(-1, 2)
    if len(points) > MAX_POINTS:
        points = np.array([part.mean(axis=0) for part in np.array_split(points, MAX_POINTS)])
    return points[:, 0], points[:, 1]


def _curves(panel: Panel, stage: StageFolder, name: str, x_label: str) -> Figure | None:
    drawn = [(series, *_points(stage.metrics, series.field)) for series in panel.series]
    drawn = [(series, xs, ys) for series, xs, ys in drawn if len(xs) > 0]
    if not drawn:
        return None
    show = percent if panel.is_share else _significant

    def paint(axes: Any) -> None:
        for series, xs, ys in drawn:
            _curve(axes, series, xs, ys)
        axes.set_xlabel(x_label, loc="right")
        set_ticks(axes.xaxis, 5, whole=True)
        set_ticks(axes.yaxis, 4)
        axes.margins(x=0.02)
        if panel.is_share:
            show_percent(axes.yaxis)

    parts = [f"{series.name} from {show(ys[0])} to {show(ys[-1])}" for series, _, ys in drawn]
    num_steps = number(int(drawn[0][1][-1]))
    spoken = f"Curves of {stage.name}, {panel.title.lower()}: {'; '.join(parts)}; {num_steps} steps."
    svg = draw(paint, **CURVE_SIZE, margins=(44, 10, 34, 8), name=name, label=spoken)
    keys = tuple(
        Key(series.tone, "o" if series.is_sparse else "line", f"{series.name} {show(ys[-1])}")
        for series, _, ys in drawn
    )
    return Figure(panel.title, panel.unit, keys, svg)


def _significant(value: float) -> str:
    """Format a number with two decimals, or with two significant digits if two decimals would show nothing of it."""
    value = float(value)
    return number(value) if value == 0 or abs(value) >= SMALL else f"{value:.2g}".replace("-", "\u2212")


def _curve(axes: Any, series: Series, xs: Floats, ys: Floats) -> None:
    colour = tone(series.tone)
    if series.is_sparse or len(xs) < FEW_POINTS:
        axes.plot(xs, ys, "o-", color=colour, markersize=4 if len(xs) < 40 else 0, linewidth=1.6)
        return
    if np.ptp(ys) == 0:  # a running mean would differ by rounding, and the axis would show nothing else
        axes.plot(xs, ys, color=colour)
        return
    axes.plot(xs, ys, color=colour, linewidth=0.8, alpha=0.35)
    axes.plot(xs, running_mean(ys, max(3, len(xs) // 20)), color=colour)


def headline_of_share(
    stage: StageFolder,
    field: str,
    title: str,
    share: tuple[float, float, float],
    detail: str = "",
    interval: str = "95% interval",
) -> Headline:
    """Return the card of a share, as (mean, low, high), from `field` of a stage's results. Its interval is drawn;
    `interval` says what it is.
    """
    mean, low, high = share
    file, source = f"{stage.name}/results.json", f"{field}.mean"
    has_interval = isfinite(low) and isfinite(high)
    ends = f"{interval} {share_ends(low, high)}" if has_interval else "no interval"
    text = ", ".join(part for part in (ends, detail) if part)
    bar = (low, mean, high) if has_interval else None
    return Headline(f"{stage.name}.{source}", file, source, mean, title, percent(mean), text, bar)


def headline_of(stage: StageFolder, field: str, title: str, value: float, text: str, detail: str) -> Headline:
    """Return the card of a number from `field` of a stage's results."""
    return Headline(f"{stage.name}.{field}", f"{stage.name}/results.json", field, value, title, text, detail)


def plain_reporter(name: str) -> StageReporter:
    """Return a reporter that shows every number and text at the top level of results.json under its own name."""
    return StageReporter(name.replace("_", " ").capitalize(), "", plain_report)


def plain_report(stage: StageFolder) -> StageReport:
    facts = tuple(
        (name.replace("_", " ").capitalize(), number(value, 3) if isinstance(value, int | float) else label(value))
        for name, value in stage.raw_results.items()
        if isinstance(value, int | float | str)
    )
    return StageReport(parts=(Facts(facts),) if facts else ())
