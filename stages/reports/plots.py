"""Charts of results: means with intervals, scores against KL, and how often a model is as right as it is sure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from preferences.statistics.estimates import Interval, Share
from stages.reports.parts import Figure, Key
from stages.reports.svg import Floats, draw, running_mean, set_ticks, show_percent, tone
from stages.reports.text import ends_of, label, number, percent, share_ends

WIDE_SIZE = {"width": 420, "height": 280}
MARGINS = (44, 12, 36, 8)


@dataclass(frozen=True)
class Measured:
    """A row of a dot-and-interval chart."""

    name: str
    tone: str
    marker: str
    mean: Interval | Share


def interval_figure(rows: Sequence[Measured], *, title: str, unit: str, name: str, is_share: bool = False) -> Figure:
    """Dots with 95% intervals, one row each, the first on top."""

    def value_of(row: Measured) -> str:
        return percent(row.mean.mean) if is_share else number(float(row.mean.mean))

    def paint(axes: Any) -> None:
        for place, row in enumerate(rows):
            y, mean, colour = len(rows) - 1 - place, row.mean.mean, tone(row.tone)
            axes.plot([row.mean.low, row.mean.high], [y, y], color=colour, linewidth=3, alpha=0.55)
            # An axis of shares ends at 100%, where a dot may stand.
            axes.plot([mean], [y], row.marker, color=colour, markersize=8, markeredgecolor=tone("page"), clip_on=False)
            axes.annotate(value_of(row), (mean, y), (0, 8), textcoords="offset points", ha="center", va="bottom")
        axes.set_yticks(range(len(rows)), [label(row.name) for row in reversed(rows)])
        axes.tick_params(axis="y", labelcolor=tone("ink"), pad=8)
        axes.set_ylim(-0.5, len(rows) - 0.3)
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")
        set_ticks(axes.xaxis, 5)
        axes.margins(x=0.12)
        if is_share:
            show_percent(axes.xaxis)

    longest = max(len(label(row.name)) for row in rows)
    ends = [share_ends(row.mean.low, row.mean.high) if is_share else ends_of(row.mean) for row in rows]
    spoken = [f"{row.name} {value_of(row)} ({found or 'no interval'})" for row, found in zip(rows, ends, strict=True)]
    svg = draw(
        paint, width=WIDE_SIZE["width"], height=48 * len(rows) + 40, margins=(26 + 6.4 * longest, 16, 26, 8), name=name,
        label=f"{title}, dots with 95% intervals: {'; '.join(spoken)}.",
    )  # fmt: skip
    return Figure(title, unit, (), svg, is_wide=True)


@dataclass(frozen=True)
class KLPoint:
    """A policy at its KL from the reference. `label` stands next to it; "" for none."""

    name: str
    kl_nats: float
    score: Interval
    label: str = ""


@dataclass(frozen=True)
class KLSeries:
    """Policies of one kind. They are joined by a line where `line` has no other points (x, y) of its own.

    `band` shades their intervals; `shaded` is a range of KL.
    """

    key: str  # what the kind is called; "" for none
    tone: str
    marker: str
    points: tuple[KLPoint, ...] = ()
    line: tuple[Floats, Floats] | None = None
    is_joined: bool = False
    is_band: bool = False
    trail: tuple[Floats, Floats] | None = None  # of single steps, shown with their running mean
    shaded: tuple[float, float] | None = None


def kl_figure(
    series: Sequence[KLSeries], *, title: str, unit: str, name: str, x_label: str, zero_line: bool = False
) -> Figure:
    """Scores of policies against their KL from the reference, with 95% intervals."""

    def paint(axes: Any) -> None:
        for one in series:
            _paint_series(axes, one)
        if zero_line:
            axes.axhline(0, color=tone("muted"), linewidth=1, linestyle=(0, (4, 3)))
        axes.set_xlabel(x_label, loc="right")
        set_ticks(axes.xaxis, 6)
        set_ticks(axes.yaxis, 5)
        axes.margins(x=0.1, y=0.16)

    spoken = [
        f"{point.name} {number(point.score.mean)} at {number(point.kl_nats, 1)} nats"
        for one in series
        if not one.is_joined
        for point in one.points
    ]
    svg = draw(paint, **WIDE_SIZE, margins=MARGINS, name=name, label=f"{title}: {'; '.join(spoken)}.")
    keys = tuple(Key(one.tone, "line", one.key) for one in series if one.key)
    return Figure(title, unit, keys, svg, is_wide=True)


def _paint_series(axes: Any, series: KLSeries) -> None:
    colour = tone(series.tone)
    xs, ys = [point.kl_nats for point in series.points], [point.score.mean for point in series.points]
    if series.trail is not None:
        window = max(1, len(series.trail[0]) // 12)
        axes.plot(*series.trail, "o", color=colour, markersize=2.5, alpha=0.35, markeredgewidth=0)
        axes.plot(*(running_mean(values, window) for values in series.trail), color=colour)
    if series.is_band:
        lows, highs = ([getattr(point.score, end) for point in series.points] for end in ("low", "high"))
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.15, linewidth=0)
    if series.is_joined:
        axes.plot(xs, ys, "o-", color=colour, markersize=3.5)
    if series.line is not None:
        axes.plot(*series.line, color=colour)
    if series.shaded is not None:
        axes.axvspan(*series.shaded, color=colour, alpha=0.12, linewidth=0)
    for point in series.points:
        if series.is_joined:
            if point.label:
                axes.annotate(
                    point.label, (point.kl_nats, point.score.mean), (-4, 3), textcoords="offset points", ha="right",
                    va="bottom", color=tone("muted"), fontsize=9,
                )  # fmt: skip
        else:
            _paint_point(axes, point, colour, series.marker)


def _paint_point(axes: Any, point: KLPoint, colour: str, marker: str) -> None:
    x, y = point.kl_nats, point.score.mean
    low, high = (y if math.isnan(end) else end for end in (point.score.low, point.score.high))
    axes.plot([x, x], [low, high], color=colour, linewidth=2.5, alpha=0.55)
    axes.plot([x], [y], marker, color=colour, markersize=8, markeredgecolor=tone("page"), zorder=3)
    if point.label:
        # Curves rise from the reference, so its label goes below.
        is_start = x == 0
        axes.annotate(
            point.label, (x, min(low, y) if is_start else max(high, y)), (0, -6 if is_start else 6),
            textcoords="offset points", ha="center", va="top" if is_start else "bottom", zorder=4,
        )  # fmt: skip
