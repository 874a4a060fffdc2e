"""Charts as inline SVG: means with intervals, and scores against KL.

Matplotlib draws them with stand-in colours that become the page's CSS variables. So one drawing adapts to the page's
light, dark and print colours, its fonts, and the reader's screen width.
"""

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from preferences.statistics.estimates import Interval, Share
from stages.reports.parts import Figure, Key
from stages.reports.text import ends_of, kl_number, label, number, percent, share_ends

Floats = npt.NDArray[np.float64]

WIDE_SIZE = {"width": 420, "height": 280}
MARGINS = (44, 12, 36, 8)  # left, right, bottom, top
ROUND_STEPS = [1, 2, 2.5, 5, 10]  # between ticks, times a power of ten

# The CSS variables a chart may use; style.html.jinja gives each a value for light and for dark.
TONES = (
    "ink", "muted", "grid", "page", "train", "heldout",
    "pretrained", "sft", "best-of-n", "ppo", "other-1", "other-2", "other-3",
)  # fmt: skip
STAND_INS = {tone: f"#0101{number:02x}" for number, tone in enumerate(TONES, 1)}
VARIABLES = {stand_in: f"var(--{tone})" for tone, stand_in in STAND_INS.items()}

STYLE = {
    "svg.fonttype": "none",  # text stays text: selectable, in the page's font
    "svg.hashsalt": "heed",
    "text.parse_math": False,  # a "$" in a policy's name is a dollar
    "font.size": 11,
    "text.color": STAND_INS["ink"],
    "axes.labelcolor": STAND_INS["muted"],
    "axes.edgecolor": STAND_INS["grid"],
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": STAND_INS["grid"],
    "grid.linewidth": 0.8,
    "xtick.labelcolor": STAND_INS["muted"],
    "ytick.labelcolor": STAND_INS["muted"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
    "lines.solid_capstyle": "round",
}


def running_mean(values: Floats, window: int) -> Floats:
    """Return the mean of up to `window` values around each value, fewer at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    starts, ends = np.maximum(places - window // 2, 0), np.minimum(places + window // 2 + 1, len(values))
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts), dtype=np.float64)


def tone(name: str) -> str:
    """Return the stand-in colour for a CSS variable of the page."""
    return STAND_INS[name]


def set_ticks(axis: Any, num: int, *, whole: bool = False) -> None:
    """Set at most `num` ticks, at round values, on one of matplotlib's axes."""
    from matplotlib.ticker import MaxNLocator

    steps = [1, 2, 5, 10] if whole else ROUND_STEPS
    axis.set_major_locator(MaxNLocator(num, integer=whole, steps=steps))


def show_percent(axis: Any) -> None:
    """Label an axis of shares in percent, with as many digits as needed, and end it at 0% and 100%.

    Call it after everything is drawn and the margins are set.
    """
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.4g}%"))
    set_limits = axis.axes.set_xlim if axis.axis_name == "x" else axis.axes.set_ylim
    low, high = axis.axes.get_xlim() if axis.axis_name == "x" else axis.axes.get_ylim()
    set_limits(max(low, 0.0), min(high, 1.0))


def draw(
    paint: Callable[[Any], None], *, width: float, height: float, margins: tuple[float, ...], label: str, name: str
) -> Markup:
    """Draw one chart as an <svg> element.

    `paint` draws on matplotlib axes. `width`, `height` and `margins` (left, right, bottom, top) are in CSS pixels at
    the natural size; `label` is the text for screen readers; `name` keeps the chart's ids distinct from other charts'.
    """
    import matplotlib  # takes a second, and most commands draw nothing
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    left, right, bottom, top = margins
    # Start from the defaults, so that a user's own matplotlibrc does not change the report.
    style: dict[Any, Any] = {
        key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith("backend")
    }
    style.update(STYLE)
    with matplotlib.rc_context(style), warnings.catch_warnings():
        # Matplotlib's layout font may lack a glyph that the reader's browser has.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        FigureCanvasSVG(figure)
        sides = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
        paint(figure.add_axes(sides))
        buffer = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    return Markup(_for_page(buffer.getvalue(), label, name))  # ElementTree has escaped text and attributes


def _for_page(svg: str, label: str, name: str) -> str:
    """Turn Matplotlib's file into an element of an HTML page: no namespaces, no global styles, no clashing ids."""
    root = ElementTree.fromstring(svg)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.tail = None
        element.text = element.text if element.tag == "text" else None
        element.attrib = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
    links = [element.get("href", "") + element.get("clip-path", "") for element in root.iter()]
    used = {match for link in links for match in re.findall(r"#([\w.-]+)", link)}
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in ("style", "metadata") or (child.tag == "defs" and not len(child)):
                parent.remove(child)
        _rewrite(parent, used, name)
    box = root.attrib["viewBox"]
    root.attrib = {"class": "chart", "viewBox": box, "role": "img", "aria-label": label}
    return ElementTree.tostring(root, encoding="unicode")


def _rewrite(element: ElementTree.Element, used: set[str], name: str) -> None:
    attributes = element.attrib
    identity = attributes.pop("id", "")
    if identity in used:
        attributes["id"] = f"{name}-{identity}"
    for key in ("href", "clip-path"):
        if key in attributes:
            attributes[key] = attributes[key].replace("#", f"#{name}-")
    if "style" in attributes:
        attributes["style"] = _page_style(attributes["style"])
    for key in ("d", "x", "y", "transform"):
        if key in attributes:
            attributes[key] = re.sub(r"\d+\.\d+", lambda match: f"{float(match[0]):.2f}", attributes[key])
            attributes[key] = " ".join(attributes[key].split())


def _page_style(style: str) -> str:
    style = re.sub(r"#[0-9a-f]{6}", lambda match: VARIABLES[match[0]], style)
    style = re.sub(r"font-family:[^;]*;?\s*", "", style)
    # --text keeps the text readable on narrow screens, which shrink the drawing.
    return re.sub(r"font-size: ([\d.]+)px", r"font-size: calc(\1px * var(--text, 1))", style)


@dataclass(frozen=True)
class Measured:
    """A row of a dot-and-interval chart."""

    name: str
    tone: str
    marker: str
    mean: Interval | Share


def interval_figure(rows: Sequence[Measured], *, title: str, unit: str, name: str, is_share: bool = False) -> Figure:
    """Draw dots with 95% intervals, one row each, the first on top."""

    def value_of(row: Measured) -> str:
        return percent(row.mean.mean) if is_share else number(float(row.mean.mean))

    def paint(axes: Any) -> None:
        for place, row in enumerate(rows):
            y, mean, colour = len(rows) - 1 - place, row.mean.mean, tone(row.tone)
            axes.plot([row.mean.low, row.mean.high], [y, y], color=colour, linewidth=3, alpha=0.55)
            # An axis of shares ends at 100%, where there may be a dot.
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
    spoken = [
        f"{row.name} {value_of(row)} ({interval or 'no interval'})" for row, interval in zip(rows, ends, strict=True)
    ]
    svg = draw(
        paint, width=WIDE_SIZE["width"], height=48 * len(rows) + 40, margins=(26 + 6.4 * longest, 16, 26, 8), name=name,
        label=f"{title}, dots with 95% intervals: {'; '.join(spoken)}.",
    )  # fmt: skip
    return Figure(title, unit, (), svg, is_wide=True)


@dataclass(frozen=True)
class KLPoint:
    """A policy at its KL from the reference, with a `label` next to it; "" for none."""

    name: str
    kl_nats: float
    score: Interval
    label: str = ""


@dataclass(frozen=True)
class KLSeries:
    """Policies of one kind. `is_joined` joins them by a line; `is_band` shades their intervals."""

    key: str  # what the kind is called; "" for none
    tone: str
    marker: str
    points: tuple[KLPoint, ...] = ()
    is_joined: bool = False
    is_band: bool = False
    trail: tuple[Floats, Floats] | None = None  # values at single steps, shown with their running mean


def kl_figure(series: Sequence[KLSeries], *, title: str, unit: str, name: str, x_label: str) -> Figure:
    """Draw scores of policies against their KL from the reference, with 95% intervals."""

    def paint(axes: Any) -> None:
        for one in series:
            _paint_series(axes, one)
        axes.set_xlabel(x_label, loc="right")
        set_ticks(axes.xaxis, 6)
        set_ticks(axes.yaxis, 5)
        axes.margins(x=0.1, y=0.16)

    spoken = [
        f"{point.name} {number(point.score.mean)} at {kl_number(point.kl_nats)} nats"
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
